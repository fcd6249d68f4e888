"""Reasons to refuse: each by its own code, and no edit of a journal gets through."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from replay.endpoint.reasons import REASONS, Refusal, exit_code
from replay.errors import InputError
from replay.model import LAYOUTS, Exact
from replay.session import journal as j
from replay.stages import STAGES
from replay.stages.vary import twins_of
from replay.timing.watch import Watched
from tests.endpoint.conftest import BASE, MINE, NULL, RED, SECOND, Change, Run, changed, scaled, without

ON = twins_of(STAGES["moe.combine"], LAYOUTS)


def test_an_honest_run_is_granted(steady: Run) -> None:
    """Nothing speaks against a full, exact, faster run; a kernel that takes the baseline's time is SAME."""
    assert steady.codes() == []
    assert steady.codes(SECOND) == ["not_faster"]
    assert steady.codes(SECOND, claim="parity") == []


def first_processes(n: int) -> Change:
    """No record of a process from n on."""
    return lambda r: None if isinstance(r, j.Timed | j.Calibrated) and r.process >= n else r


def first_blocks(n: int) -> Change:
    """No block from n on."""

    def change(record: j.Record) -> j.Record:
        if not isinstance(record, j.Timed):
            return record
        return msgspec.structs.replace(record, samples=tuple(s for s in record.samples if s.block < n))

    return change


def flagged(flag: str) -> Change:
    """A flag on every sample."""

    def change(record: j.Record) -> j.Record:
        if not isinstance(record, j.Timed):
            return record
        return msgspec.structs.replace(record, samples=tuple(msgspec.structs.replace(s, flags=(flag,)) for s in record.samples))

    return change


def slower_reading(record: j.Record) -> j.Record:
    """Half the rate behind every case of the second process."""
    if not isinstance(record, j.Timed) or record.process != 1:
        return record
    before, after = record.memory
    rate = after.read_gbs
    half = msgspec.structs.replace(rate, mid=rate.mid / 2, lo=rate.lo / 2, hi=rate.hi / 2)
    return msgspec.structs.replace(record, memory=(before, msgspec.structs.replace(after, read_gbs=half)))


def restless_null(record: j.Record) -> j.Record:
    """A null arm that is 3 % off, up in one process and down in the next."""
    return scaled(BASE + NULL, 1.03 if getattr(record, "process", 0) % 2 else 0.97)(record)


def planned(**fields: Any) -> Change:
    """Fields of the plan set."""

    def change(record: j.Record) -> j.Record:
        if not isinstance(record, j.Begun):
            return record
        return j.Begun(msgspec.structs.replace(record.plan, **fields), record.identity)

    return change


def a_library(sha256: str) -> Change:
    """One more loaded file, which is not there."""
    return lambda r: j.Loaded(r.where, {**r.files, "/tmp/gone/mine.so": sha256}) if isinstance(r, j.Loaded) else r


def identity(**fields: Any) -> Change:
    """Fields of the identity set, or taken out where they are None."""

    def change(record: j.Record) -> j.Record:
        if not isinstance(record, j.Begun):
            return record
        merged = {**record.identity, **fields}
        return j.Begun(record.plan, {k: v for k, v in merged.items() if v is not None})

    return change


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        (first_processes(4), ["quick"]),
        (first_blocks(29), ["quick"]),
        (scaled(MINE, 1e-6), ["below_floor"]),
        (scaled(BASE + NULL, 1.05), ["null_differed"]),
        (restless_null, ["null_inconclusive"]),
        (without(BASE + NULL), ["null_missing"]),
        (without(BASE), ["no_baseline"]),
        (without(MINE), ["not_timed"]),
        (slower_reading, ["ceiling_drift"]),
        (flagged("not_cold"), ["not_cold"]),
        (scaled(MINE, 2.5), ["not_faster"]),
        (lambda r: None if isinstance(r, j.Finished) else r, ["unfinished"]),
        (lambda r: None if isinstance(r, j.Loaded) else r, ["identity_missing"]),
        (identity(numeric_flags=None), ["identity_changed", "identity_missing"]),
        (identity(git=None), ["identity_missing"]),
        (identity(python="unknown"), ["identity_changed", "identity_unknown"]),
        (identity(packages={"torch": "2.0"}), ["identity_changed"]),
        (identity(environment={"SYCL_CACHE_PERSISTENT": "1"}), ["identity_changed"]),
        (identity(capture="0" * 64), ["capture_changed"]),
        (planned(margin=0.02), ["wide_margin"]),
        (planned(cache="warm"), ["not_cold"]),
        (a_library("unknown"), ["rebuilt_kernel"]),
    ],
)  # fmt: skip
def test_each_reason_has_its_code(steady: Run, change: Change, codes: list[str]) -> None:
    """One thing changed, sealed anew, gives that reason and no other."""
    assert steady.write(changed(steady.records(), change)).codes() == codes


