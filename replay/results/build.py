"""From the records of a journal to a result document. Pure but for the journal's own sha256."""

import functools
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from replay.model import NULL, Ceilings, Comparison, Effect, Exact, Finding, Floor, Interval, NotRun, Row, Value, Verdict
from replay.results.seen import Seen
from replay.results.workload import Workload, workloads
from replay.session.journal import Plan, Record, Selftested
from replay.timing import estimate
from replay.timing.clocks import DISAGREES, WAITED
from replay.timing.floors import below_floor, best, floor_case, floor_impl
from replay.timing.telemetry import Machine
from replay.verdict import caps, conclude, decide, spoils

SCHEMA = "b70-result/4"


class Group(Value, frozen=True, kw_only=True):
    """One claim, which is one line of the table: a kernel over all cases of one stage, geometry and row count.

    ``layers`` in file order; ``degenerate`` counts the cases with a token without experts; ``times_floor`` is the time
    over the mean floor of the cases; ``host_us`` the host's part of a call, where it is known apart.
    """

    stage: str
    geometry: str
    capture: str
    layers: str
    tokens: int
    modes: str
    kernel: str
    cases: int
    degenerate: int
    exact: str
    us: Interval | None
    host_us: float | None
    floor_us: float | None
    floor_term: str | None
    times_floor: float | None
    comparison: Comparison | None
    verdict: Verdict | None
    detail: str
    reproduce: str | None


class Result(Value, frozen=True, kw_only=True):
    """Everything a run found. ``groups`` are the table, ``workloads`` its shapes taken together, ``rows`` every case and kernel.

    ``selftest`` is what the device answered when it was asked, and ``unasked`` why it was not; ``machine`` what it said of
    itself before the first process and after the last; ``dropped_blocks`` counts blocks by the cause they were dropped for.
    """

    schema: str
    identity: dict[str, Any]
    capture: str
    origin: str
    drawn: tuple[str, ...]
    device: str
    cache: str
    launch: Literal["calls", "graph"]
    processes: int
    repeated: int
    quick: bool
    finished: bool
    selftest: tuple[Finding, ...]
    unasked: str | None
    ceilings: Ceilings | None
    drift: tuple[str, ...]
    disturbed: tuple[str, ...]
    dropped_blocks: dict[str, int]
    machine: tuple[Machine, Machine] | None
    groups: tuple[Group, ...]
    workloads: tuple[Workload, ...]
    rows: tuple[Row, ...]
    journal_sha256: str


def build(records: Sequence[Record], journal_sha256: str) -> Result:
    """The result document of a journal, finished or not."""
    seen = Seen(records)
    plan = seen.plan
    found = _Findings(seen)
    groups = tuple(found.groups())
    tested = seen.selftested or Selftested((), unasked="not yet")
    return Result(
        schema=SCHEMA, identity=seen.identity, capture=plan.capture, origin=plan.origin, drawn=plan.drawn,
        device=plan.device, cache=plan.cache, launch=plan.launch, processes=plan.processes, repeated=seen.repeated(),
        quick=plan.quick, finished=seen.finished, selftest=tested.findings, unasked=tested.unasked or tested.died,
        ceilings=found.ceilings, drift=found.drift, disturbed=tuple(found.disturbed), dropped_blocks=seen.dropped_blocks(),
        machine=seen.machine(), groups=groups, workloads=tuple(workloads(seen, groups)),
        rows=tuple(row for rows in found.claims.values() for row in rows), journal_sha256=journal_sha256,
    )  # fmt: skip


Claim = tuple[str, str, str, int, str, str]  # stage, geometry, capture, rows, modes, kernel


