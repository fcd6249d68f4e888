"""From what was measured to the label a user acts on. Pure, the one place that decides.

SAME is tested first, on the 90 % interval, since an interval can exclude zero and lie inside the margin at the same time.
"""

from collections.abc import Sequence
from typing import Literal

from replay.model import Ceilings, Comparison, Effect, Exact, Floor, Outcome, Verdict
from replay.timing.floors import below_floor

# What a run must have for its verdicts to be more than a look.
FULL_PROCESSES, FULL_BLOCKS = 5, 30

Label = Literal["SAME", "FASTER", "SLOWER", "INCONCLUSIVE"]


def is_quick(processes: int, blocks: int) -> bool:
    """True for a run whose verdicts are a look and cannot promote."""
    return processes < FULL_PROCESSES or blocks < FULL_BLOCKS


def decide(
    outcome: Outcome, floor: Floor | None, ceilings: Ceilings | None, comparison: Comparison | None,
    *, cache: str, margin: float, quick: bool, flags: Sequence[str] = (),
) -> Verdict | None:  # fmt: skip
    """The verdict of one row; None where there is no time to judge.

    ``margin`` is a share. ``flags`` are what the samples carried and what moved: ``not_stationary`` is told, those of
    ``caps`` keep the row at INCONCLUSIVE.
    """
    if not isinstance(outcome, Exact) or outcome.timing is None or floor is None or ceilings is None:
        return None
    below = below_floor(outcome.timing.us.mid, floor.work, ceilings, cache)
    return conclude(comparison, margin=margin, quick=quick, below=below, flags=flags)


def conclude(comparison: Comparison | None, *, margin: float, quick: bool, below: bool, flags: Sequence[str]) -> Verdict:
    """The verdict of a comparison: INVALID first, then what keeps it from saying anything, then what it says."""
    null = null_reason(comparison, margin)
    reasons = (*(["below_floor"] if below else []), *([null] if null else []), *flags)
    if any(spoils(reason) for reason in reasons):
        return Verdict("INVALID", quick, reasons)
    if comparison is None:
        return Verdict("INCONCLUSIVE" if "no_baseline" in flags else "BASELINE", quick, reasons)
    if any(caps(reason) for reason in reasons):
        return Verdict("INCONCLUSIVE", quick, reasons)
    label = label_of(comparison.effect, margin)
    if label == "INCONCLUSIVE":
        return Verdict(label, quick, ("interval_holds_zero", *reasons), comparison.effect.needed)
    return Verdict(label, quick, reasons)


def label_of(effect: Effect, margin: float) -> Label:
    """What an effect says by itself."""
    if -margin < effect.ratio90.lo and effect.ratio90.hi < margin:
        return "SAME"
    if effect.ratio.hi < 0:
        return "FASTER"
    if effect.ratio.lo > 0:
        return "SLOWER"
    return "INCONCLUSIVE"


def null_reason(comparison: Comparison | None, margin: float) -> str | None:
    """What is wrong with the null arm of a comparison, or None: two copies of one kernel must come out the same."""
    if comparison is None:
        return None
    if comparison.null is None:
        return "null_missing"
    label = label_of(comparison.null, margin)
    return {"SAME": None, "INCONCLUSIVE": "null_inconclusive"}.get(label, "null_differed")


def spoils(reason: str) -> bool:
    """True for a reason that makes a row INVALID: its measurement contradicts itself."""
    return reason.removeprefix("baseline_") in ("below_floor", "null_differed", "clock_disagrees", "blocks_dropped")


def caps(reason: str) -> bool:
    """True for a reason that keeps a row at INCONCLUSIVE whatever its interval says."""
    code = reason.partition(":")[0]
    return code in ("not_cold", "no_baseline", "null_missing", "null_inconclusive", "ceiling_drift", "foreign_process")