def test_reasons_about_the_kernel(steady: Run) -> None:
    """A red one, one that could not run, one that is not there, and the baseline itself."""
    assert steady.codes(RED) == ["red_case"]
    assert steady.codes("mine:moe.combine:elsewhere") == ["unavailable"]
    assert steady.codes("mine:moe.combine:other") == ["kernel_not_in_run"]
    assert steady.codes(BASE) == ["is_baseline"]


def test_a_rebuilt_kernel_is_named(steady: Run) -> None:
    """The user's file is not what it was: in the sources, and in what the children loaded."""
    steady.kernels.write_text(steady.kernels.read_text() + "# rebuilt\n")
    found = steady.refused(SECOND, "parity")
    assert {r.code for r in found} == {"rebuilt_kernel"}
    assert all("mine.py" in r.detail for r in found)


def test_a_library_built_again_in_mid_run_is_named(steady: Run) -> None:
    """Two hashes of one path in one journal, or a mapped file that was no longer there."""
    library = next(path for r in steady.records() if isinstance(r, j.Loaded) for path in r.files if "libtorch_cpu" in path)
    for files in ({library: "0" * 64}, {f"{library} (deleted)": "unknown"}):
        records = steady.records()
        records.insert(-1, j.Loaded("time 3", files))
        assert steady.write(records).codes() == ["rebuilt_kernel"]
        steady.write([r for r in records if not (isinstance(r, j.Loaded) and r.where == "time 3")])


