"""Launch our MoE kernels: grid sizes and arguments; the arithmetic is in ``sycl/``."""

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from replay.kernels.sycl.runtime import Program
from replay.model import Problem

if TYPE_CHECKING:
    import torch

    from replay.kernels.registry import Run

_EPILOGUES = {"row_then_col": 0, "scales_first": 1}
_COLUMNS_PER_ITEM = 8
_SUB_GROUPS = 4


def kind_of(weights: Mapping[str, "torch.Tensor"]) -> str:
    """The device kind of a kernel's weights."""
    return next(iter(weights.values())).device.type


def pack_rows(problem: Problem, weights: Mapping[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
    """Weights s8 [n, K, N] → [n, N, K], so that an output column is one contiguous run; the rest as it is."""
    return {n: w.transpose(1, 2).contiguous() if n in ("w13", "w2") else w for n, w in weights.items()}


def _gemm_rows(problem: Problem, kind: str, a: str, w: str, out: str, n: int, k: int) -> Program:
    rows = problem.rows * problem.geometry.top_k
    bias = f"{w}_bias" if problem.mode("bias") == "on" else None
    i32 = ctypes.c_int32
    args: tuple[Any, ...] = (
        a, f"{a}_scale", "offsets", w, f"{w}_scale", bias, out,
        i32(problem.geometry.experts), i32(n), i32(k), i32(_EPILOGUES[problem.mode("epilogue")]),
    )  # fmt: skip
    if kind == "cpu":
        return Program(kind).add("moe_gemm", "gemm_rows_cpu", (rows, -(-n // _COLUMNS_PER_ITEM)), (1, 1), *args)
    width = 16 * _SUB_GROUPS
    return Program(kind).add("moe_gemm", "gemm_rows_gpu", (rows, -(-n // _SUB_GROUPS) * width), (1, width), *args)


def prepare_gemm1_rows(problem: Problem, weights: Mapping[str, "torch.Tensor"]) -> "Run":
    """moe.gemm1."""
    g = problem.geometry
    return _gemm_rows(problem, kind_of(weights), "a", "w13", "gate_up", 2 * g.inter, g.hidden).run
