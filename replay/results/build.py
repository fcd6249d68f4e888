"""From the records of a journal to a result document. Pure but for the journal's own sha256."""

import shlex
from collections.abc import Sequence
from typing import Any

from replay.model import Ceilings, Exact, Floor, Inexact, Interval, NotRun, Outcome, Row, Sample, Value, Work
from replay.session.journal import Begun, Calibrated, Dropped, Finished, Judged, Plan, Posed, Record, Timed
from replay.timing import estimate
from replay.timing.floors import best, drifted, floor_case
from replay.verdict import caps, decide, label_of

SCHEMA = "b70-result/1"


class Group(Value, frozen=True, kw_only=True):
    """One line of the table: a kernel over all cases of one stage, geometry and row count; ``layers`` in file order."""

    stage: str
    geometry: str
    capture: str
    layers: str
    tokens: int
    modes: str
    kernel: str
    cases: int
    exact: str
    us: Interval | None
    floor_us: float | None
    floor_term: str | None
    times_floor: float | None
    ratio: Interval | None
    mde: float | None
    verdict: str | None
    detail: str
    reproduce: str | None


class Result(Value, frozen=True, kw_only=True):
    """Everything a run found. ``groups`` are the table, ``rows`` every case and kernel."""

    schema: str
    identity: dict[str, Any]
    capture: str
    origin: str
    drawn: tuple[str, ...]
    device: str
    cache: str
    quick: bool
    finished: bool
    ceilings: Ceilings | None
    drift: tuple[str, ...]
    groups: tuple[Group, ...]
    rows: tuple[Row, ...]
    journal_sha256: str


class _Seen:
    """The journal's records by kind."""

    def __init__(self, records: Sequence[Record]) -> None:
        first = records[0]
        assert isinstance(first, Begun)  # journal.resume and report check it
        self.plan: Plan = first.plan
        self.identity = first.identity
        self.work: dict[str, Work] = {}
        self.outcomes: dict[tuple[str, str], Outcome] = {}
        self.samples: dict[str, dict[int, tuple[Sample, ...]]] = {}
        self.wrong: dict[tuple[str, str], str] = {}
        self.dropped: dict[tuple[str, str], NotRun] = {}
        self.calibrated: list[Calibrated] = []
        self.finished = False
        for record in records[1:]:
            self._see(record)

    def _see(self, record: Record) -> None:
        if isinstance(record, Posed):
            self.work[record.case] = record.work
        elif isinstance(record, Judged):
            self.outcomes[record.case, record.kernel] = record.outcome
        elif isinstance(record, Timed):
            self.samples.setdefault(record.case, {})[record.process] = record.samples
            self.wrong.update({(record.case, kernel): what for kernel, what in record.wrong.items()})
        elif isinstance(record, Dropped):
            self.dropped[record.case, record.kernel] = NotRun(record.status, record.detail)
        elif isinstance(record, Calibrated):
            self.calibrated.append(record)
        elif isinstance(record, Finished):
            self.finished = True

    def outcome(self, case: str, kernel: str) -> Outcome:
        """The outcome after both phases: a green row turns red when a timed call was wrong or died."""
        found = self.outcomes[case, kernel]
        if not isinstance(found, Exact):
            return found
        if wrong := self.wrong.get((case, kernel)):
            return Inexact("FAIL", -1, wrong)
        if dropped := self.dropped.get((case, kernel)):
            return dropped
        timing = estimate.timing(self.samples.get(case, {}), kernel)
        return Exact(found.grade, found.repeats, timing, found.prepack)


def build(records: Sequence[Record], journal_sha256: str) -> Result:
    """The result document of a journal, finished or not."""
    seen = _Seen(records)
    plan = seen.plan
    ceilings = best([c.ceilings for c in seen.calibrated]) if seen.calibrated else None
    drift = _drift(seen)
    rows = []
    for case in plan.cases:
        key = str(case.id)
        floor = floor_case(seen.work[key], ceilings, plan.cache) if ceilings and key in seen.work else None
        present = [k for k in plan.kernels_of(case.problem.stage) if (key, k.id) in seen.outcomes]
        baseline = _baseline(plan, case.problem.stage)
        for kernel in present:
            rows.append(_row(seen, key, kernel.id, baseline, floor, ceilings, drift))
    return Result(
        schema=SCHEMA, identity=seen.identity, capture=plan.capture, origin=plan.origin, drawn=plan.drawn,
        device=plan.device, cache=plan.cache, quick=plan.quick, finished=seen.finished, ceilings=ceilings,
        drift=drift, groups=tuple(_groups(seen, rows)), rows=tuple(rows), journal_sha256=journal_sha256,
    )  # fmt: skip


def _baseline(plan: Plan, stage: str) -> str:
    """The baseline of a stage: the named one where it is of that stage, else its first kernel."""
    kernels = [k.id for k in plan.kernels_of(stage)]
    return plan.baseline if plan.baseline in kernels else kernels[0]


def _drift(seen: _Seen) -> tuple[str, ...]:
    whens: dict[tuple[int, str], Ceilings] = {(c.process, c.when): c.ceilings for c in seen.calibrated}
    moved: list[str] = []
    for process in sorted({p for p, _ in whens}):
        before, after = whens.get((process, "before")), whens.get((process, "after"))
        if before and after:
            moved += drifted(before, after, seen.plan.margin)
    return tuple(dict.fromkeys(moved))


