"""``b70-replay promote`` as it is typed: files or reasons, and the exit code of the gravest."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Cli
from tests.endpoint.conftest import MINE, RED, Run

WORDS = ("promote", "run", "--kernel", MINE, "--endpoint", "tiny-cpu")


@pytest.fixture
def promote(steady: Run, cli: Cli) -> Cli:
    """The command in the run's folder."""
    return lambda *words: cli(*words, cwd=steady.folder)


def test_a_promotion_writes_its_folder(promote: Cli, steady: Run) -> None:
    """Six files and the compiled kernels; the next one into the same folder is refused, and --dry-run writes none."""
    done = promote(*WORDS, "-o", "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"promoted: {MINE} as faster for 'tiny-cpu'" in done.stdout
    assert re.search(r"predicted: (3\.9|4\.0)", done.stdout)
    names = sorted(p.name for p in (steady.folder / "out").iterdir())
    assert names == ["README.md", "cache", "control.sh", "endpoint.toml", "engine.toml", "identity.json", "launch.sh"]
    assert os.access(steady.folder / "out" / "launch.sh", os.X_OK)
    assert any((steady.folder / "out" / "cache" / "launch" / "b70-replay").glob("moe_rows-*.syclbin"))
    again = promote(*WORDS, "-o", "out")
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    shown = promote(*WORDS, "--dry-run")
    assert shown.returncode == 0
    assert "==== launch.sh" in shown.stdout
    assert 'mode = "serve"' in shown.stdout
    printed = subprocess.run([steady.folder / "out" / "launch.sh", "--dry-run"], capture_output=True, text=True, check=True)
    assert "vllm.entrypoints.openai.api_server --model models/tiny" in printed.stdout


def test_refusals_print_every_reason_and_how_to_see_it_again(promote: Cli, steady: Run) -> None:
    """Code, what was found, what to do; a red case with the command that runs it again. Nothing is written."""
    done = promote("promote", "run", "--kernel", RED, "--endpoint", "b70-tp4-qwen36", "-o", "out")
    assert done.returncode == 5  # the device before the red case
    assert "  device_differs: measured on cpu, b70-tp4-qwen36 runs on xpu; " in done.stdout
    assert done.stdout.count("  red_case: moe.combine@") == 1
    assert done.stdout.count("reproduce: b70-replay run ") == 1
    assert not (steady.folder / "out").exists()
    assert promote("promote", "run", "--kernel", RED, "--endpoint", "tiny-cpu", "-o", "out").returncode == 1
    assert promote("promote", "run", "--kernel", "a:b.c", "--endpoint", "tiny-cpu", "-o", "out").returncode == 3


def test_the_newest_run_is_taken(promote: Cli, steady: Run) -> None:
    """Without RUN, the newest under runs/; where there is none, one line and exit 2."""
    words = ("promote", *WORDS[2:], "-o", "out")
    assert (none := promote(*words)).returncode == 2
    assert "runs: RUN: expected a folder with runs in it" in none.stderr
    shutil.copytree(steady.folder / "run", steady.folder / "runs" / "one")
    assert promote(*words).returncode == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((*WORDS,), "-o: expected a folder, or --dry-run, got neither"),
        ((*WORDS, "-o", "out", "--dry-run"), "got both"),
        ((*WORDS[:4], "--endpoint", "none.toml", "-o", "out"), "none.toml: --endpoint: expected a readable TOML file"),
        (("promote", "nowhere", *WORDS[2:], "-o", "out"), "nowhere: run: expected a run folder"),
    ],
)
def test_bad_input_is_one_line(cli: Cli, tmp_path: Path, words: tuple[str, ...], text: str) -> None:
    """Exit 2; nothing is written."""
    done = cli(*words)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert text in done.stderr
    assert list(tmp_path.iterdir()) == []
