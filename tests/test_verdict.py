"""Verdicts, named for what they decide."""

from replay.model import Ceilings, Comparison, Exact, Floor, Inexact, Interval, Outcome, Timing, Verdict, Work
from replay.verdict import decide

WORK = Work(8_000_000, 0, 0, 0)
FLOOR = Floor(100, "bytes", 100, WORK)
RATE = Interval(80, 80, 80)
CEILINGS = Ceilings(RATE, RATE, RATE, RATE, Interval(5, 5, 5), {})


def verdict(lo: float, hi: float, *flags: str, us: float = 150, outcome: Outcome | None = None) -> Verdict | None:
    """The verdict of a row with this interval of its ratio."""
    green = Exact("BITWISE", 4, Timing(Interval(us, us, us), 30, 1, 1))
    compared = Comparison("base", Interval((lo + hi) / 2, lo, hi), 0.01)
    return decide(outcome or green, FLOOR, CEILINGS, compared, cache="cold-weights", margin=0.01, quick=True, flags=flags)


def label(*args: float, **kwargs: float) -> str:
    """The label alone."""
    found = verdict(*args, **kwargs)  # type: ignore[arg-type]  # us is the one keyword used
    assert found is not None
    return found.label


def test_faster_and_slower_when_the_interval_excludes_zero() -> None:
    """And reaches past the margin."""
    assert label(-0.3, -0.2) == "FASTER"
    assert label(0.2, 0.3) == "SLOWER"


def test_same_is_tested_first() -> None:
    """Inside the margin is SAME, even where the interval excludes zero."""
    assert label(-0.009, -0.001) == "SAME"


def test_undecided_when_the_interval_holds_zero_and_is_wide() -> None:
    """INCONCLUSIVE, with its reason."""
    assert verdict(-0.05, 0.02) == Verdict("INCONCLUSIVE", True, ("interval_holds_zero",))


def test_below_the_floor_is_invalid_however_fast() -> None:
    """Never great."""
    assert verdict(-0.9, -0.8, us=90) == Verdict("INVALID", True, ("below_floor",))


def test_moved_ceilings_and_warm_weights_cap_a_row() -> None:
    """Not FASTER when the machine changed or the operand was not cold; a slow warm-up is only told."""
    for flag in ("ceiling_drift:read", "not_cold"):
        assert verdict(-0.3, -0.2, flag) == Verdict("INCONCLUSIVE", True, (flag,))
    assert verdict(-0.3, -0.2, "not_stationary") == Verdict("FASTER", True, ("not_stationary",))


def test_red_rows_have_no_verdict() -> None:
    """Nothing wrong is ever fast."""
    assert verdict(-0.3, -0.2, outcome=Inexact("FAIL", 0, "row 0")) is None


def test_a_row_without_its_baseline_is_not_the_baseline() -> None:
    """Where the baseline was red or died, the others are INCONCLUSIVE."""
    green = Exact("BITWISE", 4, Timing(Interval(150, 150, 150), 30, 1, 1))
    found = decide(green, FLOOR, CEILINGS, None, cache="warm", margin=0.01, quick=True, flags=("no_baseline",))
    assert found == Verdict("INCONCLUSIVE", True, ("no_baseline",))
    assert decide(green, FLOOR, CEILINGS, None, cache="warm", margin=0.01, quick=True) == Verdict("BASELINE", True)
