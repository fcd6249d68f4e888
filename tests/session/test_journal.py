"""The journal: sealed line by line, cut lines dropped, edits refused."""

from pathlib import Path

import pytest

from replay.errors import EnvironmentRefused, InputError
from replay.model import Exact, Work
from replay.session import journal as j
from tests.conftest import make_case


def plan() -> j.Plan:
    """A plan of one case."""
    return j.Plan(
        capture="drawn", capture_path="drawn", capture_sha256="0" * 64, origin="generated",
        cases=(make_case("moe.route"),), kernels=(), named=(), baseline=None, device="cpu", cache="warm", launch="calls",
        repeats=2, blocks=5, processes=1, margin=0.01, quick=True, seed=7, require=None, drawn=(), selectors=(), timeout_s=120, hits={},
    )  # fmt: skip


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A journal of four records."""
    path = tmp_path / j.NAME
    with j.Journal(path) as journal:
        journal.write(j.Begun(plan(), {"seed": 7}))
        journal.write(j.Posed("a", Work(0, 0, 10, 0), degenerate=False))
        journal.write(j.Judged("a", "k", Exact("BITWISE", 2)))
        journal.write(j.Finished(1))
    return path


def test_reads_what_was_written(written: Path) -> None:
    """Records come back equal and in order."""
    records = j.read(written)
    assert [type(r).__name__ for r in records] == ["Begun", "Posed", "Judged", "Finished"]
    assert records[0] == j.Begun(plan(), {"seed": 7})


def test_cut_line_is_dropped_and_the_journal_goes_on(written: Path) -> None:
    """Cut anywhere in the last line, a journal resumes behind the line before."""
    data = written.read_bytes()
    last = data[:-1].rfind(b"\n") + 1
    for cut in (last + 1, last + 40, len(data) - 1):
        written.write_bytes(data[:cut])
        records, journal = j.resume(written)
        assert len(records) == 3
        with journal:
            journal.write(j.Finished(1))
        assert written.read_bytes() == data


def test_an_edited_line_is_refused(written: Path) -> None:
    """Any changed record breaks its seal; a resealed one breaks the next."""
    data = written.read_bytes()
    for old, new in ((b'"repeats":2', b'"repeats":3'), (b"BITWISE", b"Bitwise"), (b'"hot_bytes":10', b'"hot_bytes":11')):
        written.write_bytes(data.replace(old, new, 1))
        with pytest.raises((EnvironmentRefused, InputError)):
            j.read(written)
    lines = data.splitlines(keepends=True)
    written.write_bytes(b"".join([lines[0], lines[2], lines[3]]))
    with pytest.raises(EnvironmentRefused, match=r"run\.jsonl:2: seal"):
        j.read(written)


def test_no_run_there(tmp_path: Path) -> None:
    """A folder without a journal, and an empty journal, are no runs."""
    with pytest.raises(InputError, match=r"a run folder with a readable run\.jsonl"):
        j.read(tmp_path / j.NAME)
    (tmp_path / j.NAME).touch()
    with pytest.raises(InputError, match="a run that had begun"):
        j.resume(tmp_path / j.NAME)
