"""The page of a run: one file, every mark in its pictures, every red line with its command."""

import re
from pathlib import Path

import pytest

from replay.results.build import build
from replay.results.report import timed_rows
from replay.session import journal as j
from tests.conftest import Cli, cli_in

KERNELS = """
from replay.kernels.eager import prepare_combine
from replay.model import Kernel

def lying(problem, weights):
    right = prepare_combine(problem, weights)
    def run(t):
        right(t)
        t["out"][0, 0] *= -1
    return run

KERNELS = [Kernel(id="mine:moe.combine:<lying>", prepare=":lying"), Kernel(id="mine:moe.combine:b", prepare=":prepare_combine")]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two stages, two processes and a liar, with its page."""
    folder = tmp_path_factory.mktemp("report")
    cli = cli_in(folder)
    (folder / "mine.py").write_text(KERNELS.replace("<lying>", "lying"))
    done = cli(
        "run", "--capture", "qwen36-generated", "--route-layer-regex", r"\.9\.", "--max-cases", 2, "--stage", "moe.combine",
        "--stage", "moe.remap", "--load", "mine.py", "--processes", 2, "--blocks", 5, "--repeats", 2, "-o", "run",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    done = cli("report", "run")
    assert (done.returncode, done.stdout) == (0, "wrote run/report.html\n"), done.stderr
    return folder


@pytest.fixture
def page(folder: Path) -> str:
    """The page."""
    return (folder / "run" / "report.html").read_text()


def test_every_mark_is_there(page: str, folder: Path) -> None:
    """A mark and a floor line for each timed case and kernel, all samples of both processes."""
    records = j.read(folder / "run" / j.NAME)
    rows = timed_rows(build(records, "").rows)
    assert len(rows) == 2 * (3 + 2)
    assert len(re.findall(r'id="mark-moe\.(?:combine|remap)-\d+"', page)) == len(rows)
    assert len(re.findall(r'id="floor-moe\.(?:combine|remap)-\d+"', page)) == len(rows)
    for process in (0, 1):
        drawn = page.partition(f'id="samples-{process}"')[2].partition("</g>")[0]
        samples = sum(len(r.samples) for r in records if isinstance(r, j.Timed) and r.process == process)
        assert drawn.count("<use ") == samples


def test_it_says_what_a_reader_needs(page: str) -> None:
    """Self-contained; the table with the red line and its command; per-token figures; ceilings, self-test and identity."""
    assert not re.search(r'(src|href)="http', page.replace('xlink:href="#', ""))
    assert re.search(r'<tr class="red"><td>mine:moe\.combine:lying</td><td>FAIL</td>', page)
    assert "<code>b70-replay run --capture qwen36-generated" in page
    assert "QUICK" in page
    assert re.search(r"<td>sycl:moe\.combine:rows</td><td>eager:moe\.combine</td><td>-?[\d.]+ \[", page)
    for word in ("division rounds correctly", "ceilings: read", "packages.torch", "journal sha256"):
        assert word in page


def test_without_the_extra_it_says_so(cli: Cli, tmp_path: Path) -> None:
    """One line, exit 5, nothing written."""
    import os

    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    blocked = tmp_path / "sitecustomize.py"
    blocked.write_text(
        "import importlib.util as u\nreal = u.find_spec\nu.find_spec = lambda n, *a: None if n == 'matplotlib' else real(n, *a)\n"
    )
    root = str(Path(__file__).parents[2])
    done = cli("report", "run", env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), root])})
    assert done.returncode == 5
    assert done.stderr.startswith("report: expected the extra `report`")
