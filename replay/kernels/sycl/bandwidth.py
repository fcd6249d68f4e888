"""Our own SYCL probes of the memory ceilings."""

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING

from replay.devices import Device
from replay.kernels.sycl.runtime import Program

if TYPE_CHECKING:
    import torch

    from replay.kernels.probes import Probe

LINE_BYTES = 64
ITEMS = 256


def probes(device: Device, a: "torch.Tensor", b: "torch.Tensor", hot: list["torch.Tensor"]) -> Iterator["Probe"]:
    """Probes over torch's buffers of bytes; ``hot`` are the small ones."""
    from replay.kernels.probes import Probe

    sums = device.empty_bytes(8 * ITEMS)
    tensors = {"a": a, "b": b, "sums": sums}

    def program(kernel: str, nbytes: int, *args: str) -> Program:
        lines = ctypes.c_int64(nbytes // LINE_BYTES // ITEMS)
        return Program(device.kind).add("bandwidth", kernel, (ITEMS,), (1,), *args, lines)

    size = a.numel()
    read, copy = program("read_lines", size, "a", "sums"), program("copy_lines", size, "a", "b")
    change = program("change_lines", size, "a")
    yield Probe("read", "sycl read_lines", size, 1, lambda: read.run(tensors))
    yield Probe("copy", "sycl copy_lines", 2 * size, 1, lambda: copy.run(tensors))
    yield Probe("inplace", "sycl change_lines", 2 * size, 1, lambda: change.run(tensors))
    for small in hot:
        cached = program("read_lines", small.numel(), "a", "sums")
        name = f"sycl read_lines {small.numel() >> 10} KiB"
        yield Probe("hot", name, small.numel(), 50, lambda p=cached, s=small: p.run({"a": s, "sums": sums}))  # type: ignore[misc]  # bound now, not at the call
    nothing = Program(device.kind).add("bandwidth", "launch_nothing", (1,), (1,), "sums")
    yield Probe("launch", "sycl launch_nothing", 0, 200, lambda: nothing.run(tensors))
