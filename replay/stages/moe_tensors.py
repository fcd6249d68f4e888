"""The tensors of the MoE stages: what each is called, its dtype, its shape in symbols, and when it exists."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from replay.model import Problem, Spec
from replay.oracle.arith import I32
from replay.stages.stage import laid_out

# name: (dtype, shape in symbols); one table, since a tensor means the same in every stage that has it
TENSORS: dict[str, tuple[str, str]] = {
    "x": ("bf16", "T H"),
    "topk_ids": ("i32", "T k"),
    "topk_weights": ("f32", "T k"),
    "rows_per_expert": ("i32", "E"),
    "offsets": ("i64", "E+1"),
    "unpermuted_to_permuted": ("i32", "T k"),
    "q": ("i8", "T H"),
    "q_scale": ("f32", "T"),
    "a": ("i8", "R H"),
    "a_scale": ("f32", "R"),
    "gate_up": ("bf16", "R 2I"),
    "h": ("i8", "R I"),
    "h_scale": ("f32", "R"),
    "y": ("bf16", "R H"),
    "out": ("bf16", "T H"),
    "w13": ("i8", "E H 2I"),
    "w13_scale": ("f32", "E 2I"),
    "w13_bias": ("f32", "E 2I"),
    "w2": ("i8", "E I H"),
    "w2_scale": ("f32", "E H"),
    "w2_bias": ("f32", "E H"),
    "expert_map": ("i32", "G"),
    "routed": ("bf16", "T H"),
    "shared_gate": ("bf16", "H"),
    "shared_w13": ("i8", "1 H 2I"),
    "shared_w13_scale": ("f32", "1 2I"),
    "shared_w2": ("i8", "1 I H"),
    "shared_w2_scale": ("f32", "1 H"),
}


WIDE = "bf16"  # the value of modes quant and epilogue under which nothing is quantised
_WIDE_TENSORS = ("a", "h", "w13", "w2")


def is_wide(modes: Mapping[str, str]) -> bool:
    """Whether rows and weights are bf16 and there are no scales."""
    return WIDE in (modes.get("quant"), modes.get("epilogue"))


def sizes_of(problem: Problem) -> dict[str, int]:
    """What each symbol of a shape stands for; E is this rank's experts, G all of them."""
    g, t = problem.geometry, problem.rows
    local = g.experts // expert_parallel(problem)[0]
    return {"T": t, "k": g.top_k, "R": t * g.top_k, "H": g.hidden, "I": g.inter, "2I": 2 * g.inter, "1": 1,
            "G": g.experts, "E": local, "E+1": local + 1}  # fmt: skip


def expert_parallel(problem: Problem) -> tuple[int, int]:
    """(expert-parallel ranks, this rank); mode expert_map=ep4:1 is rank 1 of 4, each with its run of experts."""
    value = dict(problem.modes).get("expert_map", "off")
    if value == "off":
        return 1, 0
    size, _, rank = value[2:].partition(":")
    return int(size), int(rank)


def expert_map(problem: Problem) -> I32 | None:
    """int32 [experts]: the local id of each expert, −1 for another rank's; None without expert parallelism."""
    size, rank = expert_parallel(problem)
    if size == 1:
        return None
    local = problem.geometry.experts // size
    ids = np.arange(problem.geometry.experts) - rank * local
    return np.where((ids >= 0) & (ids < local), ids, -1).astype(np.int32)


def spec_of(problem: Problem, name: str, role: Any) -> Spec:
    """The spec of one tensor in one problem."""
    dtype, symbols = TENSORS[name]
    if name in _WIDE_TENSORS and is_wide(dict(problem.modes)):
        dtype = "bf16"
    sizes = sizes_of(problem)
    shape = tuple(sizes[symbol] for symbol in symbols.split())
    if name == "q_scale" and (group := group_of(problem)):
        shape = (problem.rows, problem.geometry.hidden // group)
    return laid_out(Spec(name, role, shape, dtype), problem.layout)


def group_of(problem: Problem) -> int:
    """G of mode quant=group_trunc:G, 0 for the modes that take whole rows."""
    value = dict(problem.modes).get("quant", "")
    return int(value.partition(":")[2]) if value.startswith("group_trunc:") else 0


def present(name: str, modes: Mapping[str, str]) -> bool:
    """Some tensors exist under one mode only."""
    if name.endswith("_bias"):
        return modes.get("bias") == "on"
    if name.endswith("_scale") and is_wide(modes):
        return False
    if name == "expert_map":
        return modes.get("expert_map", "off") != "off" and not modes["expert_map"].startswith("ep1:")
    return not name.startswith("shared_") or modes.get("shared", "on") == "on"
