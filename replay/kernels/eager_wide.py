"""Provider ``eager``, the MoE stages where nothing is quantised: products of bf16 summed in f32 as torch likes, so budgeted."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from replay.kernels import eager
from replay.kernels.modes import WIDE
from replay.model import Kernel, Problem

if TYPE_CHECKING:
    import torch

    from replay.kernels.registry import Run

    T = torch.Tensor
    Tensors = Mapping[str, T]


def _kernel(stage: str, function: str, *, budgeted: bool = True) -> Kernel:
    return Kernel(
        id=f"eager:{stage}:bf16", prepare=f"{__name__}:{function}", devices=("cpu", "xpu", "cuda"), needs=("python:torch",),
        modes=WIDE, budgeted=budgeted, summary="plain torch operations, bf16 rows and weights",
    )  # fmt: skip


KERNELS = (
    _kernel("moe.gemm1", "prepare_gemm1"),
    _kernel("moe.act_quant", "prepare_act", budgeted=False),
    _kernel("moe.gemm2", "prepare_gemm2"),
    _kernel("moe.middle", "prepare_middle"),
    _kernel("moe.layer", "prepare_layer"),
)


def grouped_gemm(a: "T", offsets: "T", w: "T", bias: "T | None", out: "T") -> None:
    """Rows of each expert against its weights bf16 [K, N]."""
    for e, part in eager.parts_of(offsets):
        y = a[part].float() @ w[e].float()
        out[part] = (y if bias is None else y + bias[e][None, :]).bfloat16()


def activate(gate_up: "T", act: str) -> "T":
    """bf16 [R, 2I] → bf16 [R, I]."""
    return eager.activate(gate_up, act).bfloat16()


def _middle(a: "T", offsets: "T", t: "Tensors", act: str, y: "T") -> None:
    gate_up = a.new_empty(len(a), t["w13"].shape[2])
    grouped_gemm(a, offsets, t["w13"], None, gate_up)
    grouped_gemm(activate(gate_up, act), offsets, t["w2"], None, y)


def prepare_gemm1(problem: Problem, weights: "Tensors") -> "Run":
    """moe.gemm1."""
    return lambda t: grouped_gemm(t["a"], t["offsets"], t["w13"], t.get("w13_bias"), t["gate_up"])


def prepare_gemm2(problem: Problem, weights: "Tensors") -> "Run":
    """moe.gemm2."""
    return lambda t: grouped_gemm(t["h"], t["offsets"], t["w2"], t.get("w2_bias"), t["y"])


def prepare_act(problem: Problem, weights: "Tensors") -> "Run":
    """moe.act_quant, without quantisation; rows of nobody keep what they hold."""
    import torch

    def run(t: "Tensors") -> None:
        h = activate(t["gate_up"], problem.mode("act"))
        valid = torch.arange(len(h), device=h.device) < t["offsets"][-1]
        t["h"].copy_(torch.where(valid[:, None], h, t["h"]))

    return run


def prepare_middle(problem: Problem, weights: "Tensors") -> "Run":
    """moe.middle."""
    return lambda t: _middle(t["a"], t["offsets"], t, problem.mode("act"), t["y"])


def prepare_layer(problem: Problem, weights: "Tensors") -> "Run":
    """moe.layer."""
    import torch

    g = problem.geometry

    def run(t: "Tensors") -> None:
        _, offsets, permuted = eager.route(t["topk_ids"], g.experts)
        a = t["x"][eager.tokens_of(permuted, permuted.numel()).clamp_min(0)]  # rows that are nobody's are not looked at
        y = torch.empty_like(a)
        _middle(a, offsets, t, problem.mode("act"), y)
        eager.combine(y, permuted, t["topk_weights"], problem.mode("combine_fma"), t["out"])

    return run
