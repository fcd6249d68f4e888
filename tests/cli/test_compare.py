"""Two runs side by side: of one identity, or of two whose difference is named."""

from pathlib import Path

import msgspec
import pytest

from replay.results import compare
from replay.results.build import build
from replay.session import journal as j
from tests.conftest import cli_in

RUN = (
    "run", "--capture", "qwen36-generated", "--route-layer-regex", r"\.9\.", "--max-cases", 1, "--stage", "moe.remap",
    "--quick", "--blocks", 5, "--repeats", 2,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in the folder a, each call of which took 50 µs: five real blocks may tell two copies of a baseline apart by chance, and
    a time that is INVALID has no ratio."""
    folder = tmp_path_factory.mktemp("compare")
    assert cli_in(folder)(*RUN, "-o", "a").returncode == 0
    rewrite(folder / "a", [steady(r) for r in j.read(folder / "a" / j.NAME)])
    return folder


@pytest.fixture
def two(folder: Path) -> list[j.Record]:
    """The run, beside it a copy in which every sample took half as long again."""
    records = j.read(folder / "a" / j.NAME)
    rewrite(folder / "b", [slower(r) for r in records])
    return records


def steady(record: j.Record) -> j.Record:
    """Every call of every arm took as long."""
    if not isinstance(record, j.Timed):
        return record
    samples = tuple(msgspec.structs.replace(s, span_ns=50_000 * s.calls, flags=()) for s in record.samples)
    return msgspec.structs.replace(record, samples=samples)


def slower(record: j.Record) -> j.Record:
    """Times by 1.5."""
    if not isinstance(record, j.Timed):
        return record
    samples = tuple(msgspec.structs.replace(s, span_ns=s.span_ns * 3 // 2) for s in record.samples)
    return msgspec.structs.replace(record, samples=samples)


def rewrite(folder: Path, records: list[j.Record]) -> None:
    """Another run's journal."""
    folder.mkdir(exist_ok=True)
    (folder / j.NAME).unlink(missing_ok=True)
    with j.Journal(folder / j.NAME) as journal:
        for record in records:
            journal.write(record)


def test_two_runs_beside_one_another(folder: Path, two: list[j.Record]) -> None:
    """A line a kernel and shape, and their ratio; a change of identity is refused until it is named."""
    cli = cli_in(folder)
    done = cli("compare", "a", "b")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("eager:", "sycl:"))]
    assert len(lines) == 2
    assert all(line.endswith("+50 %") for line in lines)
    begun = two[0]
    assert isinstance(begun, j.Begun)
    other = msgspec.structs.replace(begun, identity=begun.identity | {"packages": begun.identity["packages"] | {"torch": "9.9"}})
    rewrite(folder / "b", [other, *two[1:]])
    done = cli("compare", "a", "b")
    assert done.returncode == 5
    assert "got packages.torch: " in done.stderr
    assert done.stderr.count("\n") == 1
    done = cli("compare", "a", "b", "--across", "packages.torch")
    assert done.returncode == 0, done.stderr
    assert "differs: packages.torch: " in done.stdout
    assert cli("compare", "a", "nothing").returncode == 2


def test_what_one_run_lacks_is_told(two: list[j.Record]) -> None:
    """A kernel of one run only has no ratio."""
    whole = build(two, "")
    half = msgspec.structs.replace(whole, groups=whole.groups[:1])
    found = compare.lines(whole, half)
    assert [line.ratio is None for line in found] == [False, True]
    assert compare.text(found, []).splitlines()[3].endswith("–")
