"""Ceilings: the rates a device reaches at best, measured before and after everything that is held against them."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from replay.devices import Device
from replay.model import Ceilings, Interval, MemoryRates, Value
from replay.timing.clocks import Clock, clock_of, host_ns

if TYPE_CHECKING:
    from replay.kernels.probes import Probe

CEILING_PASSES = 8
CEILING_ROUNDS, QUICK_ROUNDS = 11, 5  # eleven give an interval of 98.8 %, five their range but for the ends
CEILING_TRIALS = 2
SETTLE_NS = 300_000_000
LOOK_EVERY_NS = 2_000_000_000  # a look, which repeats no timing, asks no oftener whether the memory ceilings moved


class Ceiling:
    """Read, copy and in-place rates past the last-level cache, the rate out of cache, the peaks of int8 and bf16 products,
    and an empty launch.

    Each is the best of every implementation at hand, torch's and our own. The buffers are made once.
    """

    def __init__(self, device: Device, *, quick: bool) -> None:
        from replay.kernels.probes import probes

        self.clock, self.rounds = clock_of(device), QUICK_ROUNDS if quick else CEILING_ROUNDS
        self.quick, self.measured_ns = quick, 0
        self.probes = list(probes(device, CEILING_PASSES * device.llc_bytes()))
        self.calls: dict[Probe, int] = {}
        self.best: dict[str, Probe] = {}  # term → what reached it

    def measure(self) -> Ceilings:
        """One calibration."""
        begin = host_ns()
        settle_ns = 0 if self.quick and self.calls else SETTLE_NS  # a look settles once
        while host_ns() - begin < settle_ns:  # a machine that was idle reads at half its rate for the first moments
            _time_one(self.clock, self.probes[0], 1)

        def cost(probe: "Probe") -> float:
            """µs a byte, an operation, or a launch."""
            return float(np.median(times[probe])) / max(probe.amount, 1)

        self.calls = self.calls or {probe: _enough(self.clock, probe) for probe in self.probes}
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
                times[probe].append(_time_one(self.clock, probe, self.calls[probe]))
        rates: dict[str, Interval] = {}
        for probe in chosen:
            rates[probe.term] = _reached(probe, times[probe])
        self.best = {probe.term: probe for probe in chosen}
        return Ceilings(
            read_gbs=rates["read"], copy_gbs=rates["copy"], inplace_gbs=rates["inplace"], hot_gbs=rates["hot"],
            launch_us=rates["launch"], int8_gops=rates["int8"], bf16_gops=rates["bf16"],
            best_of={probe.term: probe.name for probe in chosen},
        )  # fmt: skip

    def memory(self) -> MemoryRates:
        """The memory ceilings alone, each by what reached it in the calibration before; a fifth of a second on a CPU."""
        times: dict[Probe, list[float]] = {self.best[term]: [] for term in ("read", "copy", "inplace")}
        for _ in range(self.rounds):
            for probe, taken in times.items():
                taken.append(_time_one(self.clock, probe, self.calls[probe]))
        self.measured_ns = host_ns()
        return MemoryRates(*(_reached(probe, taken) for probe, taken in times.items()))

    def due(self) -> bool:
        """Whether it is time for the memory ceilings again."""
        return not self.quick or host_ns() - self.measured_ns >= LOOK_EVERY_NS


# The host's part of a call on an accelerator, at most: what is queued ahead of a probe keeps the device from waiting for it.
PROBE_HOST_NS = 20_000


def _time_one(clock: Clock, probe: "Probe", calls: int) -> float:
    """µs a call."""

    def work() -> None:
        for _ in range(calls):
            probe.call()

    return clock.span(work, PROBE_HOST_NS * calls).ns / calls / 1e3


def _enough(clock: Clock, probe: "Probe") -> int:
    """How many calls of a probe fill a span."""
    single = min(clock.span(probe.call, PROBE_HOST_NS).ns for _ in range(2))
    return max(probe.calls, -(-clock.least_ns // max(single, 1)))


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

    clock = clock_of(device)
    for mib in SWEEP_MIB:
        found: dict[str, Interval] = {}
        for probe in memory(device, mib << 20):
            calls = _enough(clock, probe)
            rate = _reached(probe, [_time_one(clock, probe, calls) for _ in range(CEILING_ROUNDS)])
            if probe.term not in found or rate.mid > found[probe.term].mid:
                found[probe.term] = rate
        yield Sweep(mib, found["read"], found["copy"], found["inplace"])


def clock_step_ns() -> int:
    """The least time that passes between two readings of the clock that differ."""
    readings = [host_ns() for _ in range(10_000)]
    return min(b - a for a, b in pairwise(readings) if b > a)