class _Findings:
    """Rows gathered into claims: a claim's null arm is known before the verdict of any of its rows."""

    def __init__(self, seen: Seen) -> None:
        self.seen, self.plan = seen, seen.plan
        self._unadjusted: Callable[..., Effect | None] = functools.cache(self._effect_of)
        self.ceilings = best([c.ceilings for c in seen.calibrated]) if seen.calibrated else None
        self.drift = tuple(seen.drift(list(seen.timed)))
        self.disturbed = seen.disturbed()
        cases: dict[Claim, list[str]] = {}
        for case in self.plan.cases:
            c, key = case.id, str(case.id)
            for kernel in self.plan.kernels_of(c.problem.stage):
                if (key, kernel.id) in seen.judged:
                    claim = (
                        c.problem.stage,
                        str(c.problem.geometry),
                        c.source.capture,
                        c.source.rows,
                        c.problem.modes_text,
                        kernel.id,
                    )
                    cases.setdefault(claim, []).append(key)
        self.cases = cases
        self.claims = {claim: self._rows(claim, keys) for claim, keys in cases.items()}

    def _rows(self, claim: Claim, cases: list[str]) -> list[Row]:
        null = self._effect(cases, self.plan.baseline_of(claim[0]) + NULL, self._shapes(claim))
        return [self._row(case, claim, null) for case in cases]

    def _shapes(self, claim: Claim) -> tuple[tuple[str, ...], ...]:
        """The cases of each shape that this kernel is compared on: one line, one shape."""
        return tuple(tuple(keys) for other, keys in self.cases.items() if (other[0], other[-1]) == (claim[0], claim[-1]))

    def _effect(self, cases: Sequence[str], arm: str, shapes: Iterable[tuple[str, ...]]) -> Effect | None:
        """An arm's effect on some cases, its interval adjusted for all the shapes that it is claimed on."""
        found = [e for shape in shapes if (e := self._unadjusted(arm, shape))]
        return self._unadjusted(arm, tuple(cases), estimate.adjusted_confidence([e.p for e in found]))

    def _effect_of(self, arm: str, cases: tuple[str, ...], confidence: float = 1 - estimate.ALPHA) -> Effect | None:
        baseline = self.plan.baseline_of(cases[0].partition("@")[0])
        return estimate.effect(self.seen.samples(cases), arm, baseline, self.plan.margin, confidence)

    def _row(self, case: str, claim: Claim, null: Effect | None) -> Row:
        stage, kernel = claim[0], claim[-1]
        outcome = self.seen.outcome(case, kernel)
        floor = self._floor(case)
        compared = None
        flags = self._flags([case], kernel)
        if isinstance(outcome, Exact) and outcome.timing and kernel != self.plan.baseline_of(stage):
            flags += self._of_baseline([case], stage)
            each = ((key,) for shape in self._shapes(claim) for key in shape)
            effect = self._effect([case], kernel, each)
            compared = Comparison(self.plan.baseline_of(stage), effect, null) if effect else None
            flags += [] if effect else ["no_baseline"]
        verdict = decide(
            outcome, floor, self.ceilings, compared,
            cache=self.plan.cache, margin=self.plan.margin, quick=self.plan.quick, flags=flags,
        )  # fmt: skip
        red = not isinstance(outcome, Exact) and not (isinstance(outcome, NotRun) and outcome.status == "UNAVAILABLE")
        launches = next(k.launches for k in self.plan.kernels if k.id == kernel)
        return Row(
            case=case, kernel=kernel, outcome=outcome, floor=floor,
            floor_impl_us=floor_impl(floor, launches, self.ceilings) if floor and self.ceilings else None,
            comparison=compared, verdict=verdict,
            reproduce=reproduction(self.plan, case, kernel) if red else None, degenerate=case in self.seen.degenerate,
        )  # fmt: skip

    def _flags(self, cases: list[str], kernel: str) -> list[str]:
        """What the samples carried, and what moved."""
        return [*self.seen.flags(cases, kernel), *self.disturbed, *(f"ceiling_drift:{d}" for d in self.seen.drift(cases))]

    def _of_baseline(self, cases: list[str], stage: str) -> list[str]:
        """What is wrong with the times of the baseline is wrong with every comparison with it."""
        baseline = self.plan.baseline_of(stage)
        told = [f"baseline_{flag}" for flag in self.seen.flags(cases, baseline) if flag in (DISAGREES, WAITED)]
        timings = [(self._floor(case), estimate.timing(self.seen.samples([case]), baseline)) for case in cases]
        ceilings = self.ceilings
        below = any(f and t and ceilings and below_floor(t.us.mid, f.work, ceilings, self.plan.cache) for f, t in timings)
        return told + (["baseline_below_floor"] if below else [])

    def _floor(self, case: str) -> Floor | None:
        work = self.seen.work.get(case)
        return floor_case(work, self.ceilings, self.plan.cache) if self.ceilings and work else None

    def groups(self) -> list[Group]:
        """The claims as table lines, one stage and shape after the other as the plan has them."""
        return [self._group(claim, rows) for claim, rows in self.claims.items()]

    def _group(self, claim: Claim, members: list[Row]) -> Group:
        stage, geometry, capture, tokens, modes, kernel = claim
        layers = {str(c.id): c.id.source.layer for c in self.plan.cases}
        red = next((r for r in members if not isinstance(r.outcome, Exact)), None)
        cases = [r.case for r in members]
        timing = None if red else estimate.timing(self.seen.samples(cases), kernel)
        floors = [r.floor for r in members if r.floor is not None]
        floor_us = sum(f.us for f in floors) / len(floors) if floors else None
        compared, verdict = self._conclusion(claim, members) if timing else (None, None)
        return Group(
            stage=stage, geometry=geometry, capture=capture, layers=",".join(dict.fromkeys(layers[c] for c in cases)),
            tokens=tokens, modes=modes, kernel=kernel, cases=len(members),
            degenerate=sum(r.degenerate for r in members), exact=_grade(members),
            us=timing.us if timing else None, host_us=timing.host_us if timing else None,
            floor_us=floor_us, floor_term=floors[0].term if floors else None,
            times_floor=timing.us.mid / floor_us if timing and floor_us else None, comparison=compared, verdict=verdict,
            detail=_detail(red, members) if red else _why(verdict, members), reproduce=red.reproduce if red else None,
        )  # fmt: skip

    def _conclusion(self, claim: Claim, members: list[Row]) -> tuple[Comparison | None, Verdict]:
        """The claim's comparison and verdict: what caps or spoils any of its cases does so for the claim."""
        stage, kernel = claim[0], claim[-1]
        cases = [r.case for r in members]
        baseline = self.plan.baseline_of(stage)
        told = {reason for r in members if r.verdict for reason in r.verdict.reasons}
        flags = [flag for flag in self._flags(cases, kernel) if flag != "not_stationary"]
        flags += ["no_baseline"] if "no_baseline" in told else []
        flags += self._of_baseline(cases, stage) if kernel != baseline else []
        effect = self._effect(cases, kernel, self._shapes(claim)) if kernel != baseline else None
        null = next((r.comparison.null for r in members if r.comparison), None)
        compared = Comparison(baseline, effect, null) if effect else None
        below = "below_floor" in told
        return compared, conclude(compared, margin=self.plan.margin, quick=self.plan.quick, below=below, flags=flags)


