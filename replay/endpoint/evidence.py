"""Derive a run's claims again, from its journal and its capture: no stored verdict and no stored grade is believed.

Cases are read from the capture anew, the oracle computes their outputs and their work anew, and the hashes of what the
kernel wrote, in every repeat and in timed calls, must be those of the oracle's outputs. What was measured (samples,
ceilings, and what was seen to go wrong) cannot be computed again: it is held by the journal's seals.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay import identity
from replay.captures import Capture, locate
from replay.captures.cases import routes_at
from replay.devices import UNKNOWN
from replay.endpoint.reasons import Refusal
from replay.errors import EnvironmentRefused, InputError, ReplayError
from replay.exactness import digest, padded
from replay.exactness.trust import mistrust
from replay.identity import Hashes
from replay.model import LAYOUTS, NULL, Case, Exact, Kernel, NotRun, Routes, Source, Spec
from replay.results.build import Group, build
from replay.results.seen import Seen
from replay.session import journal as j
from replay.session.folder import identity_now, kernels_now
from replay.session.plan import capture_of, filters, hits_of, rows_of
from replay.stages import STAGES
from replay.stages.stage import Outputs, Stage
from replay.stages.vary import inputs_when_timed, twin_of, twins_of
from replay.timing.floors import MOST_REPEATS, spare_timings
from replay.verdict import caps, is_quick, label_of, spoils

REPLACED = " (deleted)"  # what Linux puts behind the path of a mapped file that is no longer there
# A wider margin would let a slower kernel pass as the same, and a restless machine as a quiet one.
WIDEST_MARGIN = 0.01


@dataclass(frozen=True)
class Now:
    """What is here today: the identity a run would have (or why there is none), the capture (or why), hashes of files, the
    plan's kernels as they are registered."""

    identity: identity.Identity | str
    capture: Capture | str
    files: dict[str, str]
    kernels: dict[str, Kernel]


@dataclass(frozen=True)
class Examined:
    """A run, what it claims for a kernel, and every reason not to believe or not to grant it. ``seen`` and ``now`` are
    None for a journal that was edited."""

    seen: Seen | None
    now: Now | None
    claims: list[Group]
    refusals: list[Refusal]
    journal_sha256: str


def look(seen: Seen) -> Now:
    """Look at the machine: only here is anything read that is not the journal."""
    capture: Capture | str
    try:
        capture = capture_of(seen.plan)
    except ReplayError as error:
        capture = str(error)
    now: identity.Identity | str
    try:
        now = identity_now(seen.plan, UNKNOWN if isinstance(capture, str) else capture.sha256)
    except EnvironmentRefused as error:
        now = str(error)
    paths = {path for loaded in seen.loaded for path in loaded.files}
    return Now(now, capture, Hashes().of(sorted(paths)), kernels_now(seen.plan))


def examine(path: Path, kernel: str, claim: str, now: Now | None = None) -> Examined:
    """Hold a run's journal against ``now`` (looked at here, where it is None). InputError for a journal that is empty."""
    found = j.examine(path)
    if found.faults or not found.records or not isinstance(found.records[0], j.Begun):
        if not found.faults:
            raise InputError(str(path), "journal", "a run that had begun", "none")
        more = f" (and {len(found.faults) - 1} more lines)" if len(found.faults) > 1 else ""
        return Examined(None, None, [], [Refusal("edited_journal", found.faults[0] + more)], found.sha256)
    seen = Seen(found.records)
    finished = isinstance(found.records[-1], j.Finished) and not found.cut
    against = [] if finished else [Refusal("unfinished", "the run has not come to its end")]
    claims = [g for g in build(found.records, "").groups if g.kernel == kernel]
    now = now or look(seen)
    against += _all(seen, claims, kernel, claim, now)
    return Examined(seen, now, claims, list(dict.fromkeys(against)), found.sha256)


