"""The MoE stages: their tensors, inputs, oracles, work and labels.

Inputs of a stage are the oracle's outputs of the stages before it on the case's own routes, so every stage sees the
values that a right layer would hand it. R = T·k is the number of (token, slot) pairs, V ≤ R those whose id is not −1.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.errors import InputError
from replay.model import DTYPE_BYTES, Case, Geometry, Problem, Spec, Work
from replay.oracle import moe as oracle
from replay.oracle import moe_wide as wide
from replay.oracle.arith import bf16_to_f32
from replay.oracle.moe import ExpertRows
from replay.oracle.quant import quantize
from replay.stages import moe_wide
from replay.stages.moe_chain import ACT, EPILOGUE, QUANT, Chain, chain_of
from replay.stages.moe_tensors import TENSORS, WIDE, expert_map, expert_parallel, group_of, is_wide, present, sizes_of, spec_of
from replay.stages.stage import COUNT, Outputs, Stage, Tensors

FMA = ("off", "chain")
BIAS = SHARED = ("off", "on")
TILE_ROWS = 8  # rows of one expert that a matrix kernel takes at a time
EXPERT_MAP = ("off", rf"ep{COUNT}:\d+")


# ---------------------------------------------------------------- tensors


def _specs(ins: str, weights: str, outs: str) -> Any:
    def specs(problem: Problem) -> tuple[Spec, ...]:
        modes = dict(problem.modes)
        w = [n for n in weights.split() if present(n, modes)]
        return (
            *(spec_of(problem, n, "in") for n in ins.split() if present(n, modes)),
            *(spec_of(problem, n, "weight") for n in w),
            *(spec_of(problem, n, "out") for n in outs.split() if present(n, modes)),
        )

    return specs


def _draw(names: Mapping[str, Any]) -> Any:
    """An ``inputs`` function from name → how to read it off a chain."""

    def inputs(case: Case) -> Tensors:
        chain = chain_of(case)
        modes = dict(case.problem.modes)
        drawn: Tensors = {n: read(chain) for n, read in names.items() if present(n, modes)}
        if (mapped := expert_map(case.problem)) is not None:
            drawn["expert_map"] = mapped
        return drawn

    return inputs


def _pad(rows: NDArray[Any], total: int) -> NDArray[Any]:
    """Permuted rows up to R. The tail past the valid rows is never read by a right kernel: NaN makes reading it show."""
    fill = {"uint16": 0x7FC0, "float32": np.nan, "int8": 0x55}[rows.dtype.name]
    tail = np.full((total - len(rows), *rows.shape[1:]), fill, rows.dtype)
    return np.concatenate([rows, tail]) if len(tail) else rows


def _total(c: Chain) -> int:
    return int(c.topk_ids.size)


_ROUTED = {
    "rows_per_expert": lambda c: c.rows_per_expert,
    "offsets": lambda c: c.offsets,
    "unpermuted_to_permuted": lambda c: c.permuted,
    "topk_ids": lambda c: c.topk_ids,
}
_A = {"a": lambda c: _pad(c.remapped[0], _total(c)), "a_scale": lambda c: _pad(c.remapped[1], _total(c))}
_H = {"h": lambda c: _pad(c.activated[0], _total(c)), "h_scale": lambda c: _pad(c.activated[1], _total(c))}


def _weights(*names: str) -> dict[str, Any]:
    return {n: (lambda c, n=n: c.weight(n)) for n in names}


# ---------------------------------------------------------------- work, labels, order


def _bytes(problem: Problem, names: str, rows: int) -> int:
    """Bytes of the named tensors, with R taken as the valid rows."""
    sizes, modes = sizes_of(problem) | {"R": rows}, dict(problem.modes)
    here = [name for name in names.split() if present(name, modes)]
    return sum(
        DTYPE_BYTES[spec_of(problem, name, "in").dtype] * int(np.prod([sizes[s] for s in TENSORS[name][1].split()]))
        for name in here
    )


def _work(hot: str, ops_per_row: Any = None) -> Any:
    """Weights of the *distinct* active experts are cold; the rest of the case is hot."""

    def work(problem: Problem, inputs: Tensors) -> Work:
        valid = _valid(inputs) + (problem.rows if "shared_w13" in inputs else 0)
        cold = sum(t.rows.nbytes for t in inputs.values() if isinstance(t, ExpertRows))
        ops = valid * ops_per_row(problem.geometry) if ops_per_row else 0
        int8, bf16 = (0, ops) if is_wide(dict(problem.modes)) else (ops, 0)
        return Work(cold, 0, _bytes(problem, hot, valid), int8, bf16_ops=bf16)

    return work


def _valid(inputs: Tensors) -> int:
    """V: the permuted rows that exist."""
    if "offsets" in inputs:
        return int(np.asarray(inputs["offsets"])[-1])
    name = next((n for n in ("topk_ids", "unpermuted_to_permuted") if n in inputs), None)
    return int(np.count_nonzero(np.asarray(inputs[name]) >= 0)) if name else 0


def _ops13(g: Geometry) -> int:
    return 2 * g.hidden * 2 * g.inter


def _ops2(g: Geometry) -> int:
    return 2 * g.inter * g.hidden


def _label(case: Case, output: str, row: int) -> str:
    """``token 0, slot 5, expert 161`` for a permuted row; token and experts for a token row; the expert for a count."""
    ids = np.array(case.routes.topk_ids)[:, :: -1 if case.bytes_of else 1]
    symbols = TENSORS[output][1].split()
    if symbols[0] == "R":
        _, _, permuted = oracle.route(ids.astype(np.int32), case.problem.geometry.experts)
        found = np.argwhere(permuted == row)
        if not len(found):
            return "past the valid rows"
        t, j = found[0]
        first = int(permuted[ids == ids[t, j]].min())
        return f"token {t}, slot {j}, expert {ids[t, j]}, place {(row - first) % TILE_ROWS} in its tile"
    if symbols[0] == "T":
        return f"token {row}, experts {' '.join(map(str, ids[row]))}"
    if row >= case.problem.geometry.experts:
        return "end of the last expert"
    owners = np.argwhere(ids == row)
    return f"expert {row}, " + (f"token {owners[0][0]}" if len(owners) else "no token")


def _canonical_route(problem: Problem, inputs: Tensors, outputs: Outputs) -> Outputs:
    """A valid map (a bijection onto [0, V), grouped by the offsets) becomes the canonical one; others stay as they are."""
    ids = np.asarray(inputs["topk_ids"])
    mapped = expert_map(problem)
    local = ids if mapped is None else np.where(ids >= 0, mapped[ids], -1)
    _, offsets, canonical = oracle.route(local, sizes_of(problem)["E"])
    got = outputs["unpermuted_to_permuted"]
    here = local >= 0
    rows, experts = got[here], local[here]
    grouped = (rows >= offsets[experts]) & (rows < offsets[experts + 1])
    if grouped.all() and len(np.unique(rows)) == len(rows) and (got[~here] == -1).all():
        return outputs | {"unpermuted_to_permuted": canonical}
    return outputs


def relabel(inputs: Tensors, slots: NDArray[Any]) -> Tensors:
    """Move the i-th active expert to ``slots[i]`` (ascending, so permutation and outputs stay as they are)."""
    table = next(t for n, t in inputs.items() if isinstance(t, ExpertRows) and not n.startswith("shared_"))
    moved: Tensors = dict(inputs)
    to = np.full(table.total + 1, -1, np.int32)  # the last entry keeps −1 at −1
    to[table.experts] = slots
    counts = np.zeros(table.total, np.int32)
    if "offsets" in inputs:
        counts[slots] = np.diff(np.asarray(inputs["offsets"]))[table.experts]
        moved["offsets"] = np.concatenate(([0], np.cumsum(counts, dtype=np.int64))).astype(np.int64)
    if "rows_per_expert" in inputs:
        moved["rows_per_expert"] = counts
    if "topk_ids" in inputs:
        moved["topk_ids"] = to[np.asarray(inputs["topk_ids"])]
    for name, value in inputs.items():
        if isinstance(value, ExpertRows) and not name.startswith("shared_"):
            moved[name] = ExpertRows(value.total, np.asarray(slots, np.int64), value.rows)
    return moved


def _in_place(inputs: Tensors, slots: NDArray[Any]) -> Tensors:
    """One expert has one slot: cold weights come from further tables."""
    return inputs


# ---------------------------------------------------------------- oracles, from stage tensors


def _quantize(p: Problem, t: Any) -> Outputs:
    q, scale = quantize(bf16_to_f32(t["x"]), p.mode("quant"))
    return {"q": q, "q_scale": scale}


def _route(p: Problem, t: Any) -> Outputs:
    return dict(
        zip(
            ("rows_per_expert", "offsets", "unpermuted_to_permuted"),
            oracle.route(t["topk_ids"], sizes_of(p)["E"], t.get("expert_map")),
            strict=True,
        )
    )


def _remap(p: Problem, t: Any) -> Outputs:
    a, scale = oracle.remap(t["q"], t["q_scale"], t["unpermuted_to_permuted"])
    return {"a": a, "a_scale": scale}


def _gemm(p: Problem, t: Any, rows: str, weight: str, out: str) -> Outputs:
    w, bias, offsets = t[weight], t.get(f"{weight}_bias"), t["offsets"]
    if is_wide(dict(p.modes)):
        return {out: wide.grouped_gemm(t[rows], offsets, w, bias)}
    scales = t[f"{rows}_scale"], t[f"{weight}_scale"]
    return {out: oracle.grouped_gemm(t[rows], scales[0], offsets, w, scales[1], p.mode("epilogue"), bias)}


def _gemm1(p: Problem, t: Any) -> Outputs:
    return _gemm(p, t, "a", "w13", "gate_up")


def _gemm2(p: Problem, t: Any) -> Outputs:
    return _gemm(p, t, "h", "w2", "y")


def _act_quant(p: Problem, t: Any) -> Outputs:
    valid = int(t["offsets"][-1])
    if is_wide(dict(p.modes)):
        return {"h": wide.activate(t["gate_up"][:valid], p.mode("act"))}
    q, scale = oracle.act_quant(t["gate_up"][:valid], p.mode("act"), p.mode("quant"))
    return {"h": q, "h_scale": scale}


def _combine(p: Problem, t: Any) -> Outputs:
    return {"out": oracle.combine(t["y"], t["unpermuted_to_permuted"], t["topk_weights"], p.mode("combine_fma"))}


def _layer_weights(t: Any) -> oracle.LayerWeights:
    return oracle.LayerWeights(t["w13"], t["w13_scale"], t["w2"], t["w2_scale"])


def _middle(p: Problem, t: Any) -> Outputs:
    if is_wide(dict(p.modes)):
        return {"y": wide.middle(t["a"], t["offsets"], t["w13"], t["w2"], p.mode("act"))}
    return {"y": oracle.middle(t["a"], t["a_scale"], t["offsets"], _layer_weights(t), **dict(p.modes))}


def _layer(p: Problem, t: Any) -> Outputs:
    modes = dict(p.modes)
    if is_wide(modes):
        both = {name: modes[name] for name in ("act", "combine_fma")}
        return {"out": wide.layer(t["x"], t["topk_ids"], t["topk_weights"], t["w13"], t["w2"], **both)}
    add_shared = modes.pop("shared") == "on"
    out = oracle.layer(t["x"], t["topk_ids"], t["topk_weights"], _layer_weights(t), **modes)
    modes.pop("combine_fma")
    return {"out": oracle.shared(t["x"], out, t["shared_gate"], _shared_weights(t), **modes) if add_shared else out}


def _shared_weights(t: Any) -> oracle.LayerWeights:
    return oracle.LayerWeights(t["shared_w13"], t["shared_w13_scale"], t["shared_w2"], t["shared_w2_scale"])


def _shared(p: Problem, t: Any) -> Outputs:
    return {"out": oracle.shared(t["x"], t["routed"], t["shared_gate"], _shared_weights(t), **dict(p.modes))}


def _check_map(problem: Problem) -> None:
    size, rank = expert_parallel(problem)
    experts = problem.geometry.experts
    if experts % size or rank >= size:
        raise InputError(
            "--mode", "expert_map", f"epSIZE:RANK, RANK < SIZE, SIZE a divisor of {experts}", problem.mode("expert_map")
        )


def _check_group(problem: Problem) -> None:
    group = group_of(problem)
    if group and problem.geometry.hidden % group:
        raise InputError("--mode", "quant of moe.quantize", f"a group that divides hidden {problem.geometry.hidden}", str(group))


_GEMM_IN = "rows_per_expert offsets unpermuted_to_permuted topk_ids"
_WEIGHTS = "w13 w13_scale w2 w2_scale"
_SHARED = "shared_w13 shared_w13_scale shared_w2 shared_w2_scale"


def _edge(problem: Problem, inputs: Tensors) -> bool:
    """A token without any expert of this rank, or one that is all zero. (Experts without rows are the rule, not an edge.)"""
    name = next((n for n in ("topk_ids", "unpermuted_to_permuted") if n in inputs), None)
    ids = np.asarray(inputs[name]) if name else np.zeros((1, 1), np.int32)
    mapped = expert_map(problem)
    here = ids if mapped is None else np.where(ids >= 0, mapped[ids], -1)
    x = np.asarray(inputs.get("x", np.ones((1, 1), np.uint16)))
    return bool((here < 0).all(1).any() or (x & 0x7FFF == 0).all(1).any())


_WIDE_BUDGETS: Any = {"budgets": moe_wide.budgets, "row_scale": moe_wide.row_scale}
_ARITHMETIC = ("division", "contraction", "bf16", "gates")


def _stage(**fields: Any) -> Stage:
    """A MoE stage: all have the same labels and the same edges."""
    return Stage(label=_label, degenerate=_edge, **fields)


STAGES = (
    _stage(
        name="moe.quantize", modes={"quant": (*QUANT, f"group_trunc:{COUNT}")}, check=_check_group,
        specs=_specs("x", "", "q q_scale"), inputs=_draw({"x": lambda c: c.x}), oracle=_quantize,
        work=_work("x q q_scale"), relabel=None, probes=("x",), rests_on=("division", "contraction"),
    ),
    _stage(
        name="moe.route", modes={"expert_map": EXPERT_MAP}, check=_check_map,
        specs=_specs("topk_ids expert_map", "", "rows_per_expert offsets unpermuted_to_permuted"),
        inputs=_draw({"topk_ids": lambda c: c.topk_ids}), oracle=_route,
        work=_work("topk_ids rows_per_expert offsets unpermuted_to_permuted"), canonical=_canonical_route,
        relabel=None, probes=("topk_ids",),
    ),
    _stage(
        name="moe.remap", modes={}, specs=_specs("q q_scale unpermuted_to_permuted", "", "a a_scale"),
        inputs=_draw({"q": lambda c: c.quantized[0], "q_scale": lambda c: c.quantized[1],
                      "unpermuted_to_permuted": lambda c: c.permuted}),
        oracle=_remap, work=_work("q q_scale unpermuted_to_permuted a a_scale"),
        relabel=None, probes=("q", "q_scale", "unpermuted_to_permuted"),
    ),
    _stage(
        name="moe.gemm1", modes={"epilogue": (*EPILOGUE, WIDE), "bias": BIAS}, **_WIDE_BUDGETS,
        specs=_specs(f"a a_scale {_GEMM_IN}", "w13 w13_scale w13_bias", "gate_up"),
        inputs=_draw({**_A, **_ROUTED, **_weights("w13", "w13_scale", "w13_bias")}), oracle=_gemm1,
        work=_work("a a_scale offsets gate_up", _ops13),
        relabel=relabel, probes=("a", "a_scale", "w13", "w13_scale"), rests_on=("contraction", "bf16"),
    ),
    _stage(
        name="moe.act_quant", modes={"act": ACT, "quant": (*QUANT, WIDE)}, specs=_specs("gate_up offsets", "", "h h_scale"),
        inputs=_draw({"gate_up": lambda c: _pad(c.gate_up, _total(c)), "offsets": lambda c: c.offsets}),
        oracle=_act_quant, work=_work("gate_up h h_scale"), relabel=None,
        probes=("gate_up",), rests_on=("division", "contraction", "bf16", "gates"),
    ),
    _stage(
        name="moe.gemm2", modes={"epilogue": (*EPILOGUE, WIDE), "bias": BIAS}, **_WIDE_BUDGETS,
        specs=_specs(f"h h_scale {_GEMM_IN}", "w2 w2_scale w2_bias", "y"),
        inputs=_draw({**_H, **_ROUTED, **_weights("w2", "w2_scale", "w2_bias")}), oracle=_gemm2,
        work=_work("h h_scale offsets y", _ops2),
        relabel=relabel, probes=("h", "h_scale", "w2", "w2_scale"), rests_on=("contraction", "bf16"),
    ),
    _stage(
        name="moe.combine", modes={"combine_fma": FMA}, specs=_specs("y unpermuted_to_permuted topk_weights", "", "out"),
        inputs=_draw({"y": lambda c: _pad(c.down, _total(c)), "unpermuted_to_permuted": lambda c: c.permuted,
                      "topk_weights": lambda c: c.topk_weights}),
        oracle=_combine, work=_work("y unpermuted_to_permuted topk_weights out"),
        relabel=None, probes=("y", "topk_weights", "unpermuted_to_permuted"), rests_on=("contraction", "bf16"),
    ),
    _stage(
        name="moe.shared", modes={"epilogue": EPILOGUE, "act": ACT, "quant": QUANT},
        specs=_specs("x routed shared_gate", _SHARED, "out"),
        inputs=_draw({"x": lambda c: c.x, "routed": lambda c: c.combined, "shared_gate": lambda c: c.shared_gate,
                      **_weights(*_SHARED.split())}),
        oracle=_shared, work=_work("x routed out shared_gate", lambda g: _ops13(g) + _ops2(g)),
        relabel=_in_place,
        probes=("x", "routed", "shared_gate", "shared_w13", "shared_w13_scale", "shared_w2", "shared_w2_scale"),
        rests_on=_ARITHMETIC,
    ),
    _stage(
        name="moe.middle", modes={"epilogue": (*EPILOGUE, WIDE), "act": ACT, "quant": (*QUANT, WIDE)}, check=moe_wide.check,
        **_WIDE_BUDGETS,
        specs=_specs(f"a a_scale {_GEMM_IN}", _WEIGHTS, "y"),
        inputs=_draw({**_A, **_ROUTED, **_weights(*_WEIGHTS.split())}), oracle=_middle,
        work=_work("a a_scale offsets y", lambda g: _ops13(g) + _ops2(g)),
        relabel=relabel, probes=("a", "a_scale", "w13", "w13_scale", "w2", "w2_scale"), rests_on=_ARITHMETIC,
    ),
    _stage(
        name="moe.layer", check=moe_wide.check, **_WIDE_BUDGETS,
        modes={"quant": (*QUANT, WIDE), "epilogue": (*EPILOGUE, WIDE), "act": ACT, "combine_fma": FMA, "shared": SHARED},
        specs=_specs("x topk_ids topk_weights shared_gate", f"{_WEIGHTS} {_SHARED}", "out"),
        inputs=_draw({"x": lambda c: c.x, "topk_ids": lambda c: c.topk_ids, "topk_weights": lambda c: c.topk_weights,
                      "shared_gate": lambda c: c.shared_gate, **_weights(*_WEIGHTS.split(), *_SHARED.split())}),
        oracle=_layer, work=_work("x topk_ids topk_weights out", lambda g: _ops13(g) + _ops2(g)),
        relabel=relabel,
        probes=("x", "topk_ids", "topk_weights", "w13", "w13_scale", "w2", "w2_scale"), rests_on=_ARITHMETIC,
    ),
)  # fmt: skip
