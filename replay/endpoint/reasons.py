"""Why a promotion is refused: every code, its exit code, and what to do."""

from dataclasses import dataclass

from replay.model import Value

CORRECTNESS, ENVIRONMENT, NO_VERDICT = 1, 5, 3
_PRECEDENCE = (ENVIRONMENT, CORRECTNESS, NO_VERDICT)


@dataclass(frozen=True)
class Reason:
    """The exit code of a refusal, and what its reader can do about it."""

    exit_code: int
    remedy: str


_AGAIN = "run it again with this build"
REASONS: dict[str, Reason] = {
    "red_case": Reason(CORRECTNESS, "run the line's reproduction command; only a kernel that is exact on every case is promoted"),
    "not_bitwise": Reason(CORRECTNESS, "only what has the oracle's bits, or an equal choice among ties, is promoted"),
    "edited_journal": Reason(ENVIRONMENT, "the journal is not as it was written: run it again"),
    "evidence_differs": Reason(ENVIRONMENT, "what the journal says is not what the capture and the oracle give: run it again"),
    "capture_missing": Reason(ENVIRONMENT, "put the capture back where the run read it"),
    "capture_changed": Reason(ENVIRONMENT, "the capture is not the one that was replayed: put it back, or run it again"),
    "rebuilt_kernel": Reason(ENVIRONMENT, "sources or libraries are not those that were measured: " + _AGAIN),
    "identity_changed": Reason(ENVIRONMENT, "the machine or its versions are not those that were measured: run it again here"),
    "identity_missing": Reason(ENVIRONMENT, "the run's identity lacks a field: run it again with this version"),
    "identity_unknown": Reason(ENVIRONMENT, "the run could not read a field that a promotion rests on"),
    "selftest": Reason(ENVIRONMENT, "the device fails what the kernel rests on, or was not asked: see `doctor --selftest`"),
    "unavailable": Reason(ENVIRONMENT, "the kernel could not run where it was measured; its line says what was missing"),
    "device_differs": Reason(ENVIRONMENT, "measure on the kind of device that the endpoint runs on"),
    "geometry_differs": Reason(ENVIRONMENT, "measure on a capture of the endpoint's model and tensor-parallel size"),
    "modes_differ": Reason(NO_VERDICT, "judge it in the modes that the capture was made with"),
    "wide_margin": Reason(NO_VERDICT, "run with a margin of one percent or less"),
    "kernel_not_in_run": Reason(NO_VERDICT, "choose one of the run's kernels, or run with this one"),
    "is_baseline": Reason(NO_VERDICT, "a baseline is not compared with itself: name another with --baseline and run again"),
    "unfinished": Reason(NO_VERDICT, "`b70-replay run --resume` goes on with the run"),
    "quick": Reason(NO_VERDICT, "run with `--processes 5` (or more) and 30 blocks or more"),
    "not_timed": Reason(NO_VERDICT, "no time of this kernel is in the journal: run it again"),
    "no_baseline": Reason(NO_VERDICT, "the baseline has no time to compare with: mend it, or name another"),
    "below_floor": Reason(NO_VERDICT, "a time below the floor did not do the work: look for a cached operand or a wrong clock"),
    "null_differed": Reason(NO_VERDICT, "two copies of the baseline came out different: find out what disturbs the machine"),
    "null_inconclusive": Reason(NO_VERDICT, "too restless to tell two copies of the baseline alike: take more processes"),
    "null_missing": Reason(NO_VERDICT, "no second copy of the baseline was timed: run it again"),
    "clock_disagrees": Reason(NO_VERDICT, "the clock of the spans is not the kernel's: find out who changed it"),
    "baseline_below_floor": Reason(NO_VERDICT, "the baseline did not do its work: look for a cached operand, or name another"),
    "baseline_clock_disagrees": Reason(NO_VERDICT, "the clocks of the baseline's spans part: name another"),
    "blocks_dropped": Reason(NO_VERDICT, "the device throttled, or its clock moved, in over a fifth of the blocks: cool it"),
    "foreign_process": Reason(NO_VERDICT, "another process kept the processors busy: stop it and run again"),
    "ceiling_drift": Reason(NO_VERDICT, "the memory ceilings moved beside a case: run it again on a quiet machine"),
    "not_cold": Reason(NO_VERDICT, "weights came from the cache: --cache cold-weights, and a geometry of true size"),
    "not_faster": Reason(NO_VERDICT, "the claim is not met (--claim parity asks for the same or better)"),
}  # fmt: skip


class Refusal(Value, frozen=True):
    """One reason not to promote: its code in REASONS, what was found, and the case it was found in, if it was one."""

    code: str
    detail: str
    case: str = ""

    def __str__(self) -> str:
        where = f"{self.case}: " if self.case else ""
        return f"{self.code}: {where}{self.detail}; {REASONS[self.code].remedy}"


def lines(refusals: list[Refusal]) -> list[str]:
    """A line a reason: what was found in several cases in the same words is told once, with their number."""
    cases: dict[tuple[str, str], list[str]] = {}
    for refusal in refusals:
        cases.setdefault((refusal.code, refusal.detail), []).append(refusal.case)
    return [
        str(Refusal(code, detail + (f" (and {len(found) - 1} more cases)" if len(found) > 1 else ""), found[0]))
        for (code, detail), found in cases.items()
    ]


def exit_code(refusals: list[Refusal]) -> int:
    """The exit code of a promotion with these refusals: 5 before 1 before 3, 0 where there is none."""
    codes = {REASONS[r.code].exit_code for r in refusals}
    return next((code for code in _PRECEDENCE if code in codes), 0)
