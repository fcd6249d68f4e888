"""From samples to a time and an effect. Pure; medians, never means or minima, inside a process.

The process is the sampling unit: what stands between two processes (placement, clocks, neighbours) does not average out
inside one. A single process has no spread to show, so its interval is that of the median over its blocks, and whoever
decides on it is told so.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.model import Effect, Interval, Sample, Timing
from replay.timing.clocks import WAITED
from replay.timing.dropped import too_many

Values = NDArray[np.float64]
# process → the samples of each case of a claim
Processes = Mapping[int, Sequence[Sequence[Sample]]]

ALPHA = 0.05  # the share of false claims that is accepted
POWER = 0.9
MOST_PROCESSES = 1000


def median_interval(values: Values, confidence: float = 0.95) -> Interval:
    """The median and its interval by order statistics; the whole range where there are too few for one."""
    from scipy.stats import quantile_test

    mid = float(np.median(values))
    interval: Any = quantile_test(values, q=mid, p=0.5).confidence_interval(confidence)
    lo = float(interval.low) if np.isfinite(interval.low) else float(values.min())
    hi = float(interval.high) if np.isfinite(interval.high) else float(values.max())
    return Interval(mid, lo, hi)


def mean_interval(values: Values, confidence: float = 0.95) -> Interval:
    """The mean over processes (two or more) and its t interval."""
    from scipy.stats import ttest_1samp

    mid = float(values.mean())
    if np.ptp(values) == 0:
        return Interval(mid, mid, mid)
    interval: Any = ttest_1samp(values, 0).confidence_interval(confidence)
    return Interval(mid, float(interval.low), float(interval.high))


def by_arm(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Samples of one process and case per arm, in order of blocks."""
    arms: dict[str, list[Sample]] = {}
    for sample in sorted(samples, key=lambda s: s.block):
        arms.setdefault(sample.arm, []).append(sample)
    return arms


def us_per_call(samples: Sequence[Sample]) -> Values:
    """Time of one call in µs, one value a sample; a span too short for its clock counts as one ns, its smallest step."""
    return np.array([max(s.span_ns, 1) / s.calls / 1e3 for s in samples])


def process_times(processes: Processes, arm: str) -> list[Values]:
    """All times of one arm in µs, an array a process; processes without a sample of it are left out."""
    mine = [us_per_call([s for case in cases for s in case if s.arm == arm]) for cases in processes.values()]
    return [times for times in mine if len(times)]


def timing(processes: Processes, arm: str) -> Timing | None:
    """The time of one arm over its processes, or None where it has no sample."""
    times = process_times(processes, arm)
    if not times:
        return None
    us = median_interval(times[0]) if len(times) == 1 else _geometric(np.array([np.median(t) for t in times]))
    mine = [s for cases in processes.values() for case in cases for s in case if s.arm == arm]
    # Where the host waits for the device it waits for the lead as well, and its own part is not known.
    host = [s.host_ns / s.calls / 1e3 for s in mine if s.host_ns is not None and WAITED not in s.flags]
    known = host and not too_many(len(mine) - len(host), len(mine))
    return Timing(us, len(mine), mine[0].calls, len(times), float(np.median(host)) if known else None)


def _geometric(medians: Values) -> Interval:
    """The geometric mean over processes with its t interval: no time is negative, however restless the machine."""
    logs = mean_interval(np.log(medians))
    return Interval(*(float(np.exp(v)) for v in (logs.mid, logs.lo, logs.hi)))


def log_ratios(samples: Sequence[Sample], arm: str, baseline: str) -> Values:
    """log(arm / baseline) per block of one process and case; only blocks that hold both."""
    arms = by_arm(samples)
    bases = {s.block: s for s in arms.get(baseline, [])}
    pairs = [(s, bases[s.block]) for s in arms.get(arm, []) if s.block in bases]
    return np.log(us_per_call([a for a, _ in pairs]) / us_per_call([b for _, b in pairs])) if pairs else np.empty(0)


def adjusted_confidence(p_values: Sequence[float]) -> float:
    """The confidence of intervals that exclude zero exactly where the false discovery rate over these shapes allows it.

    With R of m shapes rejected by Benjamini and Hochberg at 5 %, that is 1 − 0.05·R/m (Benjamini and Yekutieli, 2005); with
    none rejected 1 − 0.05/m.
    """
    from scipy.stats import false_discovery_control

    if not p_values:
        return 1 - ALPHA
    rejected = int((false_discovery_control(p_values) <= ALPHA).sum())
    return 1 - ALPHA * max(rejected, 1) / len(p_values)


