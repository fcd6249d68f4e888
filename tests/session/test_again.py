"""A case beside which the memory ceilings moved is timed again, a quarter of all timings at most."""

from pathlib import Path

import msgspec

from replay.model import Case, Exact, Interval, Kernel, MemoryRates, Sample
from replay.results.seen import Seen
from replay.session import journal as j
from replay.session.run import Session
from tests.conftest import make_case
from tests.session.test_journal import plan

BASE, MINE = (Kernel(id=f"{who}:moe.route", prepare="m:f") for who in ("eager", "mine"))
QUICK_RATE, SLOW_RATE = (MemoryRates(*(Interval(gbs, gbs - 1, gbs + 1),) * 3) for gbs in (58, 34))


def timed(case: Case, moved: bool, process: int = 0) -> j.Timed:
    """Twenty blocks of two kernels in one process."""
    samples = tuple(Sample(n, k.id, 1, 1_000_000 + n, n) for n in range(20) for k in (BASE, MINE))
    return j.Timed(process, str(case.id), samples, {}, {}, {}, (QUICK_RATE, SLOW_RATE if moved else QUICK_RATE))


def begun(cases: int) -> tuple[list[j.Record], tuple[Case, ...]]:
    """A run of so many green cases in one process."""
    found = tuple(make_case("moe.route", seed=seed) for seed in range(cases))
    whole = msgspec.structs.replace(plan(), cases=found, kernels=(BASE, MINE), quick=False)
    green = [j.Judged(str(c.id), k.id, Exact("BITWISE", 2)) for c in found for k in (BASE, MINE)]
    return [j.Begun(whole, {}), *green], found


def session(records: list[j.Record], folder: Path) -> Session:
    """A session that goes on from these records."""
    first = records[0]
    assert isinstance(first, j.Begun)
    return Session(first.plan, j.Journal(folder / j.NAME), records, lambda *_: None)


def test_the_case_that_moved_and_no_other(tmp_path: Path) -> None:
    """One of eight is left to do; when its rates stood still, nothing is."""
    records, cases = begun(8)
    records += [timed(c, moved=n == 3) for n, c in enumerate(cases)]
    assert [c.id for c, _ in session(records, tmp_path)._jobs(0)] == [cases[3].id]
    assert session([*records, timed(cases[3], moved=False)], tmp_path)._jobs(0) == []


def test_a_quarter_at_most(tmp_path: Path) -> None:
    """Of eight that all moved two are timed again, and then none, though they moved again."""
    records, cases = begun(8)
    records += [timed(c, moved=True) for c in cases]
    again = [c for c, _ in session(records, tmp_path)._jobs(0)]
    assert len(again) == 2
    assert session([*records, *(timed(c, moved=True) for c in again)], tmp_path)._jobs(0) == []


def test_each_process_has_its_own_quarter(tmp_path: Path) -> None:
    """What one process used up is not taken from the next."""
    records, cases = begun(8)
    records += [timed(c, moved=True, process=p) for p in (0, 1) for c in cases]
    again = [c for c, _ in session(records, tmp_path)._jobs(0)]
    records += [timed(c, moved=True) for c in again]
    assert session(records, tmp_path)._jobs(0) == []
    assert len(session(records, tmp_path)._jobs(1)) == 2


def test_one_case_at_most_twice(tmp_path: Path) -> None:
    """A case beside which the rates always move does not use up what others may need."""
    records, cases = begun(16)
    records += [timed(c, moved=n == 0) for n, c in enumerate(cases)]
    for _ in range(2):
        assert [c.id for c, _ in session(records, tmp_path)._jobs(0)] == [cases[0].id]
        records.append(timed(cases[0], moved=True))
    assert session(records, tmp_path)._jobs(0) == []


def test_a_look_repeats_nothing(tmp_path: Path) -> None:
    """A quick run tells what moved and goes on."""
    records, cases = begun(8)
    first = records[0]
    assert isinstance(first, j.Begun)
    records[0] = j.Begun(msgspec.structs.replace(first.plan, quick=True), {})
    assert session([*records, *(timed(c, moved=True) for c in cases)], tmp_path)._jobs(0) == []


def test_the_last_timing_counts() -> None:
    """A case timed again is told as repeated and has its new rates; one that could not be has moved."""
    records, cases = begun(2)
    records += [timed(c, moved=True) for c in cases] + [timed(cases[0], moved=False)]
    seen = Seen(records)
    assert seen.repeated() == 1
    assert seen.drift([str(cases[0].id)]) == []
    assert seen.drift([str(cases[1].id)]) == ["copy", "inplace", "read"]