def _all(seen: Seen, claims: list[Group], kernel: str, claim: str, now: Now) -> Iterator[Refusal]:
    yield from _identity(seen, now)
    of_capture = list(_capture(seen, now))
    yield from of_capture
    yield from _plan(seen)
    if of_capture and not all(isinstance(c.held, Routes) for c in seen.plan.cases):
        return  # nothing more can be computed: states and logits are read from the capture
    if kernel not in {k.id for k in seen.plan.kernels}:
        yield Refusal("kernel_not_in_run", f"{kernel}: the run has {', '.join(k.id for k in seen.plan.kernels)}")
        return
    cases = [c for c in seen.plan.cases if c.problem.stage == kernel.split(":")[1]]
    if not cases:
        yield Refusal("not_timed", f"{kernel}: the run has no case of its stage")
    yield from _registered(seen, now, kernel)
    yield from _outcomes(seen, cases, kernel)
    if cases and (doubt := mistrust(STAGES[cases[0].problem.stage], cases)):
        yield Refusal("evidence_differs", doubt)
    yield from _processes(seen, cases, kernel)
    yield from _repeats(seen)
    for case in cases:
        yield from (Refusal("evidence_differs", text, str(case.id)) for text in _answers(seen, case, kernel))
    yield from _look(seen, cases, kernel)
    for group in claims:
        yield from _verdict(seen, group, claim)


# ---------------------------------------------------------------- what it ran with, and on


def _identity(seen: Seen, now: Now) -> Iterator[Refusal]:
    for name in identity.missing(seen.identity):
        yield Refusal("identity_missing", name)
    for name in identity.unknown(seen.identity):
        if name in identity.REQUIRED or name.startswith(("sources.", "libraries.")):
            yield Refusal("identity_unknown", name)
    if isinstance(now.identity, str):
        yield Refusal("identity_changed", now.identity)
    else:
        for text in identity.differences(seen.identity, now.identity):
            if not text.startswith("capture:"):  # told below, with its reason
                rebuilt = text.startswith(("sources", "libraries"))
                yield Refusal("rebuilt_kernel" if rebuilt else "identity_changed", text)
    yield from _loaded(seen, now)


def _loaded(seen: Seen, now: Now) -> Iterator[Refusal]:
    """Files that a kernel ran through: one build in the whole run, and the same one today."""
    if not seen.loaded:
        yield Refusal("identity_missing", "loaded: no list of the libraries that were loaded")
    first: dict[str, str] = {}
    for loaded in seen.loaded:
        for path, sha256 in loaded.files.items():
            if path.endswith(REPLACED) or first.setdefault(path, sha256) != sha256:
                yield Refusal("rebuilt_kernel", f"{path}: built again in mid-run ({loaded.where})")
            elif sha256 == UNKNOWN:
                yield Refusal("rebuilt_kernel", f"{path}: gone when it was to be hashed ({loaded.where})")
            elif sha256 != now.files.get(path):
                yield Refusal("rebuilt_kernel", f"{path}: {sha256[:12]}… → {now.files.get(path, UNKNOWN)[:12]}…")


def _capture(seen: Seen, now: Now) -> Iterator[Refusal]:
    if seen.identity.get("capture") != seen.plan.capture_sha256:
        yield Refusal("capture_changed", "the identity names another capture than the plan")
    if isinstance(now.capture, str):
        there = locate(seen.plan.capture_path).exists()
        yield Refusal("capture_changed" if there else "capture_missing", now.capture)
    elif now.capture.sha256 != seen.plan.capture_sha256:
        yield Refusal("capture_changed", f"sha256 {seen.plan.capture_sha256[:12]}… → {now.capture.sha256[:12]}…")
    else:
        yield from _rows(seen, now.capture)


def _registered(seen: Seen, now: Now, kernel: str) -> Iterator[Refusal]:
    """The kernel and its baseline are registered as they were, and the device was asked what they rest on."""
    planned = {k.id: k for k in seen.plan.kernels}
    stage = STAGES[kernel.split(":")[1]]
    for name in dict.fromkeys((kernel, seen.plan.baseline_of(stage.name))):
        if now.kernels.get(name) != planned[name]:
            yield Refusal("rebuilt_kernel", f"{name}: not registered as in the run")
        names = (*stage.rests_on, *planned[name].rests_on)
        tested = seen.selftested
        doubt = "no record of it" if tested is None else tested.unasked or tested.doubt(names) or tested.lacks(names)
        if names and doubt:
            yield Refusal("selftest", f"{name}: {doubt}")


