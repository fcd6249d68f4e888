"""A run from end to end: crashing, hanging and wrong kernels beside right ones, and a user's own kernel."""

import json
from pathlib import Path

import msgspec
import pytest

from replay.cli.run import exit_code
from replay.results.build import build
from replay.results.seen import Seen
from replay.session import journal
from tests.conftest import Cli

LATER = """
def later(prepare, fault):
    def prepared(problem, weights):
        calls, right = [], prepare(problem, weights)
        def run(t):
            right(t)
            calls.append(1)
            if len(calls) > 20:  # more than are judged
                fault(t)
        return run
    return prepared
"""
KERNELS = (
    LATER
    + """
import os, time, torch
from replay.kernels.eager import prepare_route, route
from replay.model import Kernel

def right(problem, weights):
    return prepare_route(problem, weights)

def crashing(problem, weights):
    return lambda t: os.kill(os.getpid(), 11)

def raising(problem, weights):
    def run(t):
        raise ValueError("no such tile")
    return run

def noop(problem, weights):
    return lambda t: None

def first_offset(t):
    t["offsets"][0] = 1

later_wrong = later(prepare_route, first_offset)
dies_when_timed = later(prepare_route, lambda t: os.kill(os.getpid(), 9))

def flaky(problem, weights):
    calls = []
    ok = prepare_route(problem, weights)
    def run(t):
        ok(t)
        calls.append(1)
        if len(calls) == 3:
            t["rows_per_expert"][5] += 1
    return run

def peeks(problem, weights):
    ok = prepare_route(problem, weights)
    def run(t):
        if t["offsets"].view(torch.uint8)[-1].item() in (0xFF, 0x7B):
            ok(t)
    return run

def resizes(problem, weights):
    return lambda t: t["offsets"].resize_(0)

def surrogate(problem, weights):
    def run(t):
        raise ValueError("\\ud800")
    return run

def loses_once(problem, weights):
    ok = prepare_route(problem, weights)
    mark = os.path.join(os.path.dirname(__file__), "lost")
    def run(t):
        if not os.path.exists(mark):
            open(mark, "w").close()
            raise RuntimeError("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)")
        ok(t)
    return run

def takes_all_memory(problem, weights):
    kept = []
    def run(t):
        for _ in range(4096):
            kept.append(torch.empty(1 << 30, dtype=torch.uint8))
    return run

def exits(problem, weights):
    def run(t):
        raise SystemExit(0)
    return run

def leaves_a_process(problem, weights):
    import subprocess
    ok = prepare_route(problem, weights)
    subprocess.Popen(["sleep", "98765"])
    return ok

NAMES = ("peeks", "resizes", "surrogate", "exits", "loses_once", "takes_all_memory", "leaves_a_process", "right", "crashing", "raising", "noop", "later_wrong", "dies_when_timed", "flaky")
KERNELS = [Kernel(id=f"mine:moe.route:{n}", prepare=f":{n}") for n in NAMES]
KERNELS.append(Kernel(id="mine:moe.route:elsewhere", prepare=":right", devices=("xpu",)))
KERNELS.append(Kernel(id="mine:moe.route:needy", prepare=":right", needs=("python:no_such_module",)))
"""
)


ONE_CASE = (
    "run", "--capture", "qwen36-generated", "--stage", "moe.route", "--max-cases", 1, "--route-layer-regex", r"\.9\.",
)  # fmt: skip


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """A user's file of kernels."""
    path = tmp_path / "mine.py"
    path.write_text(KERNELS)
    return path


def test_every_kernel_gets_its_own_answer(cli: Cli, tmp_path: Path, kernels: Path) -> None:
    """Crashes, exceptions, no-ops and late faults are each charged to their kernel; the right ones get their times."""
    done = cli(
        "run", "--capture", "qwen36-generated", "--stage", "moe.route", "--max-cases", 1, "--route-layer-regex", r"\.9\.",
        "--kernel", "mine:*", "--baseline", "eager:moe.route", "--load", kernels, "--quick", "--blocks", 5, "-o", "run",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    rows = {r["kernel"].rpartition(":")[2]: r for r in json.loads((tmp_path / "run" / "result.json").read_text())["rows"]}
    status = {k: r["outcome"].get("grade") or r["outcome"]["status"] for k, r in rows.items()}
    assert status == {
        "moe.route": "BITWISE", "right": "BITWISE", "crashing": "CRASHED", "raising": "CRASHED", "noop": "FAIL",
        "later_wrong": "FAIL", "dies_when_timed": "CRASHED", "flaky": "NONDETERMINISTIC", "elsewhere": "UNAVAILABLE",
        "needy": "UNAVAILABLE", "loses_once": "DEVICE_LOST", "takes_all_memory": "CRASHED",
        "peeks": "BITWISE", "resizes": "FAIL", "surrogate": "CRASHED", "exits": "CRASHED", "leaves_a_process": "BITWISE",
    }  # fmt: skip
    assert rows["exits"]["outcome"]["detail"] == "SystemExit: 0"
    import psutil

    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "98765"]]
    assert rows["peeks"]["outcome"]["timing"]["us"]["mid"] > 0.5 * rows["right"]["outcome"]["timing"]["us"]["mid"]
    assert "signal SIGSEGV" in rows["crashing"]["outcome"]["detail"]
    assert rows["raising"]["outcome"]["detail"] == "ValueError: no such tile"
    assert "no such tile" in rows["raising"]["outcome"]["log_tail"]
    assert "in a timed call" in rows["later_wrong"]["outcome"]["detail"]
    assert "signal SIGKILL while it was timed" in rows["dies_when_timed"]["outcome"]["detail"]
    assert "15 of 16 repeats right" in rows["flaky"]["outcome"]["detail"]
    assert rows["right"]["outcome"]["timing"]["samples"] == 5
    assert "unavailable: mine:moe.route:elsewhere (runs on xpu, not on cpu)" in done.stdout
    assert "mine:moe.route:needy (no Python module no_such_module)" in done.stdout


