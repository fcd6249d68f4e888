"""From what was measured to the label a user acts on. Pure, the one place that decides.

First form: one process, so every verdict is QUICK. SAME is tested first, since an interval can exclude zero and lie
inside the margin at the same time.
"""

from collections.abc import Sequence
from typing import Literal

from replay.model import Ceilings, Comparison, Exact, Floor, Interval, Outcome, Verdict
from replay.timing.floors import below_floor


def decide(
    outcome: Outcome, floor: Floor | None, ceilings: Ceilings | None, comparison: Comparison | None,
    *, cache: str, margin: float, quick: bool, flags: Sequence[str] = (),
) -> Verdict | None:  # fmt: skip
    """The verdict of one row; None where there is no time to judge.

    ``margin`` is a share. ``flags`` are what the samples carried and what moved: ``not_stationary`` is told,
    ``not_cold`` and ``ceiling_drift:…`` cap the row at INCONCLUSIVE.
    """
    if not isinstance(outcome, Exact) or outcome.timing is None or floor is None or ceilings is None:
        return None
    reasons = tuple(flags)
    if below_floor(outcome.timing.us.mid, floor.work, ceilings, cache):
        return Verdict("INVALID", quick, ("below_floor", *reasons))
    if comparison is None and "no_baseline" not in flags:
        return Verdict("BASELINE", quick, reasons)
    if comparison is None or any(caps(flag) for flag in flags):
        return Verdict("INCONCLUSIVE", quick, reasons)
    label, why = label_of(comparison.ratio, margin)
    return Verdict(label, quick, (*why, *reasons))


def label_of(ratio: Interval, margin: float) -> tuple[Literal["SAME", "FASTER", "SLOWER", "INCONCLUSIVE"], tuple[str, ...]]:
    """What an interval of (kernel / baseline − 1) says by itself, with the reason where it says nothing."""
    if -margin < ratio.lo and ratio.hi < margin:
        return "SAME", ()
    if ratio.hi < 0:
        return "FASTER", ()
    if ratio.lo > 0:
        return "SLOWER", ()
    return "INCONCLUSIVE", ("interval_holds_zero",)


def caps(reason: str) -> bool:
    """True for a reason that keeps a row at INCONCLUSIVE whatever its interval says."""
    return reason in ("not_cold", "no_baseline") or reason.startswith("ceiling_drift")