def _rows(seen: Seen, capture: Capture) -> Iterator[Refusal]:
    """The journal's cases, read from the capture again: rows, geometry and modes."""
    manifest = capture.manifest
    try:
        geometry = seen.plan.cases[0].problem.geometry.checked()
        rows: dict[Source, Any]
        if capture.holds != "routes":
            rows_of(capture).check_capture(capture, geometry)
            rows = {c.id.source: rows_of(capture).find(capture, c.id).held for c in seen.plan.cases}
        else:
            rows = dict(routes_at(capture, [c.id.source for c in seen.plan.cases], filters(seen.plan), geometry))
    except (ReplayError, ValueError, IndexError) as error:
        yield Refusal("evidence_differs", f"the capture does not hold the journal's cases: {error}")
        return
    for case in seen.plan.cases:
        if case.twin or case.id.problem.layout != "contiguous":
            yield Refusal("evidence_differs", "a twin stands in the place of a case", str(case.id))
        if rows.get(case.id.source) != case.held:
            yield Refusal("evidence_differs", "the capture's rows are not the journal's", str(case.id))
        if case.problem.geometry != (manifest.geometry if manifest else geometry):
            yield Refusal("geometry_differs", f"{case.problem.geometry}: not that of the capture", str(case.id))
    if seen.plan.hits != hits_of(capture, filters(seen.plan), seen.plan.cases):
        yield Refusal("evidence_differs", "the capture has its shapes in other numbers than the journal says")
    modes = {pair for case in seen.plan.cases for pair in case.problem.modes}
    for name, value in sorted(modes):
        if capture.modes.get(name, value) != value:
            yield Refusal("modes_differ", f"{name}={value}, the capture was made with {name}={capture.modes[name]}")


def _plan(seen: Seen) -> Iterator[Refusal]:
    if seen.plan.margin > WIDEST_MARGIN:
        yield Refusal("wide_margin", f"{seen.plan.margin:.1%}, at most {WIDEST_MARGIN:.0%} can promote")
    if seen.plan.cache == "warm":
        yield Refusal("not_cold", "the run was --cache warm")


# ---------------------------------------------------------------- what came of it


def _outcomes(seen: Seen, cases: list[Case], kernel: str) -> Iterator[Refusal]:
    """Red cases, in judging or while timed, each by its own line."""
    for key in (str(case.id) for case in cases):
        if (key, kernel) not in seen.judged:
            yield Refusal("unfinished", "not judged", key)
            continue
        outcome = seen.outcome(key, kernel)
        if isinstance(outcome, NotRun) and outcome.status == "UNAVAILABLE":
            yield Refusal("unavailable", outcome.detail, key)
        elif not isinstance(outcome, Exact):
            yield Refusal("red_case", f"{outcome.status}: {outcome.detail}", key)
        elif outcome.grade == "WITHIN_ULP":
            yield Refusal("not_bitwise", f"WITHIN_ULP: {outcome.detail}", key)
        elif outcome.timing is None and seen.finished:
            yield Refusal("not_timed", "no sample", key)


def _processes(seen: Seen, cases: list[Case], kernel: str) -> Iterator[Refusal]:
    """Every process that has ceilings timed every green case, and no other process did."""
    ended = j.ended(seen.calibrated)
    if unseen := sorted(ended - {a.process for a in seen.attended}):
        yield Refusal("evidence_differs", f"processes {unseen}: nothing says what went on beside them")
    if ended != set(range(len(ended))):
        yield Refusal("evidence_differs", f"processes {sorted(ended)}: expected them counted from 0")
    for key in (str(case.id) for case in cases):
        timed = set(seen.timed.get(key, {}))
        green = (key, kernel) in seen.judged and isinstance(seen.outcome(key, kernel), Exact)
        if green and timed and timed != ended:
            yield Refusal("evidence_differs", f"timed in processes {sorted(timed)}, ceilings of {sorted(ended)}", key)
    if strange := set(seen.timed) - {str(c.id) for c in seen.plan.cases}:
        yield Refusal("evidence_differs", "timed, but not in the plan", min(strange))


def _repeats(seen: Seen) -> Iterator[Refusal]:
    """A timing was made again where the memory ceilings had moved beside it, and no more often than was declared."""
    counted: Counter[int] = Counter()
    earlier: dict[tuple[int, str], list[j.Timed]] = {}
    for timed in seen.in_order:
        earlier.setdefault((timed.process, timed.case), []).append(timed)
    for (process, case), found in earlier.items():
        counted[process] += len(found) - 1
        if len(found) > 1 + MOST_REPEATS or not all(t.moved(seen.plan.margin) for t in found[:-1]):
            yield Refusal("evidence_differs", f"timed again in process {process}, with no ceiling moved or too often", case)
    if over := [p for p, n in counted.items() if n > spare_timings(len(seen.plan.cases))]:
        yield Refusal("evidence_differs", f"processes {over}: more timings made again than a process may")