def effect(processes: Processes, arm: str, baseline: str, margin: float, confidence: float = 1 - ALPHA) -> Effect | None:
    """The arm against the baseline over all cases of a claim; None where no block holds both.

    Per process the mean over cases of the median over blocks; over processes the mean with a t interval.
    """
    found = [[r for case in cases if len(r := log_ratios(case, arm, baseline))] for cases in processes.values()]
    found = [cases for cases in found if cases]
    if not found:
        return None
    if len(found) == 1:
        return _of_one_process(np.concatenate(found[0]), confidence)
    return of_processes(np.array([np.mean([np.median(case) for case in cases]) for cases in found]), margin, confidence)


def _of_one_process(ratios: Values, confidence: float) -> Effect:
    """The effect that one process shows: the median over its blocks, with an interval of that median alone."""
    from scipy.stats import norm, quantile_test

    wide, narrow = median_interval(ratios, confidence), median_interval(ratios, 0.90)
    detectable = (wide.hi - wide.lo) / 2 * (1 + float(norm.ppf(POWER)) / float(norm.ppf((1 + confidence) / 2)))
    p = float(quantile_test(ratios, q=0, p=0.5).pvalue)
    return Effect(_shares(wide), _shares(narrow), float(np.expm1(detectable)), 1, p=p, confidence=confidence)


def of_processes(medians: Values, margin: float, confidence: float = 1 - ALPHA) -> Effect:
    """The effect that two or more processes show, from the log ratio of each."""
    from scipy.stats import ttest_1samp

    n, mean, spread = len(medians), float(medians.mean()), float(medians.std(ddof=1))
    found: Any = ttest_1samp(medians, 0)

    def at(level: float) -> Interval:
        if not np.ptp(medians):
            return _shares(Interval(mean, mean, mean))
        interval = found.confidence_interval(level)
        return _shares(Interval(mean, float(interval.low), float(interval.high)))

    reach = _critical((1 + confidence) / 2)[n] + _critical(POWER)[n]
    detectable = float(np.expm1(reach * spread / n**0.5))
    needed = processes_needed(mean, spread, margin, confidence)
    p = float(found.pvalue) if np.ptp(medians) else float(mean == 0)
    return Effect(at(confidence), at(0.90), detectable, n, needed, p, confidence)


def mean_times(processes: Processes, arm: str, baseline: str) -> dict[int, tuple[float, float]]:
    """process → µs a call of (arm, baseline): the mean over the cases that hold both, of their medians."""
    found = {}
    for process, cases in processes.items():
        times = [[us_per_call([s for s in case if s.arm == name]) for name in (arm, baseline)] for case in cases]
        medians = [[float(np.median(t)) for t in both] for both in times if all(map(len, both))]
        if medians:
            mine, base = np.mean(medians, axis=0)
            found[process] = float(mine), float(base)
    return found


def weighted_times(
    shapes: Mapping[int, Processes], shares: Mapping[int, float], arm: str, baseline: str
) -> list[tuple[float, float]]:
    """µs a call of (arm, baseline) over all shapes, each weighted by its share; one pair a process that holds them all."""
    times = [(shares[rows], mean_times(processes, arm, baseline)) for rows, processes in shapes.items()]
    whole = sorted(set.intersection(*(set(found) for _, found in times)))
    return [
        (sum(share * found[process][0] for share, found in times), sum(share * found[process][1] for share, found in times))
        for process in whole
    ]


def weighted_effect(
    shapes: Mapping[int, Processes], shares: Mapping[int, float], arm: str, baseline: str, margin: float
) -> Effect | None:
    """The arm against the baseline over all shapes, weighted; None below two processes."""
    sums = weighted_times(shapes, shares, arm, baseline)
    return of_processes(np.log([mine / base for mine, base in sums]), margin) if len(sums) > 1 else None


def processes_needed(mean: float, spread: float, margin: float, confidence: float = 1 - ALPHA) -> int | None:
    """The least number of processes of that spread whose interval excludes zero, or lies inside the margin."""
    counts = np.arange(MOST_PROCESSES + 1)
    reach = spread / np.sqrt(np.maximum(counts, 1))
    apart = _critical((1 + confidence) / 2) * reach < abs(mean)
    same = abs(mean) + _critical(0.95) * reach < np.log1p(margin)
    decided = (apart | same) & (counts > 1)
    return int(counts[decided][0]) if decided.any() else None


@functools.cache
def _critical(probability: float) -> Values:
    """Student's t by the number of processes: entry n is that of n − 1 degrees of freedom; NaN below two."""
    from scipy.stats import t

    values: Values = np.asarray(t.ppf(probability, np.arange(MOST_PROCESSES + 1) - 1.0))
    return values


def _shares(logs: Interval) -> Interval:
    return Interval(*(float(np.expm1(v)) for v in (logs.mid, logs.lo, logs.hi)))
