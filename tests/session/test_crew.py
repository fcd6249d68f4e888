"""Kernels that cannot share a process are timed in the same blocks all the same."""

from pathlib import Path

import msgspec
import pytest

from replay.kernels.registry import registered
from replay.model import NULL, Kernel
from replay.results.seen import Seen
from replay.session import journal as j
from replay.session.crew import Seating
from tests.conftest import Cli, make_case
from tests.session.test_journal import plan

# Two builds of one library: the same operation, which one process can register once.
BUILD = """
import os
from pathlib import Path
import torch
from replay.kernels import eager
from replay.model import Kernel

LIBRARY = torch.library.Library("lab", "DEF")
LIBRARY.define("remap(Tensor q, Tensor s, Tensor p, Tensor(a!) rows, Tensor(b!) scales) -> ()")

def remap(q, s, p, rows, scales):
    for _ in range({times}):
        eager.remap(q, s, p, rows, scales)

LIBRARY.impl("remap", remap, "CPU")

def prepare(problem, weights):
    with Path({log!r}).open("a") as log:
        log.write(f"{build} {{os.getpid()}}\\n")
    def run(t):
        torch.ops.lab.remap(t["q"], t["q_scale"], t["unpermuted_to_permuted"], t["a"], t["a_scale"])
    return run

KERNELS = [Kernel(id="lab:moe.remap:{build}", prepare=":prepare")]
"""
CASES = ("run", "--capture", "qwen36-generated", "--route-layer-regex", r"\.9\.", "--max-cases", 2, "--stage", "moe.remap")


@pytest.fixture
def builds(tmp_path: Path) -> list[str]:
    """Two files that register one operation; the second does its work twice."""
    for build, times in (("a", 1), ("b", 2)):
        source = BUILD.format(build=build, times=times, log=str(tmp_path / "log"))
        (tmp_path / f"{build}.py").write_text(source)
    return ["--load", "a.py", "--load", "b.py"]


def test_two_builds_of_one_library(cli: Cli, tmp_path: Path, builds: list[str]) -> None:
    """Both are judged and timed, block by block, each in a process of its own."""
    done = cli(
        *CASES, *builds, "--kernel", "lab:*", "--kernel", "eager:*", "--processes", 2, "--blocks", 6, "--repeats", 2, "-o", "run"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = Seen(j.read(tmp_path / "run" / j.NAME))
    assert [len(processes) for processes in seen.timed.values()] == [2, 2]
    arms = {"eager:moe.remap", "eager:moe.remap" + NULL, "lab:moe.remap:a", "lab:moe.remap:b"}
    for processes in seen.timed.values():
        for timed in processes.values():
            assert {(s.block, s.arm) for s in timed.samples} == {(b, arm) for b in range(6) for arm in arms}
            blocks = [s.block for s in timed.samples]
            assert blocks == sorted(blocks), "samples of one block lie beside those of another"
            assert set(timed.answers) == set(timed.second) == arms
    lines = (tmp_path / "log").read_text().split()
    pids = {build: {pid for b, pid in zip(lines[::2], lines[1::2], strict=True) if b == build} for build in ("a", "b")}
    assert not pids["a"] & pids["b"]
    slower = next(line for line in done.stdout.splitlines() if line.startswith("lab:moe.remap:b"))
    assert "BITWISE" in slower


def test_a_build_that_dies_takes_only_itself(cli: Cli, tmp_path: Path, builds: list[str]) -> None:
    """It is charged to the arm whose step it was, and the others go on without it."""
    text = (tmp_path / "b.py").read_text()
    dies = "    calls = []\n    def run(t):\n        calls.append(1)\n        if len(calls) > 20:\n            os.abort()\n"
    (tmp_path / "b.py").write_text(text.replace("    def run(t):\n", dies))
    done = cli(*CASES, *builds, "--kernel", "lab:*", "--quick", "--blocks", 5, "--repeats", 2, "-o", "run")
    assert done.returncode == 1, done.stdout + done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.startswith("lab:")}
    assert "SIGABRT" in lines["lab:moe.remap:b"]
    assert "BITWISE" in lines["lab:moe.remap:a"]


def test_one_file_needs_one_process() -> None:
    """Kernels sit together unless they come from two files; the second copy of a baseline then sits alone."""
    remap = registered()["eager:moe.remap"]
    a, b = (msgspec.structs.replace(remap, id=f"lab:moe.remap:{n}", file=f"/{n}.py") for n in "ab")

    def seats(*kernels: Kernel) -> list[int]:
        seating = Seating(msgspec.structs.replace(plan(), cases=(make_case("moe.remap"),), kernels=kernels))
        return [seating.arm(k.id, k).seat for k in kernels] + [seating.arm(kernels[0].id + NULL, kernels[0]).seat]

    assert seats(remap) == [0, 0]
    assert seats(remap, a) == [0, 0, 0]
    assert seats(remap, a, b) == [0, 0, 1, 2]
    assert seats(a, b) == [0, 1, 2]
