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


def _program(device: Device, kernel: str, nbytes: int, *args: str) -> Program:
    lines = ctypes.c_int64(nbytes // LINE_BYTES // ITEMS)
    return Program(device.kind).add("bandwidth", kernel, (ITEMS,), (1,), *args, lines)


def large(device: Device, a: "torch.Tensor", b: "torch.Tensor", calls: int) -> Iterator["Probe"]:
    """Reading, copying and changing torch's buffers of bytes."""
    from replay.kernels.probes import Probe

    tensors, size = {"a": a, "b": b, "sums": device.empty_bytes(8 * ITEMS)}, a.numel()
    read, copy = _program(device, "read_lines", size, "a", "sums"), _program(device, "copy_lines", size, "a", "b")
    change = _program(device, "change_lines", size, "a")
    yield Probe("read", "sycl read_lines", size, calls, lambda: read.run(tensors))
    yield Probe("copy", "sycl copy_lines", 2 * size, calls, lambda: copy.run(tensors))
    yield Probe("inplace", "sycl change_lines", 2 * size, calls, lambda: change.run(tensors))


def small(device: Device, hot: list["torch.Tensor"]) -> Iterator["Probe"]:
    """Reading small buffers again and again, and launching nothing."""
    from replay.kernels.probes import Probe

    sums = device.empty_bytes(8 * ITEMS)
    for buffer in hot:
        cached = _program(device, "read_lines", buffer.numel(), "a", "sums")
        name = f"sycl read_lines {buffer.numel() >> 10} KiB"
        yield Probe("hot", name, buffer.numel(), 50, lambda p=cached, s=buffer: p.run({"a": s, "sums": sums}))  # type: ignore[misc]  # bound now, not at the call
    nothing = Program(device.kind).add("bandwidth", "launch_nothing", (1,), (1,), "sums")
    yield Probe("launch", "sycl launch_nothing", 0, 200, lambda: nothing.run({"sums": sums}))
