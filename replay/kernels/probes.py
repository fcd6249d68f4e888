"""Calls whose time says what a device can do at best: read, copy, change in place, from cache, multiply, launch nothing.

Each probe moves a known number of bytes, or does a known number of operations. torch's operations are one implementation, our
SYCL kernels another where the runtime is there; the ceilings take the best.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING

from replay.devices import SPIN_NS, Device
from replay.kernels.registry import lacking
from replay.kernels.sycl import NEEDS

if TYPE_CHECKING:
    import torch

CALLS_BYTES = 64 << 20  # a timing of a small buffer makes as many calls as move this much
WAKING_BYTES = 256 << 10
HOT_BYTES = (256 << 10, 1 << 20, 4 << 20)


def _hot_sizes(device: Device) -> tuple[int, ...]:
    """Buffers that stay in a cache; an accelerator's small ones show the launch and nothing else."""
    return HOT_BYTES if device.kind == "cpu" else (4 << 20, device.llc_bytes() // 8, device.llc_bytes() // 4)


@dataclass(frozen=True)
class Probe:
    """``call`` moves or computes ``amount`` (bytes, operations; 0 for a launch) of the kind ``term``; one timing makes
    ``calls`` of them."""

    term: str
    name: str
    amount: int
    calls: int
    call: Callable[[], object]


def probes(device: Device, nbytes: int) -> Iterator[Probe]:
    """Every probe that can run on the device. Buffers are made once and shared."""
    import torch

    yield from memory(device, nbytes)
    for size in _hot_sizes(device):
        hot = _buffer(device, size).view(torch.int32)
        yield Probe("hot", f"torch.amax {size >> 10} KiB", size, 50, hot.amax)
        yield Probe("hot", f"torch.copy_ {size >> 10} KiB", 2 * size, 50, _copy(_buffer(device, size), _buffer(device, size)))
    yield from _peaks(device)
    tiny = _buffer(device, 64)
    yield Probe("launch", "torch.zero_", 0, 200, tiny.zero_)
    if _runs_sycl(device):
        from replay.kernels.sycl import bandwidth, peak

        yield from peak.probes(device)
        yield from bandwidth.small(device, [_buffer(device, size) for size in _hot_sizes(device)])


def waker(device: Device) -> Callable[[], object]:
    """A little work for every thread that kernels on a CPU are run by: torch's, and then SYCL's for as long as torch's still spin
    in the hope of more (``SPIN_NS``). Whoever spins keeps a core from the others: with torch's last, kernels of ours had one core
    of two."""
    to, source = _buffer(device, WAKING_BYTES), _buffer(device, WAKING_BYTES)
    copy = _copy(to, source)
    if not _runs_sycl(device):
        return copy
    from replay.kernels.sycl import bandwidth

    read = next(bandwidth.small(device, [source])).call

    def wake() -> None:
        copy()
        spinning = perf_counter_ns() + SPIN_NS
        while perf_counter_ns() < spinning:
            read()

    return wake


def memory(device: Device, nbytes: int) -> Iterator[Probe]:
    """Reading, copying and changing in place, over buffers of so many bytes."""
    import torch

    a, b = _buffer(device, nbytes), _buffer(device, nbytes)
    words, calls = a.view(torch.int64), max(CALLS_BYTES // nbytes, 1)
    # A read-only pass in torch: whatever reduces fastest.
    yield Probe("read", "torch.sum", nbytes, calls, words.sum)
    yield Probe("read", "torch.amax", nbytes, calls, a.view(torch.int32).amax)
    yield Probe("copy", "torch.copy_", 2 * nbytes, calls, _copy(b, a))
    yield Probe("inplace", "torch.bitwise_not_", 2 * nbytes, calls, words.bitwise_not_)
    if _runs_sycl(device):
        from replay.kernels.sycl import bandwidth

        yield from bandwidth.large(device, a, b, calls)


def _runs_sycl(device: Device) -> bool:
    return device.kind != "cuda" and not any(lacking(NEEDS))


def _buffer(device: Device, size: int) -> "torch.Tensor":
    made = device.empty_bytes(size)
    made.fill_(1)
    return made


# Rows, depth and columns of a product in which arithmetic takes the time; a GPU needs more of it.
PRODUCT = {"cpu": (256, 1024, 512)}
LARGE_PRODUCT = (4096, 4096, 4096)


def _peaks(device: Device) -> Iterator[Probe]:
    """Dense products by torch: s8 × s8 → s32, and bf16."""
    import torch

    m, k, n = PRODUCT.get(device.kind, LARGE_PRODUCT)
    a, b = (torch.ones(shape, dtype=torch.int8, device=device.name) for shape in ((m, k), (k, n)))
    x, y = a.bfloat16(), b.bfloat16()
    turned = torch.ones((n, k), dtype=torch.int8, device=device.name).t()
    yield Probe("int8", "torch._int_mm", 2 * m * k * n, 1, lambda: torch._int_mm(a, b))
    yield Probe("int8", "torch._int_mm, columns", 2 * m * k * n, 1, lambda: torch._int_mm(a, turned))
    yield Probe("bf16", "torch.mm", 2 * m * k * n, 1, lambda: torch.mm(x, y))


def _copy(to: "torch.Tensor", source: "torch.Tensor") -> Callable[[], object]:
    return lambda: to.copy_(source)
