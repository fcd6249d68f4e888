"""Times and comparisons from samples: medians, paired by block."""

import numpy as np
import pytest

from replay.model import Sample
from replay.timing.estimate import comparison, log_ratios, median_interval, timing


def samples(a: list[float], b: list[float]) -> tuple[Sample, ...]:
    """µs a call of two arms, block by block; two calls a sample."""
    return tuple(
        Sample(block, arm, 2, round(us * 2000), block)
        for block, pair in enumerate(zip(a, b, strict=True))
        for arm, us in zip("ab", pair, strict=True)
    )


def test_median_interval_covers_the_median() -> None:
    """95 % of intervals of 30 normal values hold the true median (checked to 3 standard errors)."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
        i = median_interval(rng.normal(10, 1, 30))
        hits += i.lo <= 10 <= i.hi
    assert 0.93 < hits / 1000 < 0.99


def test_few_values_give_their_range() -> None:
    """Five values carry no 95 % interval of the median: the range is told instead of a narrow guess."""
    i = median_interval(np.array([3.0, 1.0, 2.0, 5.0, 4.0]))
    assert (i.mid, i.lo, i.hi) == (3.0, 1.0, 5.0)


def test_a_slow_block_moves_no_median() -> None:
    """One sample of a hundred times the length changes nothing."""
    found = timing({0: samples([10.0] * 29 + [1000.0], [20.0] * 30)}, "a")
    assert found is not None
    assert (found.us.mid, found.samples, found.calls) == (10.0, 30, 2)
    assert timing({0: samples([1.0], [1.0])}, "nobody") is None


def test_drift_cancels_in_blocks() -> None:
    """Under a 50 % ramp, b/a is the same in every block."""
    ramp = np.linspace(10, 15, 30)
    ratios = log_ratios(samples(list(ramp), list(ramp * 2)), "b", "a")
    assert ratios == pytest.approx(np.full(30, np.log(2)), abs=1e-3)
    found = comparison({0: samples(list(ramp), list(ramp * 2))}, "b", "a")
    assert found is not None
    assert found.ratio.mid == pytest.approx(1.0, abs=1e-3)
    assert found.mde < 0.01