NEAR = (
    LATER
    + """
from replay.kernels.eager_gdn import prepare_conv
from replay.model import Kernel

def one_step(t):  # of bf16
    import torch
    t["qkv"].view(torch.int16)[0, 0] ^= 1

near = later(prepare_conv, one_step)
KERNELS = [Kernel(id=f"mine:gdn.conv:{name}", prepare=":near", budgeted=name == "asks") for name in ("asks", "asks_not")]
"""
)


def test_a_budget_needed_in_a_timed_call_lowers_the_grade(cli: Cli, tmp_path: Path) -> None:
    """Exact while judged and a step off while timed: WITHIN_ULP for a kernel that asks for the budget, FAIL for one that does not."""
    (tmp_path / "mine.py").write_text(NEAR)
    done = cli(
        "run", "--capture", "qwen36-states-generated", "--stage", "gdn.conv", "--max-cases", 1, "--kernel", "mine:*",
        "--load", "mine.py", "--quick", "--blocks", 5, "-o", "run",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    rows = {
        r["kernel"].rpartition(":")[2]: r["outcome"] for r in json.loads((tmp_path / "run" / "result.json").read_text())["rows"]
    }
    assert (rows["asks"]["grade"], rows["asks_not"]["status"]) == ("WITHIN_ULP", "FAIL")
    assert "qkv within" in rows["asks"]["detail"]
    assert rows["asks"]["timing"]["samples"] == 5


def test_a_lost_device_costs_one_case(cli: Cli, tmp_path: Path, kernels: Path) -> None:
    """The case it was lost in says so; the next ones run, in another process, once the device is seen to compute."""
    done = cli(
        "run", "--capture", "qwen36-generated", "--stage", "moe.route", "--max-cases", 4, "--route-layer-regex", r"\.9\.",
        "--kernel", "mine:*:loses_once", "--kernel", "eager:*", "--load", kernels, "--quick", "--blocks", 5, "-o", "run",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    rows = json.loads((tmp_path / "run" / "result.json").read_text())["rows"]
    mine = [r["outcome"] for r in rows if "loses" in r["kernel"]]
    assert [o.get("status") or o["grade"] for o in mine] == ["DEVICE_LOST", "BITWISE", "BITWISE", "BITWISE"]
    assert all(r["outcome"]["grade"] == "BITWISE" for r in rows if r["kernel"].startswith("eager"))


def test_the_reproduction_line_reproduces(cli: Cli, tmp_path: Path, kernels: Path) -> None:
    """The command printed under a red line runs that line again, and ends as red."""
    done = cli(
        "run", "--capture", "qwen36-generated", "--stage", "moe.route", "--kernel", "*:noop", "--max-cases", 2, "--load",
        kernels, "--seed", 9, "-o", "run",
    )  # fmt: skip
    assert done.returncode == 1
    line = next(text for text in done.stdout.splitlines() if "reproduce:" in text)
    command = line.partition("reproduce: b70-replay ")[2]
    import shlex

    again = cli(*shlex.split(command), "-o", "again")
    assert again.returncode == 1, again.stderr
    before, after = (json.loads((tmp_path / n / "result.json").read_text())["rows"] for n in ("run", "again"))
    assert after[0]["outcome"] == before[0]["outcome"]
    assert after[0]["case"] == before[0]["case"]


def test_naming_an_unavailable_kernel_is_refused(cli: Cli, kernels: Path) -> None:
    """Exit 5 when a kernel named exactly cannot run; the next test sweeps it in by a glob, which is no request."""
    assert cli(*ONE_CASE, "--load", kernels, "--kernel", "mine:moe.route:needy").returncode == 5


def test_requirements(cli: Cli, tmp_path: Path, kernels: Path) -> None:
    """--require faster and floor:X end with 3 or 4 where they are not met."""
    three = ("--kernel", "eager:*", "--kernel", "mine:*:right", "--kernel", "mine:*:needy")
    done = cli(*ONE_CASE, *three, "--load", kernels, "--quick", "--blocks", 5, "--require", "exact", "-o", "run")
    assert done.returncode == 0, done.stderr
    records = journal.read(tmp_path / "run" / journal.NAME)
    plan, result = Seen(records).plan, build(records, "")

    def code(require: str, *, alone: bool = False) -> int:
        groups = tuple(g for g in result.groups if not alone or g.kernel.startswith("eager"))
        asked = msgspec.structs.replace(plan, require=require)
        return exit_code(asked, msgspec.structs.replace(result, groups=groups))

    assert code("exact") == 0
    assert code("faster") in (3, 4)  # the same code twice: never 0
    assert code("floor:0.5") in (3, 4)  # 3 where a restless machine made a time INVALID
    assert code("floor:1000000", alone=True) == 0
    assert code("faster", alone=True) == 3
