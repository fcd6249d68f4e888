"""Launch our MoE layer without quantisation; the arithmetic is in ``sycl/moe_wide.cpp``."""

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING

from replay.kernels.gathered import gathered
from replay.kernels.sycl.launch import device_kind
from replay.kernels.sycl.moe import ACTS
from replay.kernels.sycl.runtime import Program
from replay.model import Problem

if TYPE_CHECKING:
    import torch

    from replay.kernels.registry import Run

    Tensors = Mapping[str, torch.Tensor]

_COLUMNS, _LANES = 64, 256  # moe_wide.cpp
i32 = ctypes.c_int32


def prepare_layer(problem: Problem, weights: "Tensors", body: str | None = None) -> "Run":
    """moe.layer in two launches."""
    import torch

    g, kind = problem.geometry, device_kind(weights)
    body = body or ("cpu" if kind == "cpu" else "gpu")
    lanes, block = (1, _COLUMNS) if body == "cpu" else (_LANES, _LANES)
    p = torch.empty((problem.rows * g.top_k, g.inter), dtype=torch.bfloat16, device=kind)
    program = Program(kind)
    sizes = (i32(g.hidden), i32(g.inter), i32(g.top_k))
    program.add(
        "moe_wide", f"wide_first_{body}", (problem.rows, g.top_k, -(-g.inter // block) * lanes), (1, 1, lanes),
        "x", "topk_ids", "w13", p, *sizes, i32(ACTS[problem.mode("act")]),
    )  # fmt: skip
    program.add(
        "moe_wide", f"wide_second_{body}", (problem.rows, -(-g.hidden // block) * lanes), (1, lanes),
        p, "topk_ids", "topk_weights", "w2", "out", *sizes,
    )  # fmt: skip

    def run(tensors: "Tensors") -> None:
        program.run(tensors if problem.layout == "contiguous" else gathered(tensors, ("w13", "w2")))

    return run
