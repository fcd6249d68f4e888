"""Ceilings: the rates a device reaches at best, measured before and after everything that is held against them."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from time import perf_counter_ns
from typing import TYPE_CHECKING

import numpy as np

from replay.devices import Device
from replay.model import Ceilings, Interval, Value

if TYPE_CHECKING:
    from replay.kernels.probes import Probe

_clock = perf_counter_ns

CEILING_PASSES = 8
CEILING_ROUNDS, QUICK_ROUNDS = 11, 5  # eleven give an interval of 98.8 %, five their range but for the ends
CEILING_TRIALS = 2
SETTLE_NS = 300_000_000


class Ceiling:
    """Read, copy and in-place rates past the last-level cache, the rate out of cache, the peaks of int8 and bf16 products,
    and an empty launch.

    Each is the best of every implementation at hand, torch's and our own. The buffers are made once.
    """

    def __init__(self, device: Device, *, quick: bool) -> None:
        from replay.kernels.probes import probes

        self.device, self.rounds = device, QUICK_ROUNDS if quick else CEILING_ROUNDS
        self.probes = list(probes(device, CEILING_PASSES * device.llc_bytes()))

    def measure(self) -> Ceilings:
        """One calibration."""
        begin = _clock()
        while _clock() - begin < SETTLE_NS:  # a machine that was idle reads at half its rate for the first moments
            _time_one(self.device, self.probes[0].call, 1)

        def cost(probe: "Probe") -> float:
            """µs a byte, an operation, or a launch."""
            return float(np.median(times[probe])) / max(probe.amount, 1)

        # In rounds over all probes: what wanders within a second must show in an interval, not between two of them. After
        # the first rounds each term goes on with its quickest implementation alone.
        times: dict[Probe, list[float]] = {probe: [] for probe in self.probes}
        chosen = list(self.probes)
        for number in range(self.rounds):
            if number == CEILING_TRIALS:
                chosen = [
                    min((p for p in self.probes if p.term == term), key=cost)
                    for term in dict.fromkeys(p.term for p in self.probes)
                ]
            for probe in chosen:
                times[probe].append(_time_one(self.device, probe.call, probe.calls))
        rates: dict[str, Interval] = {}
        for probe in chosen:
            rates[probe.term] = _reached(probe, times[probe])
        return Ceilings(
            read_gbs=rates["read"], copy_gbs=rates["copy"], inplace_gbs=rates["inplace"], hot_gbs=rates["hot"],
            launch_us=rates["launch"], int8_gops=rates["int8"], bf16_gops=rates["bf16"],
            best_of={probe.term: probe.name for probe in chosen},
        )  # fmt: skip


def _time_one(device: Device, call: Callable[[], object], calls: int) -> float:
    """µs a call."""
    begin = _clock()
    for _ in range(calls):
        call()
    device.synchronize()
    return (_clock() - begin) / calls / 1e3


def _interval(values: Sequence[float]) -> Interval:
    """Median, and the order statistics but for the first and the last."""
    ordered = sorted(values)
    return Interval(ordered[len(ordered) // 2], ordered[1], ordered[-2])


def _reached(probe: "Probe", times: Sequence[float]) -> Interval:
    """What a probe's times in µs come to: 1e9 bytes or operations a second, or for a launch the time itself."""
    us = _interval(times)
    return Interval(*(probe.amount / v / 1e3 for v in (us.mid, us.hi, us.lo))) if probe.amount else us


# ---------------------------------------------------------------- what `calibrate` adds

SWEEP_MIB = (1, 4, 16, 64, 256)


class Sweep(Value, frozen=True):
    """Rates by the size that is moved, in GB/s: small ones read back the cache."""

    mib: int
    read_gbs: Interval
    copy_gbs: Interval
    inplace_gbs: Interval


class Calibration(Value, frozen=True):
    """Everything ``calibrate`` measures: ceilings twice, rates by size, and the least step of the spans' clock in ns."""

    device: str
    before: Ceilings
    after: Ceilings
    sweep: tuple[Sweep, ...]
    clock_step_ns: int


def calibrate(device: Device) -> Calibration:
    """Ceilings, a sweep over sizes, and the ceilings again."""
    ceiling = Ceiling(device, quick=False)
    before = ceiling.measure()
    sweep = tuple(_sizes(device))
    return Calibration(device.description(), before, ceiling.measure(), sweep, clock_step_ns())


def _sizes(device: Device) -> Iterator[Sweep]:
    from replay.kernels.probes import memory

    for mib in SWEEP_MIB:
        found: dict[str, Interval] = {}
        for probe in memory(device, mib << 20):
            rate = _reached(probe, [_time_one(device, probe.call, probe.calls) for _ in range(CEILING_ROUNDS)])
            if probe.term not in found or rate.mid > found[probe.term].mid:
                found[probe.term] = rate
        yield Sweep(mib, found["read"], found["copy"], found["inplace"])


def clock_step_ns() -> int:
    """The least time that passes between two readings of the clock that differ."""
    readings = [_clock() for _ in range(10_000)]
    return min(b - a for a, b in pairwise(readings) if b > a)
