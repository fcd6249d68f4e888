"""Every label, reason and exit code: the line a user sees, what it means, what to do. docs/statuses.md is made of it.

``python -m replay.statuses`` prints the page; a test holds it against the one that is kept, and these tables against the
types in ``model``, so that no status can be added without its line.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from replay.endpoint.reasons import REASONS


@dataclass(frozen=True)
class Told:
    """What a user sees, what it means, and what he can do."""

    line: str
    meaning: str
    remedy: str


EXACT: dict[str, Told] = {
    "BITWISE": Told(
        "`sycl:moe.gemm1:rows  BITWISE  234 [233, 235]  2.01 …`",
        "every repeat, on every case, has the oracle's bits",
        "read on: time and verdict",
    ),
    "TIE_EQUIVALENT": Told(
        "`TIE_EQUIVALENT … not the lowest index first in 3 rows of index, first 17`",
        "a stage that selects: every choice is right, and among equal values it is not always the lowest index",
        "right, and it can be promoted; whoever needs the same token as another kernel in a tie wants `lowest index first`",
    ),
    "WITHIN_ULP": Told(
        "`WITHIN_ULP … out within other_order: 2 of 5 scaled ulp, 3 of 4 flips a row`",
        "not the oracle's bits, but within the budget that the stage names for it",
        "weigh it; it is timed and compared, and never promoted",
    ),
    "FAIL": Told(
        "`FAIL … row 5 (token 0, slot 5, expert 161, place 0 in its tile) of gate_up: 3 flips, 1 ulp …: rows % 64 == 5; …`",
        "an output differs, or something else was written to",
        "the line names the worst row and, where there is one, the pattern of the wrong rows and the mode that would have "
        "matched; run its `reproduce` line",
    ),
    "NONDETERMINISTIC": Told(
        "`NONDETERMINISTIC … 15 of 16 repeats right; row 5 …`",
        "repeats on equal inputs differ from one another",
        "look for a race; `--repeats` asks for more than 16",
    ),
    "MISTRUSTED": Told(
        "`MISTRUSTED … redrawing w13 moves no expected output beside …`",
        "the check could not have failed (an input does not move the oracle, or the oracle calls what it should judge), or the "
        "device fails a self-test that the stage or the kernel rests on",
        "the line says which: mend the stage's oracle, or the device; nothing that rests on it is judged until then",
    ),
    "DEVICE_LOST": Told(
        "`DEVICE_LOST … UR_RESULT_ERROR_DEVICE_LOST`",
        "the device was lost in this case; the next one began after a fresh process had computed on it",
        "look at the driver's log; a card that lost its device is not measured again in this boot",
    ),
    "CRASHED": Told(
        "`CRASHED … signal SIGSEGV`",
        "the process died, the kernel raised, or it asked for more memory than there is",
        "the detail names the signal or the exception; result.json has the log's tail",
    ),
    "TIMEOUT": Told("`TIMEOUT … silent for 120 s`", "no answer within `--timeout` seconds", "as CRASHED"),
    "UNAVAILABLE": Told(
        "`unavailable: triton:moe.gemm1 (no Python module triton)`",
        "the kernel cannot run here; nothing else was tried in its place",
        "the reason names the device, mode or package that is missing",
    ),
}  # fmt: skip

CHAINS: dict[str, Told] = {
    "BOUNDED": Told(
        "`sycl:gdn.step:fused  BITWISE … BOUNDED`",
        "every step has the contract's bits, or for a budgeted kernel lies within `--max-scaled-ulp` beyond the contract's own "
        "distance from f64",
        "read the curve: it must not go on growing",
    ),
    "DRIFTED": Told(
        "`DRIFTED: step 1: 1.2e+04 scaled ulp farther from f64 than the contract (limit 5)`",
        "a step is farther from f64 than the contract by more than `--max-scaled-ulp`",
        "look for what is rounded on the way into the state: beta, g, k",
    ),
    "OVERFLOWED": Told(
        "`OVERFLOWED: step 9: a state is not finite in f16`",
        "a state or an output is inf or NaN where f64 is finite; the contract's own line says whether any kernel could do better",
        "another state dtype, or whatever was read that must not be (`--reset poison`)",
    ),
    "FAIL": Told(
        "`FAIL: step 49: row 3 (slot 3, sequence 1 …) of ssm_state: 1 flips, 2 ulp …`",
        "a step has not the contract's bits, or wrote where it must not",
        "run the `reproduce` line; `run` judges the same kernel on one step",
    ),
}  # fmt: skip

VERDICTS: dict[str, Told] = {
    "BASELINE": Told("`BASELINE`", "the others are compared with this one", "`--baseline` names another"),
    "FASTER": Told("`−74 % [−75, −73]  FASTER`", "the 95 % interval excludes zero, and it is not SAME", "`promote`"),
    "SLOWER": Told("`+4.1 % [+3.8, +4.4]  SLOWER`", "the 95 % interval excludes zero, and it is not SAME", "leave it"),
    "SAME": Told(
        "`+0.2 % [−0.3, +0.6]  SAME`",
        "the 90 % interval lies inside the margin, even where it excludes zero",
        "`promote --claim parity`",
    ),
    "INCONCLUSIVE": Told(
        "`INCONCLUSIVE: interval_holds_zero, about 12 processes would decide`", "nothing can be said", "see the reason behind it"
    ),
    "INVALID": Told("`INVALID: below_floor`", "the measurement contradicts itself", "see the reason behind it"),
}  # fmt: skip

FLAGS: dict[str, Told] = {
    "interval_holds_zero": Told("INCONCLUSIVE", "neither faster, slower nor the same", "as many processes as the line says"),
    "ceiling_drift": Told(
        "INCONCLUSIVE",
        "the memory ceilings moved beside a case of the line, and it was not timed again, or they moved again",
        "run it again on a quiet machine",
    ),
    "foreign_process": Told("INCONCLUSIVE", "the named process kept a tenth of a core busy or more", "stop it and run again"),
    "clock_disagrees": Told(
        "INVALID",
        "the spans' clock went faster or slower than the kernel's; on an accelerator, events and the host's clock parted, which "
        "work on another stream does as well",
        "find out who changed the clock, or what else the kernel starts",
    ),
    "blocks_dropped": Told(
        "INVALID",
        "over a fifth of the blocks were taken while the device throttled, or on clocks more than 3 % apart",
        "cool it, lift its power cap, fix its clock",
    ),
    "baseline_below_floor": Told("INVALID", "the baseline's time is faster than the bytes could move", "as below_floor"),
    "baseline_clock_disagrees": Told("INVALID", "the baseline's clocks part", "as clock_disagrees"),
    "baseline_host_waited": Told("told only", "as host_waited, for the baseline", "weigh it"),
    "short_span": Told(
        "told only",
        "on an accelerator, all bindings together fill no span of 2 ms, and what surrounds it weighs",
        "weigh it, or `--launch graph`",
    ),
    "host_waited": Told(
        "told only", "the device came to the span before the host had handed it over: the time holds the host's", "weigh it"
    ),
    "not_cold": Told("INCONCLUSIVE", "the ring of weights does not pass the cache three times", "a geometry of true size"),
    "no_baseline": Told("INCONCLUSIVE", "the baseline was red or died", "mend it, or `--baseline` another"),
    "null_inconclusive": Told("INCONCLUSIVE", "two copies of the baseline could not be told alike", "more processes"),
    "null_missing": Told("INCONCLUSIVE", "no second copy of the baseline was timed", "run it again"),
    "null_differed": Told("INVALID", "two copies of the baseline came out different", "find out what disturbs the machine"),
    "below_floor": Told("INVALID", "faster than the bytes could move", "look for a cached operand or a wrong clock"),
    "not_stationary": Told("told only", "the warm-up found no rest within its limit", "weigh it"),
}  # fmt: skip

EXITS: dict[int, str] = {
    0: "all well",
    1: "a kernel was wrong, crashed or was mistrusted, or drifted in a chain; a promotion of one; oracle and engine disagree",
    2: "bad input or usage; nothing was lost",
    3: "`--require` met no verdict, or `--require exact` a grade within a budget; a promotion without a verdict; a recording "
    "with dropped or lost steps, broken off, or of nothing",
    4: "slower than required",
    5: "the environment was refused, evidence was edited, a kernel named exactly is unavailable, or a server does not serve",
    130: "interrupted; `run --resume` goes on, `capture close` keeps what was recorded",
}


def page() -> str:
    """docs/statuses.md."""
    return "\n".join(
        [
            "# Statuses",
            "",
            "Made by `python -m replay.statuses` from the tables that the code uses. What stands under `exact`:",
            "",
            *_table(("exact", "the line", "what happened", "what to do"), _rows(EXACT)),
            "",
            "What stands under `verdict`, with (QUICK) behind it where the run had fewer than five processes or thirty blocks:",
            "",
            *_table(("verdict", "the line", "meaning", "what to do"), _rows(VERDICTS)),
            "",
            "What stands under `result` in a chain, beside MISTRUSTED, CRASHED, TIMEOUT, DEVICE_LOST and UNAVAILABLE as above:",
            "",
            *_table(("result", "the line", "meaning", "what to do"), _rows(CHAINS)),
            "",
            "Reasons behind a verdict:",
            "",
            *_table(("reason", "makes it", "meaning", "what to do"), _rows(FLAGS, code=True)),
            "",
            "Why `promote` refuses, and with which exit code:",
            "",
            *_table(("code", "exit", "what to do"), ((f"`{c}`", str(r.exit_code), r.remedy) for c, r in REASONS.items())),
            "",
            "Exit codes; when several hold, 2 before 5 before 1 before 3 before 4:",
            "",
            *_table(("exit", "meaning"), ((str(code), meaning) for code, meaning in EXITS.items())),
            "",
        ]
    )


def _rows(told: Mapping[str, Told], *, code: bool = False) -> Iterable[tuple[str, ...]]:
    for name, t in told.items():
        yield (f"`{name}`" if code else name, t.line, t.meaning, t.remedy)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows)]


if __name__ == "__main__":
    print(page(), end="")
