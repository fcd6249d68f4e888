"""Whatever moment a run is killed at, --resume ends with the result document of an undisturbed run, times apart."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from replay.session import journal as j
from tests.conftest import Cli

RUN = (
    "run", "--capture", "qwen36-generated", "--route-layer-regex", r"layers\.9\.", "--max-cases", "2", "--stage", "moe.route",
    "--stage", "moe.combine", "--kernel", "eager:*", "--blocks", "5", "--repeats", "2", "--quick",
)  # fmt: skip
TIMED = {"journal_sha256", "ceilings", "drift", "us", "floor", "floor_us", "floor_term", "times_floor", "ratio", "mde", "argv"}
TIMED |= {"timing", "comparison", "verdict", "repeated", "disturbed", "floor_impl_us"}


def without_times(value: Any) -> Any:
    """The document with every timing value, and what is derived from one, taken out."""
    if isinstance(value, dict):
        keep = {k: without_times(v) for k, v in value.items() if k not in TIMED}
        return {k: v for k, v in keep.items() if not (k == "detail" and value.get("verdict") not in (None, ""))}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def document(folder: Path) -> Any:
    """A run's result document, times apart."""
    return without_times(json.loads((folder / "result.json").read_text()))


def begun(folder: Path) -> "subprocess.Popen[bytes]":
    """A run whose journal has its first line; before that there is nothing to resume."""
    command = [sys.executable, "-m", "replay", *RUN, "-o", str(folder)]
    process = subprocess.Popen(command, cwd=folder.parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (folder / j.NAME).exists() or b"\n" not in (folder / j.NAME).read_bytes():
        assert process.poll() is None
        time.sleep(0.01)
    return process


@pytest.mark.slow
def test_killed_at_many_moments(cli: Cli, tmp_path: Path) -> None:
    """kill −9 the run, all through its length; then resume. `make soak-resume` does it at twenty moments."""
    trials = int(os.environ.get("B70_KILLS", "1"))
    process = begun(tmp_path / "whole")
    begin = time.monotonic()
    assert process.wait() == 0
    length = time.monotonic() - begin
    whole = document(tmp_path / "whole")
    assert len({r["case"] for r in whole["rows"]}) == 4
    moments = random.Random(20)
    delays = [length * (trial + moments.random()) / trials for trial in range(trials)]

    def trial(number: int) -> None:
        folder = tmp_path / f"killed{number}"
        process = begun(folder)
        time.sleep(delays[number])
        process.send_signal(signal.SIGKILL)
        process.wait()
        done = cli("run", "--resume", folder)
        assert done.returncode == 0, done.stderr
        assert document(folder) == whole

    with ThreadPoolExecutor(max_workers=2) as pool:  # two at a time: most of a trial is waiting for imports
        assert len(list(pool.map(trial, range(trials)))) == trials


def test_a_finished_run_resumes_to_itself_and_to_no_other_identity(cli: Cli, tmp_path: Path) -> None:
    """Nothing is done twice: the journal does not grow, and the table is printed again. A kernel file that changed since the
    run began is named, exit 5."""
    kernel = tmp_path / "mine.py"
    kernel.write_text(
        "from replay.model import Kernel\nfrom replay.kernels.eager import prepare_route\n"
        "KERNELS = [Kernel(id='mine:moe.route', prepare=':prepare_route')]\n"
    )
    first = cli(*RUN[:7], "--stage", "moe.route", "--kernel", "mine:*", "--load", kernel, "--quick", "--blocks", "5", "-o", "run")
    assert first.returncode == 0, first.stderr
    size = (tmp_path / "run" / j.NAME).stat().st_size
    again = cli("run", "--resume", "run")
    assert again.returncode == 0
    assert (tmp_path / "run" / j.NAME).stat().st_size == size
    assert again.stdout == first.stdout
    kernel.write_text(kernel.read_text() + "# rebuilt\n")
    refused = cli("run", "--resume", "run")
    assert refused.returncode == 5
    assert "the identity changed: sources" in refused.stderr
    assert "mine.py" in refused.stderr