def _row(
    seen: _Seen, case: str, kernel: str, baseline: str, floor: Floor | None, ceilings: Ceilings | None, drift: tuple[str, ...]
) -> Row:
    outcome = seen.outcome(case, kernel)
    processes = seen.samples.get(case, {})
    timed = isinstance(outcome, Exact) and outcome.timing is not None
    compared = estimate.comparison(processes, kernel, baseline) if timed and kernel != baseline else None
    flags = sorted({f for samples in processes.values() for s in samples if s.arm == kernel for f in s.flags})
    flags += [f"ceiling_drift:{d}" for d in drift]
    if timed and kernel != baseline and compared is None:
        flags.append("no_baseline")
    verdict = decide(
        outcome, floor, ceilings, compared, cache=seen.plan.cache, margin=seen.plan.margin, quick=seen.plan.quick, flags=flags
    )
    red = not isinstance(outcome, Exact) and not (isinstance(outcome, NotRun) and outcome.status == "UNAVAILABLE")
    return Row(
        case=case, kernel=kernel, outcome=outcome, floor=floor, comparison=compared, verdict=verdict,
        reproduce=reproduction(seen.plan, case, kernel) if red else None,
    )  # fmt: skip


def reproduction(plan: Plan, case: str, kernel: str) -> str:
    """The command that runs one line again, complete with source and modes."""
    words = ["b70-replay", "run", "--route-jsonl", plan.capture_path, *plan.selectors, "--case", case, "--kernel", kernel]
    for file in dict.fromkeys(k.file for k in plan.kernels if k.id == kernel and k.file):
        words += ["--load", file]
    for option, value, usual in (
        ("--device", plan.device, "cpu"),
        ("--cache", plan.cache, "cold-weights"),
        ("--repeats", plan.repeats, 4),
    ):
        if value != usual:
            words += [option, str(value)]
    return shlex.join([*words, "--quick"])


def _groups(seen: _Seen, rows: list[Row]) -> list[Group]:
    """Rows of one table line together: same stage, geometry, row count, modes and kernel."""
    ids = {str(c.id): c.id for c in seen.plan.cases}
    keyed: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        c = ids[row.case]
        modes = ",".join(f"{n}={v}" for n, v in c.problem.modes)
        key = (c.problem.stage, str(c.problem.geometry), c.source.capture, str(c.source.rows), modes, row.kernel)
        keyed.setdefault(key, []).append(row)
    layers = {key: ",".join(dict.fromkeys(ids[r.case].source.layer for r in members)) for key, members in keyed.items()}
    return [_group(seen, key, layers[key], members) for key, members in keyed.items()]


def _group(seen: _Seen, key: tuple[str, ...], layers: str, members: list[Row]) -> Group:
    stage, geometry, capture, tokens, modes, kernel = key
    red = next((r for r in members if not isinstance(r.outcome, Exact)), None)
    baseline = _baseline(seen.plan, stage)
    us = ratio = mde = None
    if red is None:
        mine = [s for r in members for p in seen.samples.get(r.case, {}).values() for s in p if s.arm == kernel]
        us = estimate.median_interval(estimate.us_per_call(mine)) if mine else None
        if kernel != baseline and us is not None:
            pooled = dict(enumerate(p for r in members for p in seen.samples.get(r.case, {}).values()))
            compared = estimate.comparison(pooled, kernel, baseline)
            ratio, mde = (compared.ratio, compared.mde) if compared else (None, None)
    floors = [r.floor for r in members if r.floor is not None]
    floor_us = sum(f.us for f in floors) / len(floors) if floors else None
    verdict, why = _group_verdict(members, ratio, seen.plan.margin) if red is None and us else (None, "")
    return Group(
        stage=stage, geometry=geometry, capture=capture, layers=layers, tokens=int(tokens), modes=modes, kernel=kernel,
        cases=len(members), exact=_grade(members), us=us, floor_us=floor_us,
        floor_term=floors[0].term if floors else None,
        times_floor=us.mid / floor_us if us and floor_us else None, ratio=ratio, mde=mde, verdict=verdict,
        detail=_detail(red, len(members), members) if red else why, reproduce=red.reproduce if red else None,
    )  # fmt: skip


def _grade(members: list[Row]) -> str:
    """The worst outcome decides: one red case makes the line red."""
    statuses = [r.outcome.grade if isinstance(r.outcome, Exact) else r.outcome.status for r in members]
    order = ("FAIL", "NONDETERMINISTIC", "CRASHED", "TIMEOUT", "UNAVAILABLE", "BITWISE")
    return min(statuses, key=order.index)


def _detail(red: Row, total: int, members: list[Row]) -> str:
    count = sum(not isinstance(r.outcome, Exact) for r in members)
    assert not isinstance(red.outcome, Exact)
    where = f" [{count} of {total} cases; first {red.case}]" if total > 1 else ""
    return red.outcome.detail + where


def _group_verdict(members: list[Row], ratio: Interval | None, margin: float) -> tuple[str, str]:
    """The line's label: INVALID of any case wins, then a capped case, else what the pooled interval says."""
    verdicts = [r.verdict for r in members if r.verdict]
    for verdict in verdicts:
        if verdict.label == "INVALID":
            return "INVALID", ", ".join(verdict.reasons)
    capped = next((v for v in verdicts if v.label == "INCONCLUSIVE" and any(caps(r) for r in v.reasons)), None)
    if capped:
        return "INCONCLUSIVE", ", ".join(capped.reasons)
    label, why = ("BASELINE", ()) if ratio is None else label_of(ratio, margin)
    restless = sum("not_stationary" in v.reasons for v in verdicts)
    told = [*why, *([f"not_stationary in {restless} of {len(verdicts)} cases"] if restless else [])]
    return label, ", ".join(told)
