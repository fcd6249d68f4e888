"""States fed back: what holds for a thousand steps, what shows, and where."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from replay.model import Case, Exact, Kernel
from replay.oracle import gdn as oracle
from replay.oracle.gdn import widen
from replay.stages import STAGES
from replay.stages.gdn_chain import carried, links, owned
from replay.studies.chain import Limits, Trace, take
from replay.studies.truth import truths
from tests.conftest import Cli, judge_here
from tests.gdn import state_case, state_file

KERNEL = Kernel(id="mine:gdn.recurrent", prepare=":prepare")
BUDGETED = Kernel(id="mine:gdn.recurrent", prepare=":prepare", budgeted=True)


def followed(case: Case, steps: int, kernel: Kernel, write: Any, reset: str = "chain", limit: float = 5) -> Trace:
    """An arm whose step is ``write(number, inputs) → outputs``, its states fed back."""
    trace = Trace(case, kernel.id, kernel)
    first = STAGES[case.problem.stage].inputs(case)
    before = None
    for number, (truth, link) in enumerate(zip(truths(case, reset), links(case, reset), strict=False)):
        if number == steps or trace.ended:
            break
        before = write(number, {**link.inputs, **carried(case, reset, first, before)})
        take(trace, number, truth, before, Limits(steps, reset, limit))
    return trace


def right(case: Case) -> Any:
    """The contract itself."""
    return lambda number, inputs: STAGES[case.problem.stage].oracle(case.problem, inputs)


def rounded_beta(case: Case, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The contract with beta rounded to bf16."""
    gates = oracle.gates

    def rounded(*args: Any) -> Any:
        g, beta = gates(*args)
        return g, widen(oracle.narrow(beta, np.zeros(0, np.uint16)))

    def write(number: int, inputs: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(oracle, "gates", rounded)
            return STAGES[case.problem.stage].oracle(case.problem, inputs)

    return write


@pytest.mark.parametrize(("stage", "layout"), [("gdn.recurrent", "v_k"), ("gdn.step", "k_v")])
def test_the_contract_stays_near_f64(stage: str, layout: str, tmp_path: Path) -> None:
    """f32 gathers tens of ulp and no more, whatever the layout; captured inputs come first. (A thousand: acceptance 07.)"""
    case = state_case(stage, state_file(tmp_path, steps=4), sequences=2, state_layout=layout)
    trace = followed(case, 300, KERNEL, right(case))
    assert (trace.status, trace.differs, len(trace.state_ulp)) == ("BOUNDED", None, 300)
    assert max(trace.state_ulp[:10]) < 10
    assert 1 < max(trace.state_ulp) < 100
    assert max(trace.out_ulp) < 1  # bf16 hides what f32 gathers
    assert [link.captured for link in islice(links(case, "chain"), 6)] == [True] * 4 + [False] * 2


def test_beta_in_bf16_drifts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budgeted kernel with a rounded beta is far from f64 at the first step, and farther after a few hundred."""
    case = state_case("gdn.recurrent", state_file(tmp_path), sequences=2)
    trace = followed(case, 300, BUDGETED, rounded_beta(case, monkeypatch))
    assert trace.status == "DRIFTED"
    assert re.match(
        r"step 1: the states are \d[\d.e+]+ scaled ulp farther from f64 than the contract's \(limit 5\)", trace.detail
    )
    assert trace.state_ulp[0] > 100
    assert max(trace.state_ulp) > 2 * trace.state_ulp[0]


def test_a_fault_at_step_49_is_found(tmp_path: Path) -> None:
    """A short canary passes; the chain names the step, the slot and the sequence."""
    case = state_case("gdn.recurrent", state_file(tmp_path), sequences=3)

    def late(number: int, inputs: Any) -> Any:
        outputs = right(case)(number, inputs)
        if number == 48:
            outputs["ssm_state"][owned(inputs)[1], 0, 5, 7] *= np.float32(1 + 2**-23)
        return outputs

    trace = followed(case, 60, KERNEL, late)
    assert (trace.status, trace.differs) == ("FAIL", 49)
    assert re.match(r"step 49: row \d \(slot \d, sequence 1 \(captured state 1\)\) of ssm_state: 1 flips, [12] ulp", trace.detail)


def test_fresh_does_not_feed_back(tmp_path: Path) -> None:
    """Under ``fresh`` every step's error is that of one step."""
    case = state_case("gdn.step", state_file(tmp_path), sequences=2)
    trace = followed(case, 100, KERNEL, right(case), reset="fresh")
    assert trace.status == "BOUNDED"
    assert max(trace.state_ulp) < 4 < max(followed(case, 100, KERNEL, right(case)).state_ulp)


def test_poison_shows_who_reads_a_neighbour(tmp_path: Path) -> None:
    """A kernel that adds nothing times its neighbour's state is right under ``chain``, and not under ``poison``."""
    case = state_case("gdn.recurrent", state_file(tmp_path), sequences=2)

    def reads(number: int, inputs: Any) -> Any:
        outputs = right(case)(number, inputs)
        free = next(s for s in range(len(inputs["ssm_state"])) if s not in inputs["slots"])
        outputs["ssm_state"][owned(inputs)] += 0 * inputs["ssm_state"][free]
        return outputs

    assert followed(case, 5, KERNEL, right(case), reset="poison").status == "BOUNDED"
    assert followed(case, 5, KERNEL, reads).status == "BOUNDED"
    told = followed(case, 5, KERNEL, reads, reset="poison")
    assert told.status == "FAIL"
    assert re.match(r"step 1: row \d \(slot \d, sequence \d .*; step 1: a state is not finite in f32", told.detail)


def test_poison_shows_who_writes_to_a_neighbour(tmp_path: Path) -> None:
    """Another NaN than lay there is another NaN."""
    case = state_case("gdn.recurrent", state_file(tmp_path), sequences=2)

    def writes(number: int, inputs: Any) -> Any:
        outputs = right(case)(number, inputs)
        free = next(s for s in range(len(inputs["ssm_state"])) if s not in inputs["slots"])
        outputs["ssm_state"][free].view(np.uint32)[...] ^= 1
        return outputs

    told = followed(case, 3, KERNEL, writes, reset="poison")
    assert (told.status, told.differs) == ("FAIL", 1)
    assert re.match(r"step 1: row \d \(slot \d, which is nobody's\) of ssm_state: another NaN than lay there", told.detail)


def test_one_head_is_not_hidden_behind_another(tmp_path: Path) -> None:
    """A budgeted kernel that is off in the head nearest to f64 is told, though another head is farther by itself."""
    case = state_case("gdn.recurrent", state_file(tmp_path), sequences=1)
    (truth, *_) = islice(truths(case, "chain"), 200, 201)
    near = int(truth.own[0][0].argmin())
    allowed = float(truth.own[0].max()) - float(truth.own[0][0, near])
    assert allowed > 6
    outputs = {name: np.array(value) for name, value in truth.want.items()}
    head = outputs["ssm_state"][owned(truth.inputs)[0], near]
    head += np.float32(6) * np.spacing(np.abs(head).max(axis=1, keepdims=True))
    trace = Trace(case, BUDGETED.id, BUDGETED)
    take(trace, 200, truth, outputs, Limits(201, "chain", 2))
    assert (trace.status, trace.at) == ("DRIFTED", 201)


def test_a_bias_that_was_asked_for_is_in_f64_as_well(tmp_path: Path) -> None:
    """The contract is near f64 under every mode of the conv."""
    case = state_case("gdn.step", state_file(tmp_path), sequences=2, conv_bias="bias_last")
    trace = followed(case, 10, KERNEL, right(case))
    assert max(trace.state_ulp) < 10


def test_an_f16_state_that_overflows_is_named(tmp_path: Path) -> None:
    """Right to the bit and of no use: the chain ends at the step, and a run tells it beside the grade."""
    states = np.full((2, 4, 64, 64), 6e4, np.float16)
    states[0] = 1
    file = state_file(tmp_path, sequences=2, modes={"ssm_state": "f16"}, ssm_state=states)
    case = state_case("gdn.recurrent", file, sequences=2, ssm_state="f16")
    trace = followed(case, 3, KERNEL, right(case))
    assert (trace.status, trace.detail) == ("OVERFLOWED", "step 1: a state is not finite in f16")
    outcome = judge_here("eager:gdn.recurrent", case)
    assert isinstance(outcome, Exact)
    assert outcome.grade == "BITWISE"
    assert re.match(r"f16 overflowed in 1 states, first slot \d, sequence 1 \(captured state 1\)", outcome.detail)


KERNELS = """
import os
from replay.kernels.eager_gdn import prepare_recurrent
from replay.model import Kernel

def counted(problem, at, wrong):
    right, seen = prepare_recurrent(problem, {}), [0]
    def run(t):
        right(t)
        seen[0] += 1
        if seen[0] == at:
            wrong(t)
    return run

def late(problem, weights):
    return counted(problem, 12, lambda t: t["core_attn_out"].mul_(-1))

def dies(problem, weights):
    return counted(problem, 7, lambda t: os.kill(os.getpid(), 11))

def raises(problem, weights):
    return counted(problem, 3, lambda t: 1 / 0)

def swells(problem, weights):
    return counted(problem, 9, lambda t: t["ssm_state"].fill_(float("inf")))

def own_state(problem, weights):
    right, kept = prepare_recurrent(problem, {}), []
    def run(t):
        kept[:] = kept or [t["ssm_state"].clone()]
        given = t["ssm_state"]
        right({**t, "ssm_state": kept[0]})
        given.copy_(kept[0])
    return run

def trespasses(problem, weights):
    return counted(problem, 7, lambda t: t["a"].add_(1))

def late_and_dies(problem, weights):
    right = late(problem, weights)
    return lambda t, seen=[0]: (right(t), seen.__setitem__(0, seen[0] + 1), seen[0] == 20 and 1 / 0)

def ends(problem, weights):
    import gc
    from multiprocessing.connection import Connection
    from replay.session.child import Done
    def run(t):
        pipe = next(o for o in gc.get_objects() if isinstance(o, Connection))
        pipe.send(Done())
        os._exit(0)
    return run

NAMES = ("late", "dies", "raises", "swells", "own_state", "trespasses", "late_and_dies", "ends")
KERNELS = [Kernel(id=f"mine:gdn.recurrent:{n}", prepare=f":{n}") for n in NAMES]
"""


def test_children_that_end_badly_cost_their_own_chain(cli: Cli, tmp_path: Path) -> None:
    """A late fault, a crash, an exception and an overflow each at its step; the honest go to the end; a page with its curves."""
    (tmp_path / "mine.py").write_text(KERNELS)
    done = cli(
        "chain", "--state", "qwen36-states-generated", "--route-layer-regex", r"\.0\.", "--stage", "gdn.recurrent", "--load",
        "mine.py", "--steps", 20, "-o", "found",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    curves = {c["kernel"]: c for c in json.loads((tmp_path / "found" / "chain.json").read_text())["curves"]}
    ended = {
        name.removeprefix("mine:gdn.recurrent:"): (c["status"], len(c["state_ulp"]))
        for name, c in curves.items()
        if c["status"] != "UNAVAILABLE"
    }
    assert ended == {
        "the contract (f32 oracle)": ("BOUNDED", 20), "eager:gdn.recurrent": ("BOUNDED", 20),
        "sycl:gdn.recurrent:heads": ("BOUNDED", 20), "late": ("FAIL", 20), "dies": ("CRASHED", 3), "raises": ("CRASHED", 1),
        "swells": ("FAIL", 4), "own_state": ("FAIL", 20), "trespasses": ("FAIL", 20), "late_and_dies": ("FAIL", 9),
        "ends": ("CRASHED", 0),
    }  # fmt: skip
    told = {name.removeprefix("mine:gdn.recurrent:"): c["detail"] for name, c in curves.items()}
    assert "step 6: taken again at other addresses it wrote something else" in told["late"]
    assert re.match(
        r"step 1: taken again at other addresses it wrote something else, first in row \d of ssm_state", told["own_state"]
    )
    assert told["trespasses"].startswith("step 4: changed its input a")
    assert re.match("step 6: taken again .*; step 10: ZeroDivisionError", told["late_and_dies"])
    assert told["ends"] == "step 1: ended without an answer"
    assert "signal SIGSEGV" in done.stdout
    again = next(line for line in done.stdout.splitlines() if line.startswith("reproduce: ") and ":swells" in line)
    redone = cli(*shlex.split(again)[2:])
    assert redone.returncode == 1
    assert "FAIL: step 5: row 0 (slot 0, which is nobody's) of ssm_state" in redone.stdout
    assert "; step 5: a state is not finite in f32" in redone.stdout
    assert "inputs of 8 captured, the others drawn" in done.stdout
    assert cli("report", "found").returncode == 0
    page = (tmp_path / "found" / "report.html").read_text()
    assert len(set(re.findall(r'id="curve-0-\d+"', page))) == 10
    assert '<tr class="red"><td>mine:gdn.recurrent:swells</td><td>to step 4</td>' in page


INTERRUPTED = """
from pathlib import Path
from replay.kernels.eager_gdn import prepare_recurrent
from replay.model import Kernel

def wrong(problem, weights):
    right = prepare_recurrent(problem, {})
    def run(t):
        right(t)
        t["core_attn_out"].mul_(-1)
    return run

def marks(problem, weights):
    right, seen = prepare_recurrent(problem, {}), [0]
    def run(t):
        right(t)
        seen[0] += 1
        if seen[0] == 9:
            Path("mark").touch()
    return run

KERNELS = [Kernel(id=f"mine:gdn.recurrent:{n}", prepare=f":{n}") for n in ("wrong", "marks")]
"""


def test_ctrl_c_keeps_what_was_found(tmp_path: Path) -> None:
    """Exit 130 within seconds, the fault of the first step in chain.json, and no child left."""
    (tmp_path / "mine.py").write_text(INTERRUPTED)
    command = [
        sys.executable, "-m", "replay", "chain", "--state", "qwen36-states-generated", "--stage", "gdn.recurrent", "--load", "mine.py",
        "--kernel", "mine:*", "--steps", "1000000", "-o", "found",
    ]  # fmt: skip
    running = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, start_new_session=True)
    limit = time.monotonic() + 60
    while not (tmp_path / "mark").exists() and time.monotonic() < limit:
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait(20) == 130
    found = json.loads((tmp_path / "found" / "chain.json").read_text())
    curves = {c["kernel"].rpartition(":")[2]: c for c in found["curves"]}
    assert found["interrupted"]
    assert (curves["wrong"]["status"], curves["wrong"]["differs"], curves["marks"]["status"]) == ("FAIL", 1, "BOUNDED")
    assert len(curves["marks"]["state_ulp"]) >= 4
    limit = time.monotonic() + 10  # the server that children are forked from ends when it sees that its parent has
    while left := [p.info for p in psutil.process_iter(["cmdline", "cwd"]) if p.info["cwd"] == str(tmp_path)]:
        assert time.monotonic() < limit, left
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--stage", "gdn.conv"), "--stage: name: expected gdn.recurrent or gdn.step, which have a state to feed back, got gdn.conv"),
        (("--max-scaled-ulp", "nan"), "--max-scaled-ulp: value: expected a number of 0 or more, got nan"),
        (("--max-scaled-ulp", "inf"), "--max-scaled-ulp: value: expected a number of 0 or more, got inf"),
        (("--state", "qwen36-generated"), "qwen36-generated: --state: expected captured states, got routes"),
        (("--steps", "0"), "b70-replay chain: Invalid value for '--steps': 0 is not in the range 1<=x<=1000000."),
    ],
)  # fmt: skip
def test_what_cannot_be_chained_is_refused(cli: Cli, words: tuple[str, ...], told: str, tmp_path: Path) -> None:
    """One line, exit 2, nothing written."""
    done = cli("chain", "--state", "qwen36-states-generated", *words)
    assert (done.returncode, done.stderr) == (2, told + "\n")
    assert not (tmp_path / "runs").exists()
