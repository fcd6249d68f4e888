"""The MoE stages: their tensors, inputs, oracles, work and labels.

Inputs of a stage are the oracle's outputs of the stages before it on the case's own routes, so every stage sees the
values that a right layer would hand it. R = T·k is the number of (token, slot) pairs, V ≤ R those whose id is not −1.
"""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.errors import InputError
from replay.model import DTYPE_BYTES, Case, CaseId, Geometry, Problem, Spec, Work
from replay.oracle import moe as oracle
from replay.oracle.arith import F32, I32, bf16_to_f32
from replay.oracle.moe import ExpertRows
from replay.oracle.quant import quantize
from replay.stages import draw
from replay.stages.stage import Outputs, Stage, Tensors

QUANT = ("recip_half_away", "recip_half_even", "div_half_even", "rmsnorm_int8")
ACT = ("silu_round_twice", "silu_round_once", "silu_f32")
EPILOGUE = ("row_then_col", "scales_first")
FMA = ("off", "chain")
BIAS = ("off", "on")


# ---------------------------------------------------------------- the values a right layer would hold


class Chain:
    """The oracle's intermediate values of one layer on one case, each computed when first asked for."""

    def __init__(self, case: Case, modes: tuple[tuple[str, str], ...]) -> None:
        self.case, self.g, self.second, self.modes = case.id, case.problem.geometry, case.second, dict(modes)
        routes, geometry, order = case.routes, self.g, -1 if case.second else 1
        self.topk_ids: I32 = np.array(routes.topk_ids, np.int32)[:, ::order].copy()
        self.topk_weights: F32 = (
            draw.router_weights(case.id, geometry.top_k)
            if routes.topk_weights is None
            else np.array(routes.topk_weights, np.float32)
        )
        self.rows_per_expert, self.offsets, self.permuted = oracle.route(self.topk_ids, geometry.experts)
        self.active = np.flatnonzero(self.rows_per_expert)

    @functools.cached_property
    def x(self) -> Any:
        """Hidden rows, bf16 [T, H]."""
        return draw.hidden_rows(self.case, self.g.hidden, "hidden, second" if self.second else "hidden")

    @functools.cached_property
    def quantized(self) -> Any:
        """(q, scale) of the hidden rows."""
        return quantize(bf16_to_f32(self.x), self.modes["quant"])

    @functools.cached_property
    def remapped(self) -> Any:
        """(rows, scales) in expert order."""
        q, scale = self.quantized
        return oracle.remap(q, scale, self.permuted)

    @functools.cached_property
    def gate_up(self) -> Any:
        """GEMM1's output, bf16 [V, 2I]."""
        a, a_scale = self.remapped
        w13, scale = self.weight("w13"), self.weight("w13_scale")
        return oracle.grouped_gemm(a, a_scale, self.offsets, w13, scale, self.modes["epilogue"])

    @functools.cached_property
    def activated(self) -> Any:
        """(q, scale) after the activation."""
        return oracle.act_quant(self.gate_up, self.modes["act"], self.modes["quant"])

    @functools.cached_property
    def down(self) -> Any:
        """GEMM2's output, bf16 [V, H]."""
        h, h_scale = self.activated
        w2, scale = self.weight("w2"), self.weight("w2_scale")
        return oracle.grouped_gemm(h, h_scale, self.offsets, w2, scale, self.modes["epilogue"])

    @functools.cache  # noqa: B019  # the cache lives as long as the chain, of which a handful exist
    def weight(self, name: str) -> ExpertRows:
        """One weight tensor: the rows of the active experts."""
        depth, width = (self.g.hidden, 2 * self.g.inter) if "13" in name else (self.g.inter, self.g.hidden)
        if name in ("w13", "w2"):
            rows: Any = draw.expert_codes(self.case, name, self.active, (depth, width))
        elif name.endswith("_scale"):
            rows = draw.expert_scales(self.case, name, self.active, depth, width)
        else:  # bias: of the size of the outputs
            drawn = [draw.generator(self.case, name, int(e)).standard_normal(width, np.float32) for e in self.active]
            rows = np.array(drawn, np.float32).reshape(len(drawn), width)
        return ExpertRows(self.g.experts, self.active, rows)


_UPSTREAM = {"quant": QUANT[0], "epilogue": EPILOGUE[0], "act": ACT[0]}


