"""From samples to a time and a comparison. Pure; medians, never means or minima."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.model import Comparison, Interval, Sample, Timing

Values = NDArray[np.float64]


def median_interval(values: Values) -> Interval:
    """The median and its 95 % interval by order statistics; the whole range where there are too few for one."""
    from scipy.stats import quantile_test

    mid = float(np.median(values))
    interval: Any = quantile_test(values, q=mid, p=0.5).confidence_interval(0.95)
    lo = float(interval.low) if np.isfinite(interval.low) else float(values.min())
    hi = float(interval.high) if np.isfinite(interval.high) else float(values.max())
    return Interval(mid, lo, hi)


def by_arm(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Samples of one process and case per arm, in order of blocks."""
    arms: dict[str, list[Sample]] = {}
    for sample in sorted(samples, key=lambda s: s.block):
        arms.setdefault(sample.arm, []).append(sample)
    return arms


def us_per_call(samples: Sequence[Sample]) -> Values:
    """Time of one call in µs, one value a sample."""
    return np.array([s.host_ns / s.calls / 1e3 for s in samples])


def timing(processes: Mapping[int, Sequence[Sample]], arm: str) -> Timing | None:
    """The time of one arm on one case over its processes, or None where it has no sample."""
    mine = [s for samples in processes.values() for s in samples if s.arm == arm]
    if not mine:
        return None
    return Timing(median_interval(us_per_call(mine)), len(mine), mine[0].calls, len(processes))


def log_ratios(samples: Sequence[Sample], arm: str, baseline: str) -> Values:
    """log(arm / baseline) per block of one process."""
    arms = by_arm(samples)
    a, b = us_per_call(arms.get(arm, [])), us_per_call(arms.get(baseline, []))
    n = min(len(a), len(b))
    return np.log(a[:n] / b[:n])


def comparison(processes: Mapping[int, Sequence[Sample]], arm: str, baseline: str) -> Comparison | None:
    """The arm against the baseline inside one process: the median log ratio per block and its interval, as shares."""
    ratios = np.concatenate([log_ratios(s, arm, baseline) for s in processes.values()] or [np.empty(0)])
    if not len(ratios):
        return None
    interval = median_interval(ratios)
    shares = Interval(*(float(np.expm1(v)) for v in (interval.mid, interval.lo, interval.hi)))
    # What an effect must pass to leave the interval: half its width.
    return Comparison(baseline, shares, float(np.expm1((interval.hi - interval.lo) / 2)))
