"""Calls whose time says what a device can do at best: read, copy, change in place, from cache, and launch nothing.

Each probe moves a known number of bytes. torch's operations are one implementation, our SYCL kernels another where the
runtime is there; the ceilings take the best.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from replay.devices import Device
from replay.kernels.registry import lacking
from replay.kernels.sycl import NEEDS

HOT_BYTES = (256 << 10, 1 << 20, 4 << 20)


@dataclass(frozen=True)
class Probe:
    """``call`` moves ``nbytes`` (0 for a launch) of the kind ``term``; one timing makes ``calls`` of them."""

    term: str
    name: str
    nbytes: int
    calls: int
    call: Callable[[], object]


def probes(device: Device, nbytes: int) -> Iterator[Probe]:
    """Every probe that can run on the device. Buffers are made once and shared."""
    import torch

    def buffer(size: int) -> torch.Tensor:
        made = device.empty_bytes(size)
        made.fill_(1)
        return made

    a, b = buffer(nbytes), buffer(nbytes)
    words = a.view(torch.int64)
    # A read-only pass in torch: whatever reduces fastest.
    yield Probe("read", "torch.sum", nbytes, 1, words.sum)
    yield Probe("read", "torch.amax", nbytes, 1, a.view(torch.int32).amax)
    yield Probe("copy", "torch.copy_", 2 * nbytes, 1, lambda: b.copy_(a))
    yield Probe("inplace", "torch.bitwise_not_", 2 * nbytes, 1, words.bitwise_not_)
    for size in HOT_BYTES:
        hot = buffer(size).view(torch.int32)
        yield Probe("hot", f"torch.amax {size >> 10} KiB", size, 50, hot.amax)
        yield Probe("hot", f"torch.copy_ {size >> 10} KiB", 2 * size, 50, _copy(buffer(size), buffer(size)))
    tiny = buffer(64)
    yield Probe("launch", "torch.zero_", 0, 200, tiny.zero_)
    if device.kind != "cuda" and not any(lacking(NEEDS)):
        from replay.kernels.sycl import bandwidth

        yield from bandwidth.probes(device, a, b, [buffer(size) for size in HOT_BYTES])


def _copy(a: object, b: object) -> Callable[[], object]:
    return lambda: b.copy_(a)  # type: ignore[attr-defined]  # torch tensors, whose type is not imported here
