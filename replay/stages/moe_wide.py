"""The MoE stages where nothing is quantised: what such a problem may not ask for, and how far an honest kernel may be off."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.errors import InputError
from replay.model import Problem
from replay.oracle.arith import bf16_to_f32
from replay.stages.moe_tensors import WIDE, is_wide
from replay.stages.stage import Budget, Tensors


def check(problem: Problem) -> None:
    """A composite quantises everywhere or nowhere, and the shared expert is W8A8 alone."""
    modes = dict(problem.modes)
    if (modes["quant"] == WIDE) != (modes["epilogue"] == WIDE):
        raise InputError("--mode", f"quant and epilogue of {problem.stage}", f"both {WIDE}, or neither", problem.modes_text)
    if modes.get("shared") == "on" and is_wide(modes):
        raise InputError("--mode", f"shared of {problem.stage}", f"off where nothing is quantised ({WIDE})", "on")


def budgets(problem: Problem) -> Mapping[str, Budget]:
    """Of sums in f32; int8 rows are held to their bits.

    Why these are fair: a sum of some thousand products in f32 is off by less than a hundredth of a step of bf16 at the row's
    largest, so it rounds another way in a few of a thousand columns, by one step. In a composite one such step of a large gate_up
    or h moves all columns of a row by a part of a step: any number of them rounds another way, by a step or two.
    """
    if not is_wide(dict(problem.modes)):
        return {}
    g = problem.geometry
    twice = Budget("f32_sums_twice", 2, g.hidden)
    return {
        "moe.gemm1": {"gate_up": Budget("f32_sums", 1, 2 * g.inter // 64 + 2)},
        "moe.gemm2": {"y": Budget("f32_sums", 1, g.hidden // 64 + 2)},
        "moe.middle": {"y": twice},
        "moe.layer": {"out": twice},
    }.get(problem.stage, {})


def row_scale(problem: Problem, inputs: Tensors, output: str, want: NDArray[Any]) -> NDArray[Any]:
    """What was reduced are products with weights, which are not kept; the row's own largest element stands for them."""
    scale: NDArray[Any] = np.abs(bf16_to_f32(want)).max(axis=1, keepdims=True)
    return scale