def test_a_capture_that_changed_or_went_is_told(steady: Run) -> None:
    """A changed row is a changed hash, whether or not the manifest goes with it; a missing file is missing."""
    routes = steady.capture / "routes.jsonl"
    data = routes.read_bytes()
    routes.write_bytes(data.replace(b"[98,", b"[97,", 1))
    assert steady.codes() == ["capture_changed"]
    manifest = json.loads((steady.capture / "manifest.json").read_text())
    import hashlib

    manifest["files"][0]["sha256"] = hashlib.sha256(routes.read_bytes()).hexdigest()
    (steady.capture / "manifest.json").write_text(json.dumps(manifest))
    assert steady.codes() == ["capture_changed"]
    routes.write_bytes(routes.read_bytes() + b"\n")
    assert steady.codes() == ["capture_changed"]
    import shutil

    shutil.rmtree(steady.capture)
    assert steady.codes() == ["capture_missing"]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a JSON document that holds no other."""
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(len(value)):
            yield from leaves(value[index], (*path, index))
    else:
        yield path


def edited(value: Any, path: tuple[Any, ...]) -> Any:
    """A copy with the value at a path replaced by another of its kind."""
    if not path:
        if isinstance(value, bool):
            return not value
        if value is None:
            return 1
        return value + 1 if isinstance(value, int | float) else value + "x" if value else "x"
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = edited(value[path[0]], path[1:])
    return copy


def test_no_edited_field_gets_through(steady: Run) -> None:
    """Every field of the journal in turn, seals included: the file is refused, whatever was edited."""
    lines = steady.journal.read_bytes().splitlines()
    count, before = 0, ""
    for number, raw in enumerate(lines):
        document = json.loads(raw)
        assert j.untouched(raw, before)
        for path in leaves(document):
            line = json.dumps(edited(document, path), separators=(",", ":"), ensure_ascii=False).encode()
            assert not j.untouched(line, before), (number, path)
            if count % 500 == 0:  # the whole decision, for a sample of them
                steady.journal.write_bytes(b"\n".join([*lines[:number], line, *lines[number + 1 :], b""]))
                assert steady.codes() == ["edited_journal"], (number, path)
            count += 1
        before = document["seal"]
    assert count > 3000
    for cut in (b"", lines[0][:-1]):  # a cut last line is what a killed run leaves; a first one is no run
        steady.journal.write_bytes(b"\n".join([*lines[: -1 if cut else 0], cut]))
        if cut:
            assert steady.codes() == ["unfinished"]
        else:
            with pytest.raises(InputError, match="a run that had begun"):
                steady.codes()


SEALED_ONLY = ("samples", "ceilings", "memory", "dropped", "detail", "log_tail", "wrong")


def test_a_timing_is_made_again_for_a_ceiling_that_moved_alone(steady: Run) -> None:
    """A second timing of a case beside which nothing had moved is a choice among times."""
    records = steady.records()
    first = next(i for i, r in enumerate(records) if isinstance(r, j.Timed))
    steady.write([*records[: first + 1], *records[first:]])
    assert "evidence_differs" in steady.codes()


def test_an_edited_verdict_is_not_believed_even_under_a_new_seal(steady: Run) -> None:
    """What can be computed again is: grades, answers, work, rows, and the hashes of what ran."""
    now = steady.now()
    records = steady.records()
    through = []
    for number, record in enumerate(records):
        if not isinstance(record, j.Judged | j.Posed | j.Timed | j.Loaded) or getattr(record, "kernel", MINE) != MINE:
            continue
        document = json.loads(msgspec.json.encode(record))
        paths = [p for p in leaves(document) if p[0] not in (*SEALED_ONLY, "where", "record")]
        if isinstance(record, j.Timed):  # arms that play no part in this kernel's claim are not looked at
            paths = [p for p in paths if p[0] not in ("answers", "second") or p[1] in (MINE, BASE, BASE + NULL)]
        for path in paths if len(paths) < 16 else paths[:: len(paths) // 16]:
            try:
                new = msgspec.convert(edited(document, path), type(record))
            except msgspec.ValidationError:
                continue  # such a line does not even parse
            steady.write([*records[:number], new, *records[number + 1 :]])
            if not steady.refused(now=now):
                through.append((number, type(record).__name__, path))
    assert through == []
    plan = records[0]
    assert isinstance(plan, j.Begun)
    cases = tuple(msgspec.structs.replace(c, held=other_routes(c.routes)) for c in plan.plan.cases)
    steady.write([j.Begun(msgspec.structs.replace(plan.plan, cases=cases), plan.identity), *records[1:]])
    assert "evidence_differs" in {r.code for r in steady.refused(now=now)}


def other_routes(routes: Any) -> Any:
    """The same shape, every expert moved by one."""
    return msgspec.structs.replace(routes, topk_ids=tuple(tuple(i + 1 for i in row) for row in routes.topk_ids))


def test_a_red_case_called_green_is_seen_by_its_answers(steady: Run) -> None:
    """A stored grade counts for nothing: the wrong kernel's own outputs, called BITWISE, are not the oracle's."""

    def change(record: j.Record) -> j.Record:
        if isinstance(record, j.Judged) and record.kernel == RED:
            answers = tuple(j.Answer(poison, "0" * 64) for poison in (255, 123, 255, 123))
            return j.Judged(record.case, RED, Exact("BITWISE", 4), answers, dict.fromkeys(ON, answers[0]))
        return record

    assert "evidence_differs" in steady.write(changed(steady.records(), change)).codes(RED)


@pytest.mark.parametrize("twin", ON)
def test_an_answer_to_a_twin_is_demanded(steady: Run, twin: str) -> None:
    """A green line that lost what the kernel wrote on other bytes, or on strided inputs, is not granted."""

    def change(record: j.Record) -> j.Record:
        if isinstance(record, j.Judged) and record.kernel == MINE:
            return msgspec.structs.replace(record, twins={n: a for n, a in record.twins.items() if n != twin})
        return record

    assert steady.write(changed(steady.records(), change)).codes() == ["evidence_differs"]


def test_the_self_test_is_demanded(steady: Run) -> None:
    """No record of it, a device that was not asked or died of it, and a wrong answer that the kernel rests on."""
    records = steady.records()

    def tested(new: j.Selftested | None) -> list[str]:
        return steady.write(changed(records, lambda r: new if isinstance(r, j.Selftested) else r)).codes()

    known = next(r for r in records if isinstance(r, j.Selftested))
    assert tested(None) == ["selftest"]
    assert tested(j.Selftested((), unasked="no SYCL kernels on cuda")) == ["selftest"]
    assert tested(j.Selftested((), died="signal SIGSEGV")) == ["selftest"]
    for key, codes in (("contraction", ["selftest"]), ("square_root", [])):
        wrong = tuple(msgspec.structs.replace(f, wrong=int(f.key == key)) for f in known.findings)
        assert tested(j.Selftested(wrong)) == codes


@pytest.mark.parametrize(
    ("watched", "codes"),
    [
        (Watched(10_000_000_000, 1_000_000_000, {}), ["clock_disagrees"]),
        (Watched(1_000_000_000, 1_000_000_000, {"cc1plus (7)": 0.4}), ["foreign_process"]),
        (None, ["evidence_differs"]),
    ],
)
def test_what_went_on_beside_the_samples(steady: Run, watched: Watched | None, codes: list[str]) -> None:
    """A clock that lies, a busy neighbour, and a process of which nothing is known."""

    def change(record: j.Record) -> j.Record | None:
        if not isinstance(record, j.Attended) or record.process != 3:
            return record
        return watched and j.Attended(3, watched)

    assert steady.write(changed(steady.records(), change)).codes() == codes


def test_a_plan_that_asks_for_less_is_refused(steady: Run) -> None:
    """A kernel declared other than it is registered, and a twin in the place of a case."""
    records = steady.records()
    begun = records[0]
    assert isinstance(begun, j.Begun)
    replace = msgspec.structs.replace

    def planned(**fields: Any) -> list[str]:
        return steady.write([replace(begun, plan=replace(begun.plan, **fields)), *records[1:]]).codes()

    for field, value in (("layouts", ("contiguous",)), ("rests_on", ())):
        kernels = tuple(replace(k, **{field: value}) if k.id == MINE else k for k in begun.plan.kernels)
        assert "rebuilt_kernel" in planned(kernels=kernels)
    assert "evidence_differs" in planned(cases=tuple(replace(c, twin="second") for c in begun.plan.cases))


def test_all_reasons_are_listed(steady: Run) -> None:
    """Not the first only, and the exit code is that of the gravest: 5 before 1 before 3."""
    records = changed(changed(steady.records(), first_processes(4)), scaled(BASE + NULL, 1.05))
    assert steady.write(changed(records, identity(git=None))).codes() == ["identity_missing", "null_differed", "quick"]
    codes = [exit_code([Refusal(code, "") for code in given]) for given in (["quick"], ["quick", "red_case"], [*REASONS], [])]
    assert codes == [3, 1, 5, 0]


def test_the_drawn_times_are_those_of_a_quiet_machine() -> None:
    """The fixture's noise is far below the margin, so that no test of a reason depends on it."""
    assert np.exp(np.random.default_rng(3).normal(0, 0.001, 1000)).std() < 0.002
