"""Kernels in Triton, interpreted: the oracle's bits in their modes, on odd sizes and edges. What a GPU makes of them is measured apart."""

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from replay.kernels.registry import registered, unavailable
from replay.kernels.triton import kernels
from replay.model import Case, Exact, Geometry, Sequence
from replay.stages import STAGES
from tests.conftest import judge_here, make_case
from tests.gdn import state_case, state_file
from tests.topk import edges, logit_case

MOE = Geometry.parse("qwen36:tp4:hidden=36,experts=5,top_k=3,inter=20")
GDN = Geometry.parse("qwen36:tp4:head_dim=32,k_heads=1,v_heads=2")
NAMES = [k.id for k in kernels()]
MODES = [
    ("moe.quantize:rows", {"quant": "recip_half_even"}), ("moe.quantize:rows", {"quant": "div_half_even"}),
    ("moe.quantize:rows", {"quant": "rmsnorm_int8"}), ("moe.act_quant:rows", {"act": "silu_round_once"}),
    ("moe.act_quant:rows", {"act": "silu_f32", "quant": "rmsnorm_int8"}), ("moe.gemm1:row_dot", {"bias": "on"}),
    ("moe.gemm2:row_dot", {"epilogue": "scales_first"}), ("moe.route:count", {"expert_map": "ep5:3"}),
    ("moe.layer:halves", {"shared": "on", "act": "silu_f32"}),
]  # fmt: skip
STATE_MODES = [
    {"l2norm": "rsqrt_eps_in", "softplus": "softplus_log1p"}, {"l2norm": "eps_out", "dt_bias": "bf16", "state_layout": "k_v"},
    {"ssm_state": "bf16", "ssm_slot_stride": "20011"}, {"ssm_state": "f16", "state_layout": "k_v"},
]  # fmt: skip
CONV_MODES = [
    {"reorder_input": "interleaved", "conv_bias": "bias_last"}, {"conv_bias": "bias_first", "padding_z": "untouched"},
    {"conv_slot_stride": "1999"},
]  # fmt: skip


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU is among the devices, and device code is imported to be interpreted; numpy is silent about what the contract lets
    overflow."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for module in [name for name in sys.modules if name.startswith("replay.kernels.triton.")]:
        monkeypatch.delitem(sys.modules, module)
    with np.errstate(all="ignore"):
        yield


def bitwise(name: str, case: Case) -> None:
    """The kernel gives the oracle's bits on the case and its twins."""
    outcome = judge_here(name, case)
    assert isinstance(outcome, Exact), outcome
    assert outcome.grade == "BITWISE", outcome


@pytest.mark.parametrize("name", [n for n in NAMES if ":moe." in n])
def test_moe_on_odd_sizes_with_padding(name: str) -> None:
    """Sizes that are no power of two, some ids −1."""
    bitwise(name, make_case(name.split(":")[1], MOE, tokens=2, seed=5, padding=0.3))


@pytest.mark.parametrize(("kernel", "modes"), MODES, ids=lambda v: v if isinstance(v, str) else ",".join(v.values()))
def test_moe_modes(kernel: str, modes: dict[str, str]) -> None:
    """Each named mode that a kernel has arithmetic of its own for."""
    bitwise(f"triton:{kernel}", make_case(kernel.split(":")[0], MOE, tokens=2, **modes))


@pytest.mark.parametrize(
    ("kernel", "modes"),
    [("gdn.recurrent:rows", m) for m in STATE_MODES] + [("gdn.conv:channels", m) for m in CONV_MODES] + [("gdn.step:staged", {})],
    ids=lambda v: v if isinstance(v, str) else ",".join(v.values()) or "default",
)
def test_gdn(kernel: str, modes: dict[str, str], tmp_path: Path) -> None:
    """Padding beside sequences, every mode, states of every dtype and stride."""
    batch = (Sequence(0, (0,)), Sequence(-1, (1,)), Sequence(2, (2,)))
    file = state_file(tmp_path, GDN, sequences=3, steps=1)
    bitwise(f"triton:{kernel}", state_case(kernel.split(":")[0], file, GDN, batch, **modes))


@pytest.mark.parametrize("modes", [{}, {"logits": "bf16", "index": "i32"}], ids=["f32", "bf16"])
def test_greedy(modes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every edge, over several programs a row."""
    from replay.kernels.triton import topk

    monkeypatch.setattr(topk, "CHUNK", 64)
    bitwise("triton:topk.greedy:single_pass", make_case("topk.greedy", tokens=3, **modes))


@pytest.mark.parametrize(
    "modes", [{}, {"bias": "on", "padding": "on", "logits": "bf16"}, {"renormalize": "off"}], ids=["default", "all", "raw"]
)
def test_router(modes: dict[str, str]) -> None:
    """Softmax, choice and weights."""
    bitwise("triton:topk.router:rows", make_case("topk.router", tokens=3, **modes))


@pytest.mark.parametrize(("experts", "k"), [(256, 8), (40, 3), (5, 5)])
def test_router_on_every_edge(experts: int, k: int, tmp_path: Path) -> None:
    """NaN, infinities, ties, all equal; experts that fill no part of 32 lanes, a k that is no power of two."""
    case = logit_case("topk.router", tmp_path, edges(256), bias="on")
    geometry = Geometry.parse(f"qwen36:tp1:vocab=256,experts={experts},top_k={k}")
    problem = msgspec.structs.replace(case.id.problem, geometry=geometry)
    bitwise("triton:topk.router:rows", msgspec.structs.replace(case, id=msgspec.structs.replace(case.id, problem=problem)))


@pytest.mark.parametrize("k", [5, 12])
def test_rows_in_small_pieces(k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that end inside a program's step, more candidates than are ranked, fewer numbers than k, two rows a sequence."""
    from replay.kernels.triton import topk

    for name, value in (("CHUNK", 32), ("GROUPS", 16), ("BLOCK", 8), ("SPAN", 16)):
        monkeypatch.setattr(topk, name, value)
    rows = edges(139)[[0, 1, 8, 9]]  # numbers, ties, all equal, low bits alone
    bitwise("triton:topk.rows:groups", logit_case("topk.rows", tmp_path, rows, k=str(k), next_n="2"))


def test_without_an_interpreter_a_cpu_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """No silent fallback: on a CPU the kernels are unavailable, and say where they run."""
    monkeypatch.delenv("TRITON_INTERPRET")
    for name in NAMES:
        case = make_case(name.split(":")[1], MOE if ":moe." in name else GDN)
        assert unavailable(registered()[name], case.problem, "cpu") == "runs on cuda, xpu, not on cpu"


def test_every_stage_has_a_kernel_in_triton() -> None:
    """The whole set of stages."""
    assert {name.split(":")[1] for name in NAMES} == set(STAGES)
