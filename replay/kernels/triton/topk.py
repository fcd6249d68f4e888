"""Launch the kernels of selection in Triton: chunks, groups and strides; the work is in ``device/topk.py``.

Rows are read by the stride that they have.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from triton import next_power_of_2

from replay.kernels.triton.device import topk as device
from replay.kernels.triton.launch import floats, launched, prepared
from replay.model import Problem

if TYPE_CHECKING:
    import torch

    from replay.kernels.registry import Run

    T = torch.Tensor
    Tensors = Mapping[str, T]

CHUNK = 1024  # columns of a program
GROUPS = 256  # of a row at least; twice k, or too many keys pass the K-th largest of the groups'
BLOCK, SPAN = 32, 128  # keys that a program ranks, and that it compares them with at once


def prepare_greedy_single_pass(problem: Problem, weights: "Tensors") -> "Run":
    """topk.greedy in one launch. Counters are made in the first call, which is therefore not to be the first of a graph."""
    import torch

    kept: dict[str, T] = {}

    def run(t: "Tensors") -> None:
        logits = t["logits"]
        rows, columns = logits.shape
        if not kept:
            kept["best"] = torch.full((rows,), device.NOTHING.value, dtype=torch.int64, device=logits.device)
            kept["arrived"] = torch.zeros(rows, dtype=torch.int32, device=logits.device)
        launched(
            device.greedy, (-(-columns // CHUNK), rows), floats(logits), logits.stride(0), columns, t["slots"], kept["best"],
            kept["arrived"], t["token"], t["next_input_ids"], CHUNK, CHUNK, problem.mode("logits") == "bf16",
        )  # fmt: skip

    return run


def prepare_rows_groups(problem: Problem, weights: "Tensors") -> "Run":
    """topk.rows in four launches."""
    import torch

    k, next_n, is_bf16 = int(problem.mode("k")), int(problem.mode("next_n")), problem.mode("logits") == "bf16"
    groups = max(GROUPS, next_power_of_2(2 * k))
    kept: dict[str, T] = {}

    def run(t: "Tensors") -> None:
        logits = t["logits"]
        rows, columns = logits.shape
        if not kept:
            for name, shape in (("groups", (rows, groups)), ("candidates", (rows, columns)), ("least", (rows,))):
                kept[name] = torch.empty(shape, dtype=torch.int64, device=logits.device)
            kept["found"] = torch.empty(rows, dtype=torch.int32, device=logits.device)
        largest, candidates, least, found = kept.values()
        chunks = min(groups, next_power_of_2(-(-columns // CHUNK)))
        given = (floats(logits), logits.stride(0), columns, t["seq_lens"])
        of, length = groups // chunks, -(-columns // groups)
        launched(device.group_maxima, (chunks, rows), *given, largest, length, of, max(CHUNK // of, 1), next_n, is_bf16)
        launched(device.least_of_groups, (groups // BLOCK, rows), largest, least, found, k, groups, BLOCK, SPAN)
        pieces = -(-columns // CHUNK)
        launched(device.collect, (pieces, rows), *given, least, candidates, found, CHUNK, next_n, is_bf16)
        launched(device.place, (groups // BLOCK, rows), candidates, columns, found, t["indices"], k, groups, BLOCK, SPAN)

    return run


def _router_sizes(problem: Problem) -> tuple[Any, ...]:
    g, modes = problem.geometry, dict(problem.modes)
    flags = (modes["logits"] == "bf16", modes["bias"] == "on", modes["padding"] == "on", modes["renormalize"] == "on")
    return g.experts, next_power_of_2(-(-g.experts // 32)), g.top_k, next_power_of_2(g.top_k), *flags


def _router(sizes: tuple[Any, ...], t: "Tensors") -> None:
    """One launch."""
    x = t["gating_output"]
    given = floats(x), t.get("bias", x), t.get("is_padding", x)
    launched(device.router, (len(x),), *given, t["topk_weights"], t["topk_ids"], *sizes)


prepare_router_rows = prepared(_router_sizes, (), _router)
