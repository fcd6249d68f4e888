"""Random MoE cases in named strata, so that a count can say what was covered."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from replay.exactness.judge import judge
from replay.kernels.registry import registered
from replay.model import Case, CaseId, Exact, Inexact, Kernel, Routes, Source
from replay.oracle.arith import rn_bf16
from replay.session.arms import Arms
from replay.session.child import judged_calls
from replay.stages import STAGES, problem_for
from tests.conftest import SMALL

SIZES = {
    "hidden": (32, 64, 96, 100, 160, 257, 320),
    "inter": (8, 20, 33, 40, 64, 88, 128),
    "experts": (1, 2, 5, 8, 16, 31, 64, 256, 1024),
}
TOKENS = (1, 2, 3, 8, 17, 32, 64)
VALUES = ("normal", "zero rows", "tiny", "huge", "one outlier")
WANTED = (
    "k=1",
    "k=16",
    "odd size",
    "padding",
    "all padding",
    "zero groups",
    "one expert",
    "1024 experts",
    "64 tokens",
    *VALUES[1:],
)


@dataclass(frozen=True)
class Drawn:
    """A case, the special values its activations hold, and the strata it belongs to."""

    case: Case
    values: str
    strata: frozenset[str]


def draw(rng: np.random.Generator, stage: str) -> Drawn:
    """One random case of a stage; weight tables stay below 32 MB."""
    g = {name: int(rng.choice(sizes)) for name, sizes in SIZES.items()}
    if g["experts"] * g["hidden"] * g["inter"] * 3 > 32 << 20:
        g["hidden"], g["inter"] = 64, 20
    top_k = int(rng.integers(1, min(16, g["experts"]) + 1))
    top_k = min(16, g["experts"]) if rng.random() < 0.2 else top_k
    tokens = int(rng.choice(TOKENS))
    geometry = msgspec.structs.replace(SMALL, top_k=top_k, **g)
    padding = float(rng.choice([0.0, 0.0, 0.3, 1.0], p=[0.4, 0.2, 0.3, 0.1]))
    alike = rng.random() < 0.15
    first = rng.choice(g["experts"], top_k, replace=False)
    rows = [first if alike else rng.choice(g["experts"], top_k, replace=False) for _ in range(tokens)]
    routes = Routes(tuple(tuple(-1 if rng.random() < padding else int(e) for e in row) for row in rows))
    modes = {
        name: str(rng.choice([v for v in values if v.replace("_", "").isalnum()])) for name, values in STAGES[stage].modes.items()
    }
    problem = problem_for(STAGES[stage], geometry, tokens, modes)
    values = str(rng.choice(VALUES))
    used = {e for row in routes.topk_ids for e in row if e >= 0}
    strata = {
        f"k={top_k}": True, "odd size": g["hidden"] % 32 != 0 or g["inter"] % 32 != 0, "padding": padding > 0,
        "all padding": not used, "zero groups": 0 < len(used) < g["experts"], "one expert": g["experts"] == 1,
        "1024 experts": g["experts"] == 1024, f"{tokens} tokens": True, values: True,
    }  # fmt: skip
    case = Case(CaseId(problem, Source("fuzz", "L0", 0, tokens), int(rng.integers(1 << 30))), routes)
    return Drawn(case, values, frozenset(name for name, holds in strata.items() if holds))


def special(inputs: dict[str, Any], values: str) -> dict[str, Any]:
    """The inputs with their activations changed as ``values`` says; bf16 tensors only, which every chain begins with."""
    changed = dict(inputs)
    for name in ("x", "gate_up", "y", "routed"):
        if name not in inputs or values == "normal":
            continue
        array = inputs[name].copy()
        wide = (array.astype(np.uint32) << 16).view(np.float32)
        if values == "zero rows":
            array[::2] = 0
        elif values == "tiny":
            array = rn_bf16(wide * np.float32(1e-38))  # into the denormals
        elif values == "huge":
            array = rn_bf16(np.clip(wide * np.float32(1e37), -3e38, 3e38))
        else:
            array.reshape(len(array), -1)[:, -1] = 0x7F7F  # the largest finite bf16
        changed[name] = array
    return changed


def check(arms: Arms, kernel: Kernel, drawn: Drawn) -> Exact | Inexact:
    """Judge one kernel on one drawn case in this process."""
    case, stage = drawn.case, STAGES[drawn.case.problem.stage]
    inputs = special(arms.begin(case), drawn.values)
    want = stage.canonical(case.problem, inputs, stage.oracle(case.problem, inputs))
    ran = judged_calls(arms, kernel, case, 0, [inputs, inputs])
    return judge(stage, case, inputs, want, ran.repeats, ran.trespasses)


def kernels_of(stage: str) -> list[Kernel]:
    """Our kernels of a stage that run on a CPU."""
    return [k for k in registered().values() if k.stage == stage and "cpu" in k.devices]


def missing_strata(seen: Counter[str], least: int) -> list[str]:
    """The strata that were met fewer than ``least`` times."""
    return [name for name in WANTED if seen[name] < least]
