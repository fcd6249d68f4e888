"""What tests share: where the lab's captures are, small cases, and running one kernel in this process."""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from replay.devices import Device
from replay.exactness.judge import judge, with_twin
from replay.kernels.registry import lacking_mode, load_file, registered
from replay.model import Case, CaseId, Exact, Geometry, Kernel, Outcome, Routes, Source, preset
from replay.session import child
from replay.session.arms import Arms
from replay.stages import STAGES, problem_for
from replay.stages.vary import twin_of
from tests.gdn import SMALL as SMALL_STATES
from tests.gdn import state_case, state_file
from tests.topk import logit_case

# Triton decides when it is imported whether its own functions are interpreted; tests/kernels/test_triton.py wants them so.
os.environ["TRITON_INTERPRET"] = "1"
import triton.language  # noqa: F401  # see above

del os.environ["TRITON_INTERPRET"]

ROOT = Path(__file__).resolve().parent.parent
LAB = ROOT.parent / "shared" / "captures" / "lab"
LAB_ROUTES = LAB / "qwen36-routecapture6-rank0-layers9-14.jsonl"

needs_lab = pytest.mark.skipif(not LAB.is_dir(), reason="the lab's captures are not beside this checkout")

SMALL = Geometry.parse("qwen36:tp4:hidden=64,experts=16,top_k=4,inter=16")


VOCAB = 300  # logits of a drawn row
STATE_FOLDER = Path(tempfile.mkdtemp(prefix="b70-states-"))
atexit.register(shutil.rmtree, STATE_FOLDER, ignore_errors=True)


def draw_routes(rng: np.random.Generator, tokens: int, experts: int, top_k: int, padding: float = 0.0) -> Routes:
    """Random routes: distinct ids per token, each turned into −1 with probability ``padding``."""
    rows = [rng.choice(experts, top_k, replace=False) for _ in range(tokens)]
    return Routes(tuple(tuple(int(e) if rng.random() >= padding else -1 for e in row) for row in rows))


def make_case(stage: str, geometry: Geometry = SMALL, tokens: int = 3, seed: int = 7, padding: float = 0.0, **modes: str) -> Case:
    """A case with drawn routes, or with generated states or drawn logits for a stage that wants those."""
    if stage.startswith("gdn."):
        small = geometry if "k_heads" in str(geometry) else SMALL_STATES
        return state_case(stage, state_file(STATE_FOLDER / str(small), small, max(tokens, 2)), small, tokens, **modes)
    rng = np.random.default_rng(seed)
    if stage.startswith("topk."):
        return logit_case(stage, STATE_FOLDER, rng.standard_normal((tokens, VOCAB), np.float32), **modes)
    routes = draw_routes(rng, tokens, geometry.experts, geometry.top_k, padding)
    problem = problem_for(STAGES[stage], geometry, tokens, modes)
    return Case(CaseId(problem, Source("drawn", "L9", 0, tokens), seed), routes)


def judge_here(kernel_id: str, case: Case, load: str | None = None, repeats: int = 2) -> Outcome:
    """Judge one kernel in this process; for kernels that are safe to run here."""
    kernels = registered([load] if load else [])
    if load:
        load_file(load)
    stage = STAGES[case.problem.stage].judging(kernels[kernel_id])
    inputs = stage.inputs(case)
    want = stage.expected(case.problem, inputs)
    ran = child._run_case(Arms(Device("cpu")), kernels[kernel_id], case, 0, repeats)
    outcome: Outcome = judge(stage, case, inputs, want, ran.repeats, ran.trespasses)
    for name, got in ran.twins.items():
        if isinstance(outcome, Exact):
            twin = twin_of(stage, case, name)
            given = stage.inputs(twin)
            outcome = with_twin(stage, twin, given, stage.expected(twin.problem, given), got, outcome)
    return outcome


def takes_defaults(kernel: Kernel) -> bool:
    """Whether a kernel has its stage's default modes; one of bf16 rows has not."""
    return lacking_mode(kernel, {name: values[0] for name, values in STAGES[kernel.stage].modes.items()}) is None


Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Run ``python -m replay`` in an empty directory."""
    return cli_in(tmp_path)


def cli_in(folder: Path) -> Cli:
    """``python -m replay`` in a directory."""

    def run(*args: object, **kwargs: object) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "replay", *map(str, args)]
        options = {"capture_output": True, "text": True, "cwd": folder, "timeout": 240, **kwargs}
        return subprocess.run(command, check=False, **options)  # type: ignore[call-overload]  # options are forwarded

    return run


QWEN36 = preset("qwen36", 4)
