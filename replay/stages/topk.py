"""The stages of selection: greedy and top-k over captured logits; their tensors, oracles, work and labels.

A row of a greedy step hands its token on to where the next step reads it: ``next_input_ids`` is a table with two slots more than
there are rows, in an order of their own; a row whose slot is −1 is padding, whose token goes nowhere.

Captured rows hold no NaN, and seldom any other edge. So a case has a twin with all of them: ``edges``.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.captures.logits import open_logits
from replay.errors import InputError
from replay.model import DTYPE_BYTES, Case, Logits, Problem, Spec, Work
from replay.oracle import topk as oracle
from replay.oracle.arith import bf16_to_f32, rn_bf16
from replay.stages.draw import generator
from replay.stages.stage import COUNT, Outputs, Stage, Tensors, laid_out
from replay.stages.vary import with_rows

MOST = 2048  # what a sampler or an indexer asks for at most
LOGITS = ("f32", "bf16")
SHARD = ("whole", rf"(0|{COUNT})/{COUNT}")  # rank/ranks: the columns that one rank's part of the head makes
# A rank's own greedy token is nobody's: it would want its value beside it, which topk.rows with k=1 has by its index.
GREEDY_MODES = {"index": ("i64", "i32"), "logits": LOGITS}
ROWS_MODES = {"k": ("20", COUNT), "logits": LOGITS, "next_n": ("1", COUNT), "shard": SHARD}


def columns_of(problem: Problem) -> tuple[int, int]:
    """(first column, how many) of the vocabulary that a problem's rows hold."""
    vocab = problem.geometry.vocab
    shard = dict(problem.modes).get("shard", "whole")
    if shard == "whole":
        return 0, vocab
    rank, ranks = map(int, shard.split("/"))
    return rank * (vocab // ranks), vocab // ranks


def _check(problem: Problem) -> None:
    modes = dict(problem.modes)
    if modes.get("shard", "whole") != "whole":
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


def _captured(case: Case) -> NDArray[np.float32]:
    """[rows, columns] f32, as captured; the other bytes are the same moved one column on."""
    file = open_logits(Path(case.logits.path))
    first, count = columns_of(case.problem)
    held = file.tensor("logits")[list(case.logits.rows), first : first + count]
    wide = bf16_to_f32(held) if held.dtype == np.uint16 else np.array(held)
    return np.roll(wide, 1, axis=1) if case.bytes_of == "second" else wide


def _as_asked(problem: Problem, wide: NDArray[np.float32]) -> NDArray[Any]:
    return rn_bf16(wide) if problem.mode("logits") == "bf16" else wide


def _slots(case: Case) -> NDArray[np.int32]:
    """Where each row's token goes; among edges the last row is padding."""
    rows = case.problem.rows
    slots = generator(case.id, "slots", rows).permutation(rows + 2)[:rows].astype(np.int32)
    if case.bytes_of == "second":
        return np.roll(slots, 1)
    if case.bytes_of == "edges":
        slots[-1] = oracle.NONE
    return slots


def _greedy_inputs(case: Case) -> Tensors:
    rows, wide = case.problem.rows, _captured(case)
    if case.bytes_of == "edges":
        wide = with_edges(wide, np.full(rows, wide.shape[1]), 1, generator(case.id, "edges"))
    left = generator(case.id, "left", case.bytes_of).integers(1 << 40, 1 << 41, rows + 2)
    return {"logits": _as_asked(case.problem, wide), "slots": _slots(case), "next_input_ids": left}


def _rows_inputs(case: Case) -> Tensors:
    p, wide = case.problem, _captured(case)
    next_n, k, columns = int(p.mode("next_n")), int(p.mode("k")), wide.shape[1]
    lengths = np.full(p.rows // next_n, columns + next_n - 1, np.int32)
    if case.bytes_of == "edges":
        short = (k, 0, k + 1, columns // 2, max(k - 1, 0), next_n, columns + next_n)
        last = -(-len(lengths) // 4)
        lengths[-last:] = np.resize(short, last)
        valid = oracle.valid_columns(lengths, next_n, p.rows, columns)
        wide = with_edges(wide, valid, k, generator(case.id, "edges"))
    return {"logits": _as_asked(p, wide), "seq_lens": lengths}


# ---------------------------------------------------------------- edges

LEAST_EDGES = 16  # rows: one of each kind, and four of which only some columns count
NAN, MINUS_NAN = (np.uint32(bits).view(np.float32) for bits in (0x7FC00000, 0xFFC00000))


def _edges(case: Case) -> Case:
    """The case with its rows over and over until there are enough for every edge."""
    next_n = int(dict(case.problem.modes).get("next_n", "1"))
    rows = max(case.problem.rows, -(-LEAST_EDGES // next_n) * next_n, 2 * next_n)
    held = tuple(itertools.islice(itertools.cycle(case.logits.rows), rows))
    return with_rows(case, Logits(case.logits.path, held), rows).twinned("edges")


def with_edges(wide: NDArray[np.float32], valid: NDArray[np.int64], k: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """The rows with edges in those of their columns that count, a kind for each of sixteen rows and again."""
    edged = wide.copy()
    for r, (row, columns) in enumerate(zip(edged, valid.tolist(), strict=True)):
        if columns > 1:
            _edge(r % LEAST_EDGES, row[:columns], k, rng)
    return edged


def _edge(kind: int, row: NDArray[np.float32], k: int, rng: np.random.Generator) -> None:
    """Make a row one of its kind, in place."""
    at, largest = rng.permutation(len(row)), float(row.max())
    above = (2 * largest, 1.5 * largest) if 0 < largest < 1e38 else (1.0, 0.5)
    nan = np.where(np.arange(len(row)) % 2, NAN, MINUS_NAN)
    match kind:
        case 1:  # no number
            row[:] = nan
        case 2:  # zeros of both signs above all else, the negative ones first
            row[:] = np.minimum(row, -1)
            zeros = np.sort(at[: max(len(row) // 2, 1)])
            row[zeros] = np.where(np.arange(len(zeros)) < len(zeros) // 2, np.float32(-0.0), np.float32(0.0))
        case 3 | 6:  # the largest two in the first column and the last
            row[:] = np.minimum(row, above[1] / 1.25)
            row[[0, -1]] = above if kind == 3 else above[::-1]
        case 4:  # fewer numbers than k
            row[at[max(k // 2, 1) :]] = nan[at[max(k // 2, 1) :]]
        case 5:  # denormals of both signs
            signs = (rng.random(len(row)) < 0.5).astype(np.uint32) << 31
            row[:] = (rng.integers(1, 1 << 23, len(row), np.uint32) | signs).view(np.float32)
        case 7:  # every number −inf
            row[:] = np.where(rng.random(len(row)) < 0.5, -np.inf, nan)
        case 8 | 9:  # large ones, the larger behind; or +inf behind them
            last = np.sort(at[:3])
            row[last] = (2e38, 3e38, np.inf if kind == 9 else largest)[: len(last)]
        case 10:  # low bits alone
            row[:] = (rng.integers(0, 1024, len(row), np.uint32) + np.uint32(0x3F800000)).view(np.float32)
        case _:  # a NaN of either sign, a −inf, the largest once more
            places = at[at != row.argmax()][:4]
            row[places] = (NAN, MINUS_NAN, -np.inf, largest)[: len(places)]


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


def _lowest_first(p: Problem, t: Any, outputs: Outputs) -> Outputs:
    """Each right selection with its lowest indices, in order; a wrong one with what is right in it at its place."""
    values, k, found = oracle.canonical(t["logits"]), int(p.mode("k")), outputs["indices"].copy()
    for r, columns in enumerate(_valid(p, t)):
        row, chosen = values[r, :columns], outputs["indices"][r].astype(np.int64)
        right = oracle.is_selection(row, chosen, k)
        found[r] = oracle.lowest_first(row, chosen) if right else _beside(row, oracle.top(row, k), chosen)
    return {"indices": found}


def _in_order(p: Problem, t: Any, outputs: Outputs) -> Outputs:
    """Right selections in order, each as it was chosen."""
    values, chosen = oracle.canonical(t["logits"]), outputs["indices"].astype(np.int64)
    return {"indices": np.array([oracle.in_order(*pair) for pair in zip(values, chosen, strict=True)], np.int32)}


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
    given: Any = inputs
    rows, columns = given["logits"].shape
    if "seq_lens" in given:
        valid, rest = int(_valid(problem, inputs).sum()), given["seq_lens"].nbytes + 4 * rows * int(problem.mode("k"))
    else:
        valid, rest = rows * columns, given["slots"].nbytes + rows * (8 + DTYPE_BYTES[problem.mode("index")])
    return Work(0, 0, valid * DTYPE_BYTES[problem.mode("logits")] + rest, 0)


# ---------------------------------------------------------------- what is told


def _label(case: Case, output: str, row: int) -> str:
    """``captured row 17``; for a slot of the table whose row it is."""
    if output == "next_input_ids":
        slots = _slots(case).tolist()
        if row not in slots:
            return "slot that is nobody's"
        return f"slot of captured row {case.logits.rows[slots.index(row)]}"
    return f"captured row {case.logits.rows[row]}"


def _stages() -> Iterator[Stage]:
    yield Stage(
        name="topk.greedy", modes=GREEDY_MODES, specs=_greedy_specs, inputs=_greedy_inputs, oracle=_greedy,
        work=_work, label=_label, relabel=None, probes=("logits", "slots"), check=_check, edges=_edges,
    )  # fmt: skip
    yield Stage(
        name="topk.rows", modes=ROWS_MODES, specs=_rows_specs, inputs=_rows_inputs, oracle=_rows,
        canonical=_lowest_first, arranged=_in_order,
        work=_work, label=_label, relabel=None, probes=("logits", "seq_lens"), check=_check, edges=_edges,
    )  # fmt: skip


STAGES = tuple(_stages())
