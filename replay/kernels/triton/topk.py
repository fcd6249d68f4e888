"""Launch the kernels of selection in Triton: chunks, groups and strides; the work is in ``topk_device.py``.

Rows are read by the stride that they have.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from replay.kernels.triton import topk_device as device
from replay.kernels.triton.launch import bits, launched, power_of_two
from replay.model import Problem

if TYPE_CHECKING:
    import torch

    from replay.kernels.registry import Run

    T = torch.Tensor
    Tensors = Mapping[str, T]

CHUNK = 2048  # columns of a program
GROUPS = 256  # of a row at least; twice k, or too many keys pass the K-th largest of the groups'
SPAN = 64  # keys that others are compared with at once
STEP = 16


def _logits(t: "T") -> "T":
    """Rows as device code reads them."""
    import torch

    return bits(t) if t.dtype == torch.bfloat16 else t


def prepare_greedy_single_pass(problem: Problem, weights: "Tensors") -> "Run":
    """topk.greedy in one launch."""
    import torch

    kept: dict[str, T] = {}

    def run(t: "Tensors") -> None:
        logits = t["logits"]
        rows, columns = logits.shape
        if not kept:
            kept["best"] = torch.full((rows,), device.NOTHING.value, dtype=torch.int64, device=logits.device)
            kept["arrived"] = torch.zeros(rows, dtype=torch.int32, device=logits.device)
        launched(
            device.greedy, (-(-columns // CHUNK), rows), _logits(logits), logits.stride(0), columns, t["slots"], kept["best"],
            kept["arrived"], t["token"], t["next_input_ids"], CHUNK, CHUNK, problem.mode("logits") == "bf16",
        )  # fmt: skip

    return run


def prepare_rows_groups(problem: Problem, weights: "Tensors") -> "Run":
    """topk.rows in two launches: the groups' largest, then what is above the K-th of them."""
    import torch

    k, next_n, is_bf16 = int(problem.mode("k")), int(problem.mode("next_n")), problem.mode("logits") == "bf16"
    groups = max(GROUPS, power_of_two(2 * k))
    kept: dict[str, T] = {}

    def run(t: "Tensors") -> None:
        logits = t["logits"]
        rows, columns = logits.shape
        chunks = min(groups, power_of_two(-(-columns // CHUNK)))
        of = groups // chunks
        length = -(-columns // groups)
        if not kept:
            for name, shape in (("groups", (rows, groups)), ("candidates", (rows, columns))):
                kept[name] = torch.empty(shape, dtype=torch.int64, device=logits.device)
            for name in ("found", "arrived"):
                kept[name] = torch.zeros(rows, dtype=torch.int32, device=logits.device)
        given = (_logits(logits), logits.stride(0), columns, t["seq_lens"])
        launched(device.group_maxima, (chunks, rows), *given, kept["groups"], length, of, STEP, next_n, is_bf16)
        launched(
            device.select, (-(-columns // CHUNK), rows), *given, *(kept[n] for n in ("groups", "candidates", "found", "arrived")),
            t["indices"], k, groups, CHUNK, CHUNK, max(GROUPS, power_of_two(2 * k)), SPAN, next_n, is_bf16, warps=8,
        )  # fmt: skip

    return run
