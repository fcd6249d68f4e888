"""The stages of selection: greedy and top-k over captured logits; their tensors, oracles, work and labels.

A row of a greedy step hands its token on to where the next step reads it: ``next_input_ids`` is a table with two slots more than
there are rows, in an order of their own; a row whose slot is −1 is padding, whose token goes nowhere.

Captured rows hold no NaN. The ``second`` twin of a case is the same rows with every edge in them: see ``_with_edges``.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.captures.logits import open_logits
from replay.errors import InputError
from replay.model import DTYPE_BYTES, Case, Problem, Spec, Work
from replay.oracle import topk as oracle
from replay.oracle.arith import bf16_to_f32, rn_bf16
from replay.stages.draw import generator
from replay.stages.stage import Outputs, Stage, Tensors, laid_out

COUNT = r"[1-9]\d*"
MOST = 2048  # of semantics.md
LOGITS = ("f32", "bf16")
SHARD = ("whole", r"\d+/[1-9]\d*")  # rank/ranks: the columns that one rank's part of the head makes
GREEDY_MODES = {"index": ("i64", "i32"), "logits": LOGITS, "shard": SHARD}
ROWS_MODES = {"k": ("20", COUNT), "logits": LOGITS, "next_n": ("1", COUNT), "shard": SHARD}


def columns_of(problem: Problem) -> tuple[int, int]:
    """(first column, how many) of the vocabulary that a problem's rows hold."""
    vocab = problem.geometry.vocab
    if problem.mode("shard") == "whole":
        return 0, vocab
    rank, ranks = map(int, problem.mode("shard").split("/"))
    return rank * (vocab // ranks), vocab // ranks


def _check(problem: Problem) -> None:
    modes = dict(problem.modes)
    if modes["shard"] != "whole":
        rank, ranks = map(int, modes["shard"].split("/"))
        if rank >= ranks or problem.geometry.vocab % ranks:
            expected = f"rank/ranks, rank < ranks and ranks a divisor of vocab {problem.geometry.vocab}"
            raise InputError("--mode", "shard", expected, modes["shard"])
    if int(modes.get("k", "1")) > MOST:
        raise InputError("--mode", "k", f"at most {MOST}", modes["k"])
    if problem.rows % int(modes.get("next_n", "1")):
        raise InputError("--mode", "next_n", f"a divisor of the case's rows {problem.rows}", modes["next_n"])


# ---------------------------------------------------------------- tensors


def _greedy_specs(p: Problem) -> tuple[Spec, ...]:
    return (
        laid_out(Spec("logits", "in", (p.rows, columns_of(p)[1]), p.mode("logits")), p.layout),
        laid_out(Spec("slots", "in", (p.rows,), "i32"), p.layout),
        Spec("token", "out", (p.rows,), p.mode("index")),
        Spec("next_input_ids", "inout", (p.rows + 2,), "i64"),
    )


def _rows_specs(p: Problem) -> tuple[Spec, ...]:
    return (
        laid_out(Spec("logits", "in", (p.rows, columns_of(p)[1]), p.mode("logits")), p.layout),
        laid_out(Spec("seq_lens", "in", (p.rows // int(p.mode("next_n")),), "i32"), p.layout),
        Spec("indices", "out", (p.rows, int(p.mode("k"))), "i32"),
    )


def _logits(case: Case) -> NDArray[Any]:
    """[rows, columns] in the dtype that the problem asks for."""
    from pathlib import Path

    file = open_logits(Path(case.logits.path))
    first, count = columns_of(case.problem)
    held = file.tensor("logits")[list(case.logits.rows), first : first + count]
    wide = bf16_to_f32(held) if held.dtype == np.uint16 else np.array(held)
    if case.bytes_of == "second":
        wide = _with_edges(case, wide)
    return rn_bf16(wide) if case.problem.mode("logits") == "bf16" else wide


def _with_edges(case: Case, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows moved one column on, with a NaN, a −inf and the largest value once more in each; the second of three rows or more is
    NaN alone, and the third has both zeros for its largest, −0.0 first."""
    edged = np.roll(values, 1, axis=1)
    rows, columns = edged.shape
    rng = generator(case.id, "edges")
    zeros = np.sort(rng.permutation(columns)[:2])
    for r, row in enumerate(edged):
        if r == 2:
            row[:] = np.minimum(row, -1)
            row[zeros] = (-0.0, 0.0)[: len(zeros)]
        again = -np.inf if r == 2 else row.max()  # a third zero could be the first
        at = rng.permutation(columns)[:3]
        places = at[~np.isin(at, [row.argmax(), *zeros])]
        row[places] = (np.nan, -np.inf, again)[: len(places)]
        if r == 1 and rows > 2:
            row[:] = np.nan
    return edged


def _greedy_inputs(case: Case) -> Tensors:
    rows = case.problem.rows
    order = generator(case.id, "slots", rows).permutation(rows + 2)
    slots = order[:rows].astype(np.int32)
    left = generator(case.id, "left", case.bytes_of).integers(1 << 40, 1 << 41, rows + 2)
    if case.bytes_of == "second":
        slots = np.roll(slots, 1)
        slots[rows - 1 :] = -1 if rows > 1 else slots[-1]
    return {"logits": _logits(case), "slots": slots, "next_input_ids": left}


def _rows_inputs(case: Case) -> Tensors:
    p = case.problem
    next_n, k, (_, columns) = int(p.mode("next_n")), int(p.mode("k")), columns_of(p)
    lengths = np.full(p.rows // next_n, columns + next_n - 1)
    if case.bytes_of == "second":
        drawn = generator(case.id, "seq_lens").integers(1, columns + 1, len(lengths))
        edges = np.array([columns // 2, 0, k, k + 1, next_n, max(k - 1, 0), columns + next_n])
        lengths = np.where(np.arange(len(lengths)) < len(edges), np.resize(edges, len(lengths)), drawn)
    return {"logits": _logits(case), "seq_lens": lengths.astype(np.int32)}


# ---------------------------------------------------------------- oracles


def _greedy(p: Problem, t: Any) -> Outputs:
    token = oracle.greedy(oracle.canonical(t["logits"]))
    table, real = t["next_input_ids"].copy(), t["slots"] >= 0
    table[t["slots"][real]] = token[real]
    return {"token": token.astype(np.int32 if p.mode("index") == "i32" else np.int64), "next_input_ids": table}


def _valid(p: Problem, t: Any) -> NDArray[np.int64]:
    return oracle.valid_columns(t["seq_lens"], int(p.mode("next_n")), p.rows, columns_of(p)[1])


def _rows(p: Problem, t: Any) -> Outputs:
    return {"indices": oracle.rows(oracle.canonical(t["logits"]), _valid(p, t), int(p.mode("k")))}


def _as_is(problem: Problem, inputs: Tensors, outputs: Outputs) -> Outputs:
    return outputs


def _brought(order: Callable[[Any, Any], Any]) -> Callable[[Problem, Tensors, Outputs], Outputs]:
    """Each right selection brought to an order; a wrong one with what is right in it at its place."""

    def brought(problem: Problem, inputs: Tensors, outputs: Outputs) -> Outputs:
        values, k = oracle.canonical(np.asarray(inputs["logits"])), int(problem.mode("k"))
        found = outputs["indices"].copy()
        if found.shape != (problem.rows, k):
            return outputs
        for r, columns in enumerate(_valid(problem, inputs)):
            row, chosen = values[r, :columns], outputs["indices"][r].astype(np.int64)
            right = oracle.is_selection(row, chosen, k)
            found[r] = order(row, chosen) if right else _beside(row, oracle.top(row, k), chosen)
        return {"indices": found}

    return brought


def _beside(row: NDArray[np.float32], want: NDArray[np.int64], chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """What was chosen, each index at the place where it is wanted, an equal of the boundary for one that is missing, and what is
    wrong in the places that are left."""
    left = chosen.tolist()
    placed = [left.pop(left.index(w)) if w in left else None for w in want.tolist()]
    boundary = row[want[want >= 0][-1]] if want.max(initial=-1) >= 0 else np.nan
    equals = {c for c in left if 0 <= c < len(row) and row[c] == boundary and c not in placed}
    for place, wanted in enumerate(want.tolist()):
        if placed[place] is None and wanted >= 0 and row[wanted] == boundary and equals:
            left.remove(equals.pop())
            placed[place] = wanted
    return np.array([left.pop(0) if at is None else at for at in placed])


def _work(problem: Problem, inputs: Tensors) -> Work:
    """Nothing is cold: the head has just written the logits. What is past a row's valid columns need not be read."""
    rows, columns = np.asarray(inputs["logits"]).shape
    valid = int(_valid(problem, inputs).sum()) if "seq_lens" in inputs else rows * columns
    out = 4 * int(problem.mode("k")) if "seq_lens" in inputs else 8 + DTYPE_BYTES[problem.mode("index")]
    return Work(0, 0, valid * DTYPE_BYTES[problem.mode("logits")] + rows * (4 + out), 0)


# ---------------------------------------------------------------- what is told


def _label(case: Case, output: str, row: int) -> str:
    """``captured row 17``; for a slot of the table whose row it is."""
    if output == "next_input_ids":
        slots = np.asarray(_greedy_inputs(case)["slots"]).tolist()
        if row not in slots:
            return "slot that is nobody's"
        return f"slot of captured row {case.logits.rows[slots.index(row)]}"
    return f"captured row {case.logits.rows[row]}"


def _none(case: Case, outputs: Outputs) -> str:
    """Rows in which there is no number: their token is −1, which no embedding has."""
    rows = np.flatnonzero(outputs["token"] == oracle.NONE).tolist()
    return f"no number in {len(rows)} rows, first captured row {case.logits.rows[rows[0]]}: token −1" if rows else ""


def _stages() -> Iterator[Stage]:
    yield Stage(
        name="topk.greedy", modes=GREEDY_MODES, specs=_greedy_specs, inputs=_greedy_inputs, oracle=_greedy, canonical=_as_is,
        work=_work, label=_label, relabel=None, probes=("logits", "slots"), check=_check, notice=_none,
    )  # fmt: skip
    yield Stage(
        name="topk.rows", modes=ROWS_MODES, specs=_rows_specs, inputs=_rows_inputs, oracle=_rows,
        canonical=_brought(oracle.lowest_first), arranged=_brought(oracle.in_order),
        work=_work, label=_label, relabel=None, probes=("logits",), check=_check,
    )  # fmt: skip


STAGES = tuple(_stages())
