"""Verdicts, named for what they decide."""

import pytest

from replay.model import Ceilings, Comparison, Effect, Exact, Floor, Inexact, Interval, Outcome, Timing, Verdict, Work
from replay.verdict import decide, is_quick

WORK = Work(8_000_000, 0, 0, 0)
FLOOR = Floor(100, "bytes", 100, 10, WORK)
RATE = Interval(80, 80, 80)
CEILINGS = Ceilings(RATE, RATE, RATE, RATE, Interval(5, 5, 5), RATE, RATE, {})


def an_effect(lo: float, hi: float, needed: int | None = None) -> Effect:
    """An effect whose 90 % interval reaches nine tenths as far as its 95 %."""
    mid, half = (lo + hi) / 2, (hi - lo) / 2
    return Effect(Interval(mid, lo, hi), Interval(mid, mid - 0.9 * half, mid + 0.9 * half), 0.01, 5, needed)


QUIET = an_effect(-0.002, 0.002)


def verdict(
    lo: float, hi: float, *flags: str, us: float = 150, outcome: Outcome | None = None, null: Effect | None = QUIET
) -> Verdict | None:
    """The verdict of a row with this interval of its ratio."""
    green = Exact("BITWISE", 4, Timing(Interval(us, us, us), 30, 1, 1))
    compared = Comparison("base", an_effect(lo, hi, 12), null)
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
    assert label(-0.0102, -0.001) == "SAME"  # by the 90 % interval


def test_undecided_when_the_interval_holds_zero_and_is_wide() -> None:
    """INCONCLUSIVE, with its reason and the number of processes it would take."""
    assert verdict(-0.05, 0.02) == Verdict("INCONCLUSIVE", True, ("interval_holds_zero",), 12)


@pytest.mark.parametrize(
    ("null", "expected"),
    [
        (an_effect(0.02, 0.03), Verdict("INVALID", True, ("null_differed",))),
        (an_effect(-0.03, -0.02), Verdict("INVALID", True, ("null_differed",))),
        (an_effect(-0.02, 0.02), Verdict("INCONCLUSIVE", True, ("null_inconclusive",))),
        (None, Verdict("INCONCLUSIVE", True, ("null_missing",))),
        (an_effect(0.001, 0.009), Verdict("FASTER", True)),
    ],
)
def test_the_null_arm_decides_first(null: Effect | None, expected: Verdict) -> None:
    """Two copies of one kernel that differ make the claim INVALID; that say nothing, INCONCLUSIVE."""
    assert verdict(-0.3, -0.2, null=null) == expected


def test_a_look_is_called_one() -> None:
    """Five processes of thirty blocks are the least that can promote."""
    assert [is_quick(5, 30), is_quick(4, 30), is_quick(5, 29), is_quick(1, 1000)] == [False, True, True, True]


def test_below_the_floor_is_invalid_however_fast() -> None:
    """Never great."""
    assert verdict(-0.9, -0.8, us=90) == Verdict("INVALID", True, ("below_floor",))


def test_moved_ceilings_and_warm_weights_cap_a_row() -> None:
    """Not FASTER when the machine changed or the operand was not cold; a slow warm-up is only told."""
    for flag in ("ceiling_drift:read", "not_cold", "foreign_process:cc1plus (7)"):
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