def reproduction(plan: Plan, case: str, kernel: str) -> str:
    """The command that runs one line again, complete with source and modes."""
    words = ["b70-replay", "run", "--capture", plan.capture_path, *plan.selectors, "--case", case, "--kernel", kernel]
    for file in dict.fromkeys(k.file for k in plan.kernels if k.id == kernel and k.file):
        words += ["--load", file]
    for option, value, usual in (
        ("--device", plan.device, "cpu"),
        ("--cache", plan.cache, "cold-weights"),
        ("--launch", plan.launch, "calls"),
        ("--repeats", plan.repeats, 16),
        ("--timeout", plan.timeout_s, 120),
    ):
        if value != usual:
            words += [option, str(value)]
    return shlex.join([*words, "--quick"])


_WORST_FIRST = (
    "MISTRUSTED", "FAIL", "NONDETERMINISTIC", "DEVICE_LOST", "CRASHED", "TIMEOUT", "UNAVAILABLE", "WITHIN_ULP", "TIE_EQUIVALENT",
    "BITWISE",
)  # fmt: skip


def _grade(members: list[Row]) -> str:
    """The worst outcome decides: one red case makes the line red."""
    statuses = [r.outcome.grade if isinstance(r.outcome, Exact) else r.outcome.status for r in members]
    return min(statuses, key=_WORST_FIRST.index)


def _detail(red: Row, members: list[Row]) -> str:
    count, total = sum(not isinstance(r.outcome, Exact) for r in members), len(members)
    assert not isinstance(red.outcome, Exact)
    where = f" [{count} of {total} cases; first {red.case}]" if total > 1 else ""
    return red.outcome.detail + where


def _why(verdict: Verdict | None, members: list[Row]) -> str:
    """The reasons behind a line's label, how many of its cases never came to rest, and what its grade consists in."""
    if verdict is None:
        return ""
    grade = _grade(members)
    details = [o.detail for r in members if isinstance(o := r.outcome, Exact) and o.grade == grade and o.detail]
    restless = sum("not_stationary" in r.verdict.reasons for r in members if r.verdict)
    needed = [f"about {verdict.processes_needed} processes would decide"] if verdict.processes_needed else []
    told = [f"not_stationary in {restless} of {len(members)} cases"] if restless else []
    # Which rate, which process: what holds for the whole run is told once, under the tables.
    codes = dict.fromkeys(
        r.partition(":")[0] for r in verdict.reasons if verdict.label != "BASELINE" or not (caps(r) or spoils(r))
    )
    codes.pop("not_stationary", None)  # counted
    return "; ".join(filter(None, [*details[:1], ", ".join([*codes, *needed, *told])]))
