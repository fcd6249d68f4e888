"""Times and comparisons from samples: medians, paired by block."""

import numpy as np
import pytest

from replay.model import Sample
from replay.timing.estimate import (
    adjusted_confidence,
    effect,
    log_ratios,
    mean_interval,
    median_interval,
    of_processes,
    processes_needed,
    timing,
)


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
    found = timing({0: [samples([10.0] * 29 + [1000.0], [20.0] * 30)]}, "a")
    assert found is not None
    assert (found.us.mid, found.samples, found.calls) == (10.0, 30, 2)
    assert timing({0: [samples([1.0], [1.0])]}, "nobody") is None


def test_a_span_too_short_for_its_clock_has_a_time() -> None:
    """Zero ns between two readings is one ns at most: it is compared, and no ratio is infinite."""
    found = effect({p: [samples([10.0 + p] * 30, [0.0] * 30)] for p in range(5)}, "b", "a", 0.01)
    assert found is not None
    assert found.ratio.mid < 0.5 / 10_000 - 1  # 0.5 ns of 10 µs, and of more
    assert adjusted_confidence([found.p]) == 0.95


def test_drift_cancels_in_blocks() -> None:
    """Under a 50 % ramp, b/a is the same in every block."""
    ramp = np.linspace(10, 15, 30)
    ratios = log_ratios(samples(list(ramp), list(ramp * 2)), "b", "a")
    assert ratios == pytest.approx(np.full(30, np.log(2)), abs=1e-3)
    found = effect({0: [samples(list(ramp), list(ramp * 2))]}, "b", "a", 0.01)
    assert found is not None
    assert found.ratio.mid == pytest.approx(1.0, abs=1e-3)
    assert found.mde < 0.01
    assert (found.processes, found.needed) == (1, None)


def many(offsets: list[float], noise: float = 0.001) -> dict[int, list[tuple[Sample, ...]]]:
    """Processes in which b takes (1 + offset) times as long as a, in blocks with noise, over two cases."""
    rng = np.random.default_rng(1)

    def case(offset: float) -> tuple[Sample, ...]:
        a = 1000 * np.exp(rng.normal(0, noise, 30))
        return samples(list(a), list(a * (1 + offset) * np.exp(rng.normal(0, noise, 30))))

    return {i: [case(o), case(o)] for i, o in enumerate(offsets)}


def test_the_process_is_the_sampling_unit() -> None:
    """Offsets between processes widen the interval, however many blocks each has."""
    still, moved = many([0.02] * 5), many([0.0, 0.04, 0.01, 0.03, 0.02])
    narrow, wide = effect(still, "b", "a", 0.01), effect(moved, "b", "a", 0.01)
    assert narrow is not None
    assert wide is not None
    assert narrow.ratio.hi - narrow.ratio.lo < 0.002
    assert wide.ratio.hi - wide.ratio.lo > 0.03
    assert wide.ratio.lo < wide.ratio90.lo < wide.ratio90.hi < wide.ratio.hi
    assert wide.processes == 5
    assert wide.mde > wide.ratio.hi - wide.ratio.mid  # what is found nine times in ten lies past half the interval


def test_t_interval_covers_the_mean() -> None:
    """95 % of intervals of five processes hold the true mean."""
    rng = np.random.default_rng(0)
    found = [mean_interval(rng.normal(3, 1, 5)) for _ in range(1000)]
    assert 0.93 < sum(i.lo <= 3 <= i.hi for i in found) / 1000 < 0.97


def test_processes_needed() -> None:
    """As many as bring the interval off zero or inside the margin; none would where the effect is the margin."""
    assert processes_needed(0.02, 0.0001, 0.01) == 2
    needed = processes_needed(0.02, 0.02, 0.01)
    assert needed is not None
    assert 5 < needed < 10
    assert processes_needed(0.0, 0.01, 0.01) == 5
    assert processes_needed(0.0, 10.0, 0.01) is None


def test_blocks_without_a_pair_are_left_out() -> None:
    """An arm that lacks a block is compared on those that both have."""
    pairs = samples([10.0, 10.0, 10.0], [20.0, 40.0, 20.0])
    assert log_ratios([s for s in pairs if (s.arm, s.block) != ("a", 1)], "b", "a") == pytest.approx([np.log(2)] * 2)
    assert effect({0: [[s for s in pairs if s.arm == "a"]]}, "b", "a", 0.01) is None


def test_adjusted_intervals_exclude_zero_where_the_procedure_rejects() -> None:
    """For shapes of which some moved: the interval of each agrees with Benjamini and Hochberg at 5 %, and one shape alone has
    the plain 95 %."""
    from scipy.stats import false_discovery_control

    rng = np.random.default_rng(5)
    rejected = 0
    for _ in range(100):
        shapes = rng.normal(0, 0.004, (12, 8)) + np.where(np.arange(12) < 4, 0.006, 0)[:, None]
        p_values = [of_processes(s, 0.01).p for s in shapes]
        confidence = adjusted_confidence(p_values)
        assert confidence >= 0.95
        for values, adjusted in zip(shapes, false_discovery_control(p_values), strict=True):
            i = of_processes(values, 0.01, confidence).ratio
            assert (i.lo > 0 or i.hi < 0) == (adjusted <= 0.05)
            rejected += adjusted <= 0.05
    assert 100 < rejected < 500
    assert adjusted_confidence([0.2]) == adjusted_confidence([]) == 0.95


def test_the_simulations_medians_are_those_of_samples() -> None:
    """`make simulate-timing` draws medians of log ratios: the same that samples of such times give."""
    rng = np.random.default_rng(6)
    times = {process: (rng.normal(6, 0.01, 30), rng.normal(6, 0.01, 30)) for process in range(3)}
    processes = {p: [samples(list(np.exp(a)), list(np.exp(b)))] for p, (a, b) in times.items()}
    found = effect(processes, "b", "a", 0.01)
    wanted = of_processes(np.array([np.median(b - a) for a, b in times.values()]), 0.01)
    assert found is not None
    assert found.ratio.mid == pytest.approx(wanted.ratio.mid, abs=1e-6)
    assert found.ratio.hi == pytest.approx(wanted.ratio.hi, abs=1e-6)
