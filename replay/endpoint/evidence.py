"""Derive a run's claims again, from its journal and its capture: no stored verdict and no stored grade is believed.

Cases are read from the capture anew, the oracle computes their outputs and their work anew, and the hashes of what the
kernel wrote, in every repeat and in timed calls, must be those of the oracle's outputs. What cannot be computed again,
the samples' times, is held by the journal's seals.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from replay import identity
from replay.captures import Capture, locate, open_capture
from replay.captures.cases import find
from replay.devices import UNKNOWN
from replay.endpoint.reasons import Refusal
from replay.errors import InputError, ReplayError
from replay.exactness import digest, padded
from replay.identity import Hashes
from replay.model import NULL, Case, Exact, NotRun
from replay.results.build import Group, build
from replay.results.seen import Seen
from replay.session import journal as j
from replay.session.folder import identity_now
from replay.session.plan import filters
from replay.stages import STAGES
from replay.stages.stage import Outputs
from replay.verdict import caps, is_quick, label_of

REPLACED = " (deleted)"  # what Linux puts behind the path of a mapped file that is no longer there


@dataclass(frozen=True)
class Now:
    """What is here today: the identity a run would have, the capture or why there is none, and hashes of files."""

    identity: identity.Identity
    capture: Capture | None
    no_capture: str
    files: dict[str, str]


def look(seen: Seen) -> Now:
    """Look at the machine: only here is anything read that is not the journal."""
    capture, why = None, ""
    try:
        capture = open_capture(locate(seen.plan.capture_path))
    except ReplayError as error:
        why = str(error)
    now = identity_now(seen.plan, capture.sha256 if capture else UNKNOWN)
    paths = {path for loaded in seen.loaded for path in loaded.files}
    return Now(now, capture, why, Hashes().of(sorted(paths)))


def refusals(path: Path, kernel: str, claim: str) -> tuple[Seen, list[Group], list[Refusal]]:
    """(what the journal holds, the kernel's claims, every reason not to believe or not to grant them).

    InputError where there is no run that had begun.
    """
    records, faults = j.examine(path)
    if not records or not isinstance(records[0], j.Begun):
        raise InputError(str(path), "journal", "a run that had begun", "; ".join(faults) or "none")
    seen = Seen(records)
    return seen, *examine(seen, records, faults, kernel, claim, look(seen))


def examine(
    seen: Seen, records: Sequence[j.Record], faults: list[str], kernel: str, claim: str, now: Now
) -> tuple[list[Group], list[Refusal]]:
    """The kernel's claims and all that speaks against them. Touches no file but the capture's."""
    found = [Refusal("edited_journal", fault) for fault in faults]
    found += _identity(seen, now)
    if not seen.finished or not isinstance(records[-1], j.Finished):
        found.append(Refusal("unfinished", "the run has not come to its end"))
    if kernel not in {k.id for k in seen.plan.kernels}:
        found.append(Refusal("kernel_not_in_run", f"{kernel}: the run has {', '.join(k.id for k in seen.plan.kernels)}"))
        return [], found
    if faults:
        return [], found  # its records cannot be taken for what the run wrote
    cases = [c for c in seen.plan.cases if c.problem.stage == kernel.split(":")[1]]
    found += _outcomes(seen, cases, kernel)
    found += _evidence(seen, cases, kernel, now)
    claims = [g for g in build(records, "").groups if g.kernel == kernel]
    found += _verdicts(seen, cases, claims, kernel, claim)
    return claims, list(dict.fromkeys(found))


def _identity(seen: Seen, now: Now) -> Iterator[Refusal]:
    for name in identity.missing(seen.identity):
        yield Refusal("identity_missing", name)
    for name in set(identity.unknown(seen.identity)) & set(identity.REQUIRED):
        yield Refusal("identity_unknown", name)
    for text in identity.differences(seen.identity, now.identity):
        if text.startswith("capture:"):
            continue  # told below, with its reason
        rebuilt = text.startswith(("sources", "libraries"))
        yield Refusal("rebuilt_kernel" if rebuilt else "identity_changed", text)
    if seen.identity.get("capture") != seen.plan.capture_sha256:
        yield Refusal("capture_changed", "the identity names another capture than the plan")
    if now.capture is None:
        yield Refusal("capture_changed" if "sha256" in now.no_capture else "capture_missing", now.no_capture)
    elif now.capture.sha256 != seen.plan.capture_sha256:
        yield Refusal("capture_changed", f"sha256 {seen.plan.capture_sha256[:12]}… → {now.capture.sha256[:12]}…")
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
            elif sha256 != now.files.get(path):
                yield Refusal("rebuilt_kernel", f"{path}: {sha256[:12]}… → {now.files.get(path, UNKNOWN)[:12]}…")


def _outcomes(seen: Seen, cases: list[Case], kernel: str) -> Iterator[Refusal]:
    """Red cases, in judging or while timed, each by its own line."""
    for case in cases:
        key = str(case.id)
        if (key, kernel) not in seen.judged:
            yield Refusal("unfinished", f"{key}: not judged")
            continue
        outcome = seen.outcome(key, kernel)
        if isinstance(outcome, NotRun) and outcome.status == "UNAVAILABLE":
            yield Refusal("unavailable", f"{key}: {outcome.detail}")
        elif not isinstance(outcome, Exact):
            yield Refusal("red_case", f"{key}: {outcome.status}: {outcome.detail}")
        elif outcome.timing is None:
            yield Refusal("not_timed", key)


# ---------------------------------------------------------------- computed again


def _evidence(seen: Seen, cases: list[Case], kernel: str, now: Now) -> Iterator[Refusal]:
    yield from (Refusal("evidence_differs", text) for text in _processes(seen, cases))
    for case in cases:
        # A capture that is gone or another one is told already.
        if now.capture is not None and now.capture.sha256 == seen.plan.capture_sha256 and not _there(seen, case, now.capture):
            yield Refusal("evidence_differs", f"{case.id}: the capture's rows are not the journal's")
        yield from (Refusal("evidence_differs", f"{case.id}: {text}") for text in _answers(seen, case, kernel))


def _there(seen: Seen, case: Case, capture: Capture) -> bool:
    """Whether the capture holds this case, row for row."""
    try:
        return find(capture, case.id, filters(seen.plan)) == case
    except ReplayError:
        return False


def _processes(seen: Seen, cases: list[Case]) -> Iterator[str]:
    """Every process that has ceilings timed every case that any did, and no other did."""
    ended = {c.process for c in seen.calibrated if c.when == "after"} & {c.process for c in seen.calibrated if c.when == "before"}
    if ended != set(range(len(ended))):
        yield f"processes {sorted(ended)}: expected them counted from 0"
    for case in cases:
        timed = set(seen.timed.get(str(case.id), {}))
        if timed and timed != ended:
            yield f"{case.id}: timed in processes {sorted(timed)}, ceilings of {sorted(ended)}"
    if strange := set(seen.timed) - {str(c.id) for c in seen.plan.cases}:
        yield f"{min(strange)}: timed, but not in the plan"


def _oracle(case: Case) -> tuple[dict[str, Any], Outputs]:
    stage = STAGES[case.problem.stage]
    inputs = stage.inputs(case)
    return inputs, stage.canonical(case.problem, inputs, stage.oracle(case.problem, inputs))


def _answers(seen: Seen, case: Case, kernel: str) -> Iterator[str]:
    """What the journal says the kernel and its baseline wrote, held against the oracle's outputs."""
    stage, key = STAGES[case.problem.stage], str(case.id)
    second = msgspec.structs.replace(case, second=True)
    inputs, want = _oracle(case)
    _, other = _oracle(second)
    specs = stage.specs(case.problem)

    def right(answer: j.Answer | None, wanted: Outputs) -> bool:
        return answer is not None and answer.sha256 == digest(specs, wanted, padded(specs, wanted, answer.poison))

    if seen.work.get(key) != stage.work(case.problem, inputs):
        yield "its work is not what its routes ask for"
    baseline = seen.plan.baseline_of(case.problem.stage)
    for name in dict.fromkeys((kernel, baseline)):
        judged = seen.judged.get((key, name))
        if judged is None or not isinstance(judged.outcome, Exact):
            continue  # told as a red case, or as a baseline that is none
        whole = len(judged.answers) == judged.outcome.repeats == seen.plan.repeats
        if not whole or not all(right(a, want) for a in judged.answers) or not right(judged.second, other):
            yield f"{name}: what it wrote when judged is not the oracle's output in {seen.plan.repeats} repeats"
    for process, timed in sorted(seen.timed.get(key, {}).items()):
        for arm in (kernel, baseline, baseline + NULL):
            if not any(s.arm == arm for s in timed.samples):
                continue
            if not right(timed.answers.get(arm), want) or not right(timed.second.get(arm), other):
                yield f"{arm}: what it wrote while timed in process {process} is not the oracle's output"


def _verdicts(seen: Seen, cases: list[Case], claims: list[Group], kernel: str, claim: str) -> Iterator[Refusal]:
    yield from _look(seen, cases, kernel)
    for group in claims:
        where = f"{group.stage}, {group.tokens} token{'s' * (group.tokens > 1)}"
        verdict = group.verdict
        if verdict is None:
            continue  # red or not timed, and told so
        if verdict.label == "BASELINE":
            yield Refusal("is_baseline", f"{kernel}: {where}")
            continue
        for reason in verdict.reasons:
            if caps(reason) or reason in ("below_floor", "null_differed"):
                yield Refusal(reason.partition(":")[0], f"{where}: {reason}")
        if group.comparison is None:
            continue  # without a baseline, and told so
        label, i = label_of(group.comparison.effect, seen.plan.margin), group.comparison.effect.ratio
        if label != "FASTER" and (label != "SAME" or claim != "parity"):
            yield Refusal("not_faster", f"{where}: {label}, {i.mid:+.1%} [{i.lo:+.1%}, {i.hi:+.1%}], claimed {claim}")


def _look(seen: Seen, cases: list[Case], kernel: str) -> Iterator[Refusal]:
    """QUICK, counted on the samples themselves: whole processes, and blocks in each."""
    for case in cases:
        samples = seen.samples([str(case.id)])
        blocks = [len({s.block for t in timed for s in t if s.arm == kernel}) for timed in samples.values()]
        if any(blocks) and is_quick(len(blocks), min(blocks)):  # a kernel without a sample is told as such
            yield Refusal("quick", f"{len(blocks)} process{'es' * (len(blocks) != 1)} of {min(blocks)} blocks")
            return