def _wanted(stage: Stage, case: Case) -> tuple[tuple[Spec, ...], Outputs]:
    return stage.specs(case.problem), stage.expected(case.problem, stage.inputs(case))


def _answers(seen: Seen, case: Case, kernel: str) -> Iterator[str]:
    """What the journal says the kernel and its baseline wrote, held against the oracle's outputs."""
    stage, key = STAGES[case.problem.stage], str(case.id)
    inputs = stage.inputs(case)
    specs = stage.specs(case.problem)
    want = specs, stage.expected(case.problem, inputs)
    timed_want, second_want = (
        (specs, stage.expected(case.problem, inputs_when_timed(stage, c))) for c in (case, case.twinned("second"))
    )
    twins = {twin: _wanted(stage, twin_of(stage, case, twin)) for twin in twins_of(stage, LAYOUTS)}

    def right(answer: j.Answer | None, wanted: tuple[tuple[Spec, ...], Outputs]) -> bool:
        return answer is not None and answer.sha256 == digest(*wanted, padded(*wanted, answer.poison))

    if seen.work.get(key) != stage.work(case.problem, inputs):
        yield "its work is not what its routes ask for"
    if (key in seen.degenerate) != stage.degenerate(case.problem, inputs):
        yield "whether it is an edge is not what its routes say"
    baseline = seen.plan.baseline_of(case.problem.stage)
    layouts = {k.id: k.layouts for k in seen.plan.kernels}
    hashed = []  # a grade within a budget has other bits than the oracle: a kernel is refused for it, a baseline told
    for name in dict.fromkeys((kernel, baseline)):
        judged = seen.judged.get((key, name))
        if judged is None or not isinstance(judged.outcome, Exact) or judged.outcome.grade == "WITHIN_ULP":
            continue  # told as a red case, or as a baseline that is none
        hashed.append(name)
        whole = len(judged.answers) == judged.outcome.repeats == seen.plan.repeats
        if not whole or not all(right(a, want) for a in judged.answers):
            yield f"{name}: what it wrote when judged is not the oracle's output in {seen.plan.repeats} repeats"
        for twin in twins_of(stage, layouts[name]):
            if not right(judged.twins.get(twin), twins[twin]):
                yield f"{name}: what it wrote on its {twin} twin is not the oracle's output"
    for timed in (t for t in seen.in_order if t.case == key):  # those that were timed again as well
        for arm in (kernel, baseline, baseline + NULL):
            name = arm.removesuffix(NULL)
            if name not in hashed or not any(s.arm == arm for s in timed.samples) or name in {*timed.wrong, *timed.within}:
                continue
            if not right(timed.answers.get(arm), timed_want) or not right(timed.second.get(arm), second_want):
                yield f"{arm}: what it wrote while timed in process {timed.process} is not the oracle's output"


def _look(seen: Seen, cases: list[Case], kernel: str) -> Iterator[Refusal]:
    """QUICK, counted on the samples themselves: whole processes, and blocks in each."""
    for case in cases:
        samples = seen.samples([str(case.id)])
        blocks = [len({s.block for t in timed for s in t if s.arm == kernel}) for timed in samples.values()]
        if any(blocks) and is_quick(len(blocks), min(blocks)):  # a kernel without a sample is told as such
            yield Refusal("quick", f"{len(blocks)} process{'es' * (len(blocks) != 1)} of {min(blocks)} blocks")
            return


def _verdict(seen: Seen, group: Group, claim: str) -> Iterator[Refusal]:
    where = f"{group.stage}, {group.tokens} token{'s' * (group.tokens > 1)}"
    verdict = group.verdict
    if verdict is None:
        return  # red or not timed, and told so
    if verdict.label == "BASELINE":
        yield Refusal("is_baseline", f"{group.kernel}: {where}")
        return
    told: dict[str, list[str]] = {}
    for reason in verdict.reasons:
        if caps(reason) or spoils(reason):
            code, _, which = reason.partition(":")
            told.setdefault(code, []).append(which)
    for code, found in told.items():
        yield Refusal(code, f"{where} {', '.join(filter(None, found))}".rstrip())
    if group.comparison is None:
        return  # without a baseline, and told so
    label, i = label_of(group.comparison.effect, seen.plan.margin), group.comparison.effect.ratio
    if label != "FASTER" and (label != "SAME" or claim != "parity"):
        yield Refusal("not_faster", f"{where}: {label}, {i.mid:+.1%} [{i.lo:+.1%}, {i.hi:+.1%}], claimed {claim}")
