"""Random MoE cases in named strata, so that a count can say what was covered."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from replay.exactness.judge import judge, with_twin
from replay.kernels.registry import registered
from replay.model import Case, CaseId, Exact, Inexact, Kernel, Routes, Source
from replay.oracle.arith import rn_bf16
from replay.session.arms import Arms
from replay.session.child import judged_calls
from replay.stages import STAGES, problem_for
from tests.conftest import SMALL, takes_defaults

# The stages that drawn routes drive.
MOE = tuple(name for name in STAGES if name.startswith("moe."))

T = TypeVar("T")
Special = Callable[[dict[str, Any], str], dict[str, Any]]

SIZES = {
    "hidden": (32, 64, 96, 100, 160, 257, 320),
    "inter": (8, 20, 33, 40, 64, 88, 128),
    "experts": (1, 2, 5, 8, 16, 31, 64, 256, 1024),
}
PADDING = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.3, 0.3, 0.3, 1.0)
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


class Choices(Protocol):
    """Where choices come from: numpy's random numbers for a fuzz of thousands, hypothesis for cases that shrink."""

    def pick(self, values: Sequence[T]) -> T:
        """One of the values."""

    def integer(self, low: int, high: int) -> int:
        """A number from low to high, both included."""

    def chance(self, share: float) -> bool:
        """True in about this share of draws."""


class Random:
    """Choices of a numpy generator."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def pick(self, values: Sequence[T]) -> T:
        """One of the values, each as likely."""
        return values[int(self.rng.integers(len(values)))]

    def integer(self, low: int, high: int) -> int:
        """Uniform."""
        return int(self.rng.integers(low, high + 1))

    def chance(self, share: float) -> bool:
        """As told."""
        return bool(self.rng.random() < share)


@dataclass(frozen=True)
class Drawn:
    """A case, the special values its activations hold, and the strata it belongs to."""

    case: Case
    values: str
    strata: frozenset[str]


def draw(choices: Choices, stage: str) -> Drawn:
    """One random case of a stage; weight tables stay below 32 MB."""
    g = {name: choices.pick(sizes) for name, sizes in SIZES.items()}
    if g["experts"] * g["hidden"] * g["inter"] * 3 > 32 << 20:
        g["hidden"], g["inter"] = 64, 20
    most = min(16, g["experts"])
    top_k = most if choices.chance(0.2) else choices.integer(1, most)
    tokens = choices.pick(TOKENS)
    geometry = msgspec.structs.replace(SMALL, top_k=top_k, **g)
    padding = choices.pick(PADDING)
    alike = choices.chance(0.15)
    seed = choices.integer(0, (1 << 30) - 1)
    rng = np.random.Generator(np.random.Philox(key=seed))
    first = rng.choice(g["experts"], top_k, replace=False)
    rows = [first if alike else rng.choice(g["experts"], top_k, replace=False) for _ in range(tokens)]
    routes = Routes(tuple(tuple(-1 if rng.random() < padding else int(e) for e in row) for row in rows))
    modes = {name: choices.pick(_named(name, values, g)) for name, values in STAGES[stage].modes.items()}
    problem = problem_for(STAGES[stage], geometry, tokens, modes)
    values = choices.pick(VALUES)
    used = {e for row in routes.topk_ids for e in row if e >= 0}
    parametric = any(":" in v for v in modes.values())
    strata = {
        f"k={top_k}": True, "odd size": g["hidden"] % 32 != 0 or g["inter"] % 32 != 0, "padding": padding > 0,
        "all padding": not used, "zero groups": 0 < len(used) < g["experts"], "one expert": g["experts"] == 1,
        "1024 experts": g["experts"] == 1024, f"{tokens} tokens": True, "parametric mode": parametric,
        values: stage not in ("moe.route", "moe.remap"),
    }  # fmt: skip
    case = Case(CaseId(problem, Source("fuzz", "L0", 0, tokens), seed), routes)
    return Drawn(case, values, frozenset(name for name, holds in strata.items() if holds))


def _named(name: str, values: tuple[str, ...], sizes: dict[str, int]) -> list[str]:
    """A mode's values, the parametric ones made concrete with divisors of the case's sizes."""
    values = tuple(v for v in values if v != "bf16")  # other tensors, and kernels of their own
    plain = [v for v in values if v.replace("_", "").isalnum()]
    if name == "expert_map":
        ranks = [n for n in (2, 4) if sizes["experts"] % n == 0]
        return [*plain, *(f"ep{n}:{rank}" for n in ranks for rank in (0, n - 1))]
    if len(plain) < len(values):
        return [*plain, *(f"group_trunc:{n}" for n in (1, 5, 16, 32) if sizes["hidden"] % n == 0)]
    return plain


def special(inputs: dict[str, Any], values: str) -> dict[str, Any]:
    """The inputs with their activations changed as ``values`` says: bf16 tensors, and int8 rows with their scales."""
    changed = dict(inputs)
    for name in ("a", "h"):
        if name in inputs and values != "normal":
            codes, scale = inputs[name].copy(), inputs[f"{name}_scale"].copy()
            if values == "zero rows":
                codes[::2] = 0
            elif values == "one outlier":
                codes[:] = np.where(np.arange(codes.shape[1]) % 2, 127, -127)
            else:
                scale *= np.float32(1e-30 if values == "tiny" else 1e30)
            changed |= {name: codes, f"{name}_scale": scale}
    return changed | {n: altered(inputs[n], values) for n in ("x", "gate_up", "y", "routed") if n in inputs}


def altered(bits: Any, values: str) -> Any:
    """A bf16 tensor changed as ``values`` says."""
    array = bits.copy()
    wide = (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if values == "zero rows":
        array[::2] = 0
    elif values == "tiny":
        array = rn_bf16((wide * 1e-38).astype(np.float32))  # into the denormals
    elif values == "huge":
        array = rn_bf16(np.clip(wide * 1e37, -3e38, 3e38).astype(np.float32))
    elif values == "one outlier":
        array.reshape(len(array), -1)[:, -1] = 0x7F7F  # the largest finite bf16
    return array


def check(arms: Arms, kernel: Kernel, drawn: Drawn, special: Special = special) -> Exact | Inexact:
    """Judge one kernel on one drawn case in this process, on contiguous and on strided inputs; ``special`` changes them as the
    draw says."""
    case, stage = drawn.case, STAGES[drawn.case.problem.stage]
    inputs = special(arms.begin(case), drawn.values)
    want = stage.expected(case.problem, inputs)
    ran = judged_calls(arms, kernel, case, 0, [inputs, inputs])
    outcome = judge(stage, case, inputs, want, ran.repeats, ran.trespasses)
    if not isinstance(outcome, Exact):
        return outcome
    twin = case.twinned("strided")
    arms.begin(twin)
    strided = judged_calls(arms, kernel, twin, 0, [inputs])
    if strided.trespasses:
        return Inexact("FAIL", -1, "; ".join(strided.trespasses))
    return with_twin(stage, twin, inputs, want, strided.repeats[0], outcome)


def kernels_of(stage: str) -> list[Kernel]:
    """Our kernels of a stage that run on a CPU."""
    return [k for k in registered().values() if k.stage == stage and "cpu" in k.devices and takes_defaults(k)]


def wanted(stage: str) -> tuple[str, ...]:
    """The strata that a stage's cases can be of; route and remap have no values to change."""
    return tuple(name for name in WANTED if name not in VALUES) if stage in ("moe.route", "moe.remap") else WANTED