@functools.lru_cache(maxsize=4)
def _chain(case: Case, modes: tuple[tuple[str, str], ...]) -> Chain:
    return Chain(case, modes)


def chain_of(case: Case) -> Chain:
    """The case's chain; stages of one case share it. Modes that the stage lacks are the accepted path's."""
    own = {n: v for n, v in case.problem.modes if n in _UPSTREAM and not v.startswith("group_trunc")}
    neutral = CaseId(Problem("moe", case.problem.geometry, case.problem.rows, ()), case.id.source, case.id.seed)
    return _chain(Case(neutral, case.routes, case.second), tuple((_UPSTREAM | own).items()))


# ---------------------------------------------------------------- tensors

# name: (dtype, shape in symbols); one table, since a tensor means the same in every stage that has it
_TENSORS: dict[str, tuple[str, str]] = {
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
}


def _sizes(problem: Problem) -> dict[str, int]:
    g, t = problem.geometry, problem.rows
    return {"T": t, "k": g.top_k, "R": t * g.top_k, "H": g.hidden, "I": g.inter, "2I": 2 * g.inter,
            "E": g.experts, "E+1": g.experts + 1}  # fmt: skip


def _spec(problem: Problem, name: str, role: Any) -> Spec:
    dtype, symbols = _TENSORS[name]
    sizes = _sizes(problem)
    shape = tuple(sizes[symbol] for symbol in symbols.split())
    if name == "q_scale" and (group := _group(problem)):
        shape = (problem.rows, problem.geometry.hidden // group)
    return Spec(name, role, shape, dtype)


def _group(problem: Problem) -> int:
    value = dict(problem.modes).get("quant", "")
    return int(value.partition(":")[2]) if value.startswith("group_trunc:") else 0


def _specs(ins: str, weights: str, outs: str) -> Any:
    def specs(problem: Problem) -> tuple[Spec, ...]:
        modes = dict(problem.modes)
        w = [n for n in weights.split() if not n.endswith("_bias") or modes.get("bias") == "on"]
        return (
            *(_spec(problem, n, "in") for n in ins.split()),
            *(_spec(problem, n, "weight") for n in w),
            *(_spec(problem, n, "out") for n in outs.split()),
        )

    return specs


def _draw(names: Mapping[str, Any]) -> Any:
    """An ``inputs`` function from name → how to read it off a chain."""

    def inputs(case: Case) -> Tensors:
        chain = chain_of(case)
        bias = dict(case.problem.modes).get("bias") == "on"
        drawn: Tensors = {n: read(chain) for n, read in names.items() if bias or not n.endswith("_bias")}
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
    sizes = _sizes(problem) | {"R": rows}
    total = 0
    for name in names.split():
        dtype, symbols = _TENSORS[name]
        total += DTYPE_BYTES[dtype] * int(np.prod([sizes[s] for s in symbols.split()]))
    return total


def _work(hot: str, ops_per_row: Any = None) -> Any:
    """Weights of the *distinct* active experts are cold; the rest of the case is hot."""

    def work(problem: Problem, inputs: Tensors) -> Work:
        valid = _valid(inputs)
        cold = sum(t.rows.nbytes for t in inputs.values() if isinstance(t, ExpertRows))
        ops = valid * ops_per_row(problem.geometry) if ops_per_row else 0
        return Work(cold, 0, _bytes(problem, hot, valid), ops)

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
    ids = np.array(case.routes.topk_ids)[:, :: -1 if case.second else 1]
    symbols = _TENSORS[output][1].split()
    if symbols[0] == "R":
        _, _, permuted = oracle.route(ids.astype(np.int32), case.problem.geometry.experts)
        found = np.argwhere(permuted == row)
        if not len(found):
            return "past the valid rows"
        t, j = found[0]
        return f"token {t}, slot {j}, expert {ids[t, j]}"
    if symbols[0] == "T":
        return f"token {row}, experts {' '.join(map(str, ids[row]))}"
    if row >= case.problem.geometry.experts:
        return "end of the last expert"
    owners = np.argwhere(ids == row)
    return f"expert {row}, " + (f"token {owners[0][0]}" if len(owners) else "no token")


def _as_is(problem: Problem, inputs: Tensors, outputs: Outputs) -> Outputs:
    return outputs


def _canonical_route(problem: Problem, inputs: Tensors, outputs: Outputs) -> Outputs:
    """A valid map (a bijection onto [0, V), grouped by the offsets) becomes the canonical one; others stay as they are."""
    ids = np.asarray(inputs["topk_ids"])
    _, offsets, canonical = oracle.route(ids, problem.geometry.experts)
    got = outputs["unpermuted_to_permuted"]
    here = ids >= 0
    rows, experts = got[here], ids[here]
    grouped = (rows >= offsets[experts]) & (rows < offsets[experts + 1])
    if grouped.all() and len(np.unique(rows)) == len(rows) and (got[~here] == -1).all():
        return outputs | {"unpermuted_to_permuted": canonical}
    return outputs


def relabel(inputs: Tensors, slots: NDArray[Any]) -> Tensors:
    """Move the i-th active expert to ``slots[i]`` (ascending, so permutation and outputs stay as they are)."""
    table = next(t for t in inputs.values() if isinstance(t, ExpertRows))
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
        if isinstance(value, ExpertRows):
            moved[name] = ExpertRows(value.total, np.asarray(slots, np.int64), value.rows)
    return moved


# ---------------------------------------------------------------- oracles, from stage tensors


def _quantize(p: Problem, t: Any) -> Outputs:
    q, scale = quantize(bf16_to_f32(t["x"]), p.mode("quant"))
    return {"q": q, "q_scale": scale}


def _route(p: Problem, t: Any) -> Outputs:
    return dict(
        zip(
            ("rows_per_expert", "offsets", "unpermuted_to_permuted"),
            oracle.route(t["topk_ids"], p.geometry.experts),
            strict=True,
        )
    )


def _remap(p: Problem, t: Any) -> Outputs:
    a, scale = oracle.remap(t["q"], t["q_scale"], t["unpermuted_to_permuted"])
    return {"a": a, "a_scale": scale}


def _gemm1(p: Problem, t: Any) -> Outputs:
    bias = t.get("w13_bias")
    return {
        "gate_up": oracle.grouped_gemm(t["a"], t["a_scale"], t["offsets"], t["w13"], t["w13_scale"], p.mode("epilogue"), bias)
    }


def _act_quant(p: Problem, t: Any) -> Outputs:
    valid = int(t["offsets"][-1])
    q, scale = oracle.act_quant(t["gate_up"][:valid], p.mode("act"), p.mode("quant"))
    return {"h": q, "h_scale": scale}


def _gemm2(p: Problem, t: Any) -> Outputs:
    weights = t["w2"], t["w2_scale"]
    return {"y": oracle.grouped_gemm(t["h"], t["h_scale"], t["offsets"], *weights, p.mode("epilogue"), t.get("w2_bias"))}


def _combine(p: Problem, t: Any) -> Outputs:
    return {"out": oracle.combine(t["y"], t["unpermuted_to_permuted"], t["topk_weights"], p.mode("combine_fma"))}


def _layer_weights(t: Any) -> oracle.LayerWeights:
    return oracle.LayerWeights(t["w13"], t["w13_scale"], t["w2"], t["w2_scale"])


def _middle(p: Problem, t: Any) -> Outputs:
    return {"y": oracle.middle(t["a"], t["a_scale"], t["offsets"], _layer_weights(t), **dict(p.modes))}


def _layer(p: Problem, t: Any) -> Outputs:
    return {"out": oracle.layer(t["x"], t["topk_ids"], t["topk_weights"], _layer_weights(t), **dict(p.modes))}


def _check_group(problem: Problem) -> None:
    group = _group(problem)
    if group and problem.geometry.hidden % group:
        raise InputError("--mode", "quant of moe.quantize", f"a group that divides hidden {problem.geometry.hidden}", str(group))


_GEMM_IN = "rows_per_expert offsets unpermuted_to_permuted topk_ids"
_WEIGHTS = "w13 w13_scale w2 w2_scale"

STAGES = (
    Stage(
        name="moe.quantize", modes={"quant": (*QUANT, r"group_trunc:[1-9]\d*")}, check=_check_group,
        specs=_specs("x", "", "q q_scale"), inputs=_draw({"x": lambda c: c.x}), oracle=_quantize,
        work=_work("x q q_scale"), canonical=_as_is, label=_label, relabel=None, probes=("x",),
    ),
    Stage(
        name="moe.route", modes={}, specs=_specs("topk_ids", "", "rows_per_expert offsets unpermuted_to_permuted"),
        inputs=_draw({"topk_ids": lambda c: c.topk_ids}), oracle=_route,
        work=_work("topk_ids rows_per_expert offsets unpermuted_to_permuted"), canonical=_canonical_route, label=_label,
        relabel=None, probes=("topk_ids",),
    ),
    Stage(
        name="moe.remap", modes={}, specs=_specs("q q_scale unpermuted_to_permuted", "", "a a_scale"),
        inputs=_draw({"q": lambda c: c.quantized[0], "q_scale": lambda c: c.quantized[1],
                      "unpermuted_to_permuted": lambda c: c.permuted}),
        oracle=_remap, work=_work("q q_scale unpermuted_to_permuted a a_scale"), canonical=_as_is, label=_label,
        relabel=None, probes=("q", "q_scale", "unpermuted_to_permuted"),
    ),
    Stage(
        name="moe.gemm1", modes={"epilogue": EPILOGUE, "bias": BIAS},
        specs=_specs(f"a a_scale {_GEMM_IN}", "w13 w13_scale w13_bias", "gate_up"),
        inputs=_draw({**_A, **_ROUTED, **_weights("w13", "w13_scale", "w13_bias")}), oracle=_gemm1,
        work=_work("a a_scale offsets gate_up", _ops13), canonical=_as_is, label=_label,
        relabel=relabel, probes=("a", "a_scale", "w13", "w13_scale"),
    ),
    Stage(
        name="moe.act_quant", modes={"act": ACT, "quant": QUANT}, specs=_specs("gate_up offsets", "", "h h_scale"),
        inputs=_draw({"gate_up": lambda c: _pad(c.gate_up, _total(c)), "offsets": lambda c: c.offsets}),
        oracle=_act_quant, work=_work("gate_up h h_scale"), canonical=_as_is, label=_label, relabel=None,
        probes=("gate_up",),
    ),
    Stage(
        name="moe.gemm2", modes={"epilogue": EPILOGUE, "bias": BIAS},
        specs=_specs(f"h h_scale {_GEMM_IN}", "w2 w2_scale w2_bias", "y"),
        inputs=_draw({**_H, **_ROUTED, **_weights("w2", "w2_scale", "w2_bias")}), oracle=_gemm2,
        work=_work("h h_scale offsets y", _ops2), canonical=_as_is, label=_label,
        relabel=relabel, probes=("h", "h_scale", "w2", "w2_scale"),
    ),
    Stage(
        name="moe.combine", modes={"combine_fma": FMA}, specs=_specs("y unpermuted_to_permuted topk_weights", "", "out"),
        inputs=_draw({"y": lambda c: _pad(c.down, _total(c)), "unpermuted_to_permuted": lambda c: c.permuted,
                      "topk_weights": lambda c: c.topk_weights}),
        oracle=_combine, work=_work("y unpermuted_to_permuted topk_weights out"), canonical=_as_is, label=_label,
        relabel=None, probes=("y", "topk_weights", "unpermuted_to_permuted"),
    ),
    Stage(
        name="moe.middle", modes={"epilogue": EPILOGUE, "act": ACT, "quant": QUANT},
        specs=_specs(f"a a_scale {_GEMM_IN}", _WEIGHTS, "y"),
        inputs=_draw({**_A, **_ROUTED, **_weights(*_WEIGHTS.split())}), oracle=_middle,
        work=_work("a a_scale offsets y", lambda g: _ops13(g) + _ops2(g)), canonical=_as_is, label=_label,
        relabel=relabel, probes=("a", "a_scale", "w13", "w13_scale", "w2", "w2_scale"),
    ),
    Stage(
        name="moe.layer", modes={"quant": QUANT, "epilogue": EPILOGUE, "act": ACT, "combine_fma": FMA},
        specs=_specs("x topk_ids topk_weights", _WEIGHTS, "out"),
        inputs=_draw({"x": lambda c: c.x, "topk_ids": lambda c: c.topk_ids, "topk_weights": lambda c: c.topk_weights,
                      **_weights(*_WEIGHTS.split())}),
        oracle=_layer, work=_work("x topk_ids topk_weights out", lambda g: _ops13(g) + _ops2(g)),
        canonical=_as_is, label=_label, relabel=relabel,
        probes=("x", "topk_ids", "topk_weights", "w13", "w13_scale", "w2", "w2_scale"),
    ),
)  # fmt: skip
