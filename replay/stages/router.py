"""The stage ``topk.router``: which experts a router chooses of its logits, and their weights.

A row of a logit capture stands for a router's: its first columns, as many as there are experts. A router's own capture has no
others.
"""

from pathlib import Path
from typing import Any

import numpy as np

from replay.captures.logits import open_logits
from replay.errors import InputError
from replay.model import DTYPE_BYTES, Case, Problem, Spec, Work
from replay.oracle import router as oracle
from replay.oracle.arith import bf16_to_f32, rn_bf16
from replay.stages.draw import generator
from replay.stages.stage import Outputs, Stage, Tensors, laid_out

MODES = {"bias": ("off", "on"), "logits": ("f32", "bf16"), "padding": ("off", "on"), "renormalize": ("on", "off")}


def _check(problem: Problem) -> None:
    g = problem.geometry
    if g.vocab < g.experts:
        expected = f"at most the {g.vocab} columns of a row, one an expert (other stages: --stage topk.greedy --stage topk.rows)"
        raise InputError(problem.stage, "experts", expected, str(g.experts))


def _specs(p: Problem) -> tuple[Spec, ...]:
    g = p.geometry
    given = [Spec("gating_output", "in", (p.rows, g.experts), p.mode("logits"))]
    if p.mode("bias") == "on":
        given.append(Spec("bias", "in", (g.experts,), "f32"))
    if p.mode("padding") == "on":
        given.append(Spec("is_padding", "in", (p.rows,), "i8"))
    return (
        *(laid_out(spec, p.layout) for spec in given),
        Spec("topk_weights", "out", (p.rows, g.top_k), "f32"),
        Spec("topk_ids", "out", (p.rows, g.top_k), "i32"),
    )


def _inputs(case: Case) -> Tensors:
    p, experts = case.problem, case.problem.geometry.experts
    held = open_logits(Path(case.logits.path)).tensor("logits")
    rows = held[list(case.logits.rows), :experts]
    wide = bf16_to_f32(rows) if rows.dtype == np.uint16 else np.array(rows)
    wide = np.roll(wide, 1, axis=1) if case.bytes_of else wide
    drawn: Tensors = {"gating_output": rn_bf16(wide) if p.mode("logits") == "bf16" else wide}
    if p.mode("bias") == "on":  # of the size of what it is added to
        drawn["bias"] = generator(case.id, "bias").standard_normal(experts, np.float32) / np.float32(experts)
    if p.mode("padding") == "on":
        drawn["is_padding"] = (generator(case.id, "padding", case.bytes_of).random(p.rows) < 0.25).astype(np.int8)
    return drawn


def _oracle(p: Problem, t: Any) -> Outputs:
    x, padding = t["gating_output"], t.get("is_padding")
    x = bf16_to_f32(x) if x.dtype == np.uint16 else x
    hidden = None if padding is None else padding != 0
    weights, ids = oracle.route(x, t.get("bias"), hidden, p.geometry.top_k, renormalize=p.mode("renormalize") == "on")
    return {"topk_weights": weights, "topk_ids": ids}


def _work(p: Problem, inputs: Tensors) -> Work:
    """Nothing is cold: the gate has just written the logits."""
    nbytes = p.rows * (p.geometry.experts * DTYPE_BYTES[p.mode("logits")] + 8 * p.geometry.top_k)
    return Work(0, 0, nbytes, 0)


def _label(case: Case, output: str, row: int) -> str:
    return f"captured row {case.logits.rows[row]}"


def _every_row_padded(p: Problem, inputs: Tensors) -> bool:
    """Logits then move nothing."""
    return "is_padding" in inputs and bool(np.asarray(inputs["is_padding"]).all())


STAGES = (
    Stage(
        name="topk.router", modes=MODES, specs=_specs, inputs=_inputs, oracle=_oracle, work=_work, label=_label, relabel=None,
        probes=("gating_output",), check=_check, degenerate=_every_row_padded, rests_on=("division", "contraction"),
    ),
)  # fmt: skip
