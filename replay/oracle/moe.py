"""The MoE stages, W8A8 int8, per token row on one rank (semantics: MoE). bf16 tensors are uint16 bit patterns."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.oracle.arith import F32, I8, I32, I64, U16, bf16_to_f32, fma, rn_bf16, sigmoid, silu, strided32_tree
from replay.oracle.quant import quantize


@dataclass(frozen=True)
class ExpertRows:
    """A per-expert table of which only some rows matter: ``rows[i]`` belongs to expert ``experts[i]`` (ascending)."""

    total: int
    experts: I64
    rows: NDArray[Any]

    def __getitem__(self, expert: int | np.integer[Any]) -> NDArray[Any]:
        at = int(np.searchsorted(self.experts, expert))
        if at == len(self.experts) or self.experts[at] != expert:
            raise KeyError(f"expert {expert} has no row here")
        row: NDArray[Any] = self.rows[at]
        return row


def route(topk_ids: I32, experts: int, expert_map: I32 | None = None) -> tuple[I32, I64, I32]:
    """ids [T, k] → (rows_per_expert int32 [E], offsets int64 [E+1], unpermuted_to_permuted int32 [T, k]).

    Canonical order inside an expert is by (t, j); −1 stays −1. Under ``expert_map`` e is the local id.
    """
    ids = topk_ids if expert_map is None else np.where(topk_ids >= 0, expert_map[topk_ids], -1)
    flat = ids.ravel()
    valid = flat >= 0
    rows_per_expert = np.bincount(flat[valid], minlength=experts).astype(np.int32)
    offsets = np.concatenate(([0], np.cumsum(rows_per_expert, dtype=np.int64)))
    order = np.argsort(np.where(valid, flat, experts), kind="stable")
    permuted = np.full(flat.shape, -1, np.int32)
    count = int(offsets[-1])
    permuted[order[:count]] = np.arange(count, dtype=np.int32)
    return rows_per_expert, offsets, permuted.reshape(ids.shape)


def remap(q: I8, scale: F32, unpermuted_to_permuted: I32) -> tuple[I8, F32]:
    """Rows [T, H] and scales [T] → the valid permuted rows [V, H] and their scales [V]."""
    tokens, k = unpermuted_to_permuted.shape
    flat = unpermuted_to_permuted.ravel()
    valid = flat >= 0
    token = np.empty(int(valid.sum()), np.int64)
    token[flat[valid]] = np.repeat(np.arange(tokens), k)[valid]
    return q[token], scale[token]


_EXACT_F32_CHUNK = 1024  # 1024 products of two int8 stay within 2^24, where f32 sums are exact in any order


def int8_matmul(a: I8, b: I8) -> I32:
    """Exact s32 a [M, K] @ b [K, N], through f32 BLAS on chunks of K small enough to be exact."""
    total = np.zeros((a.shape[0], b.shape[1]), np.int32)
    for start in range(0, a.shape[1], _EXACT_F32_CHUNK):
        part = slice(start, start + _EXACT_F32_CHUNK)
        total = total + (a[:, part] @ b[part].astype(np.float32)).astype(np.int32)
    return total


def epilogue(acc: I32, a_scale: F32, b_scale: F32, mode: str, bias: F32 | None = None) -> U16:
    """acc [M, N], a_scale [M], b_scale [N] → bf16 [M, N]; int32→f32 rounds to nearest even."""
    y = acc.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        if mode == "row_then_col":
            y = (y * a_scale[:, None]) * b_scale[None, :]
        elif mode == "scales_first":
            y = y * (a_scale[:, None] * b_scale[None, :])
        else:
            raise ValueError(f"epilogue mode {mode!r}")
        if bias is not None:
            y = y + bias[None, :]
    return rn_bf16(y)


def grouped_gemm(
    a: I8, a_scale: F32, offsets: I64, weight: ExpertRows, weight_scale: ExpertRows, mode: str, bias: ExpertRows | None = None
) -> U16:
    """Permuted rows [≥V, K] → bf16 [V, N]; rows offsets[e]…offsets[e+1] meet weight[e] s8 [K, N]."""
    rows = int(offsets[-1])
    out = np.empty((rows, weight.rows.shape[2]), np.uint16)
    for e in np.flatnonzero(np.diff(offsets)):
        part = slice(int(offsets[e]), int(offsets[e + 1]))
        acc = int8_matmul(a[part], weight[e])
        out[part] = epilogue(acc, a_scale[part], weight_scale[e], mode, None if bias is None else bias[e])
    return out


def activate(gate_up: U16, act: str) -> F32:
    """bf16 [R, 2I] (gate | up) → silu(gate)·up, f32 [R, I], rounded to bf16 in between as the mode says."""
    inter = gate_up.shape[1] // 2
    gate, up = bf16_to_f32(gate_up[:, :inter]), bf16_to_f32(gate_up[:, inter:])
    s = silu(gate)
    with np.errstate(over="ignore", invalid="ignore"):
        if act == "silu_round_twice":
            return bf16_to_f32(rn_bf16(bf16_to_f32(rn_bf16(s)) * up))
        if act == "silu_round_once":
            return bf16_to_f32(rn_bf16(s * up))
        if act == "silu_f32":
            return s * up
    raise ValueError(f"activation mode {act!r}")


def act_quant(gate_up: U16, act: str, quant: str) -> tuple[I8, F32]:
    """bf16 [R, 2I] (gate | up) → (q int8 [R, I], scale f32 [R])."""
    return quantize(activate(gate_up, act), quant)


def combine(y: U16, unpermuted_to_permuted: I32, topk_weights: F32, mode: str) -> U16:
    """Permuted rows bf16 [≥V, H] → bf16 [T, H]: the weighted sum over slots in slot order, −1 skipped."""
    tokens, k = unpermuted_to_permuted.shape
    total = np.zeros((tokens, y.shape[1]), np.float32)
    for j in range(k):
        row = unpermuted_to_permuted[:, j]
        here = np.flatnonzero(row >= 0)
        value, weight = bf16_to_f32(y[row[here]]), topk_weights[here, j, None]
        with np.errstate(over="ignore", invalid="ignore"):
            if mode == "off":
                total[here] = total[here] + value * weight
            elif mode == "chain":
                total[here] = fma(value, np.broadcast_to(weight, value.shape), total[here])
            else:
                raise ValueError(f"combine_fma mode {mode!r}")
    return rn_bf16(total)


@dataclass(frozen=True)
class LayerWeights:
    """One rank's expert weights: w13 s8 [E, H, 2I], w2 s8 [E, I, H], their f32 scales [E, N]."""

    w13: ExpertRows
    w13_scale: ExpertRows
    w2: ExpertRows
    w2_scale: ExpertRows


def middle(a: I8, a_scale: F32, offsets: I64, w: LayerWeights, *, epilogue: str, act: str, quant: str) -> U16:
    """gemm1, act_quant, gemm2 over permuted rows → bf16 [V, H]."""
    h = grouped_gemm(a, a_scale, offsets, w.w13, w.w13_scale, epilogue)
    q, scale = act_quant(h, act, quant)
    return grouped_gemm(q, scale, offsets, w.w2, w.w2_scale, epilogue)


def shared(x: U16, routed: U16, w_gate: U16, w: LayerWeights, *, epilogue: str, act: str, quant: str) -> U16:
    """The shared expert's output, gated by a sigmoid, added to the routed output: bf16 [T, H] (step 6).

    ``w`` holds one expert, which every token goes through; ``w_gate`` bf16 [H].
    """
    rows = np.array([0, len(x)], np.int64)
    q, scale = quantize(bf16_to_f32(x), quant)
    y = bf16_to_f32(middle(q, scale, rows, w, epilogue=epilogue, act=act, quant=quant))
    z = rn_bf16(strided32_tree(bf16_to_f32(x) * bf16_to_f32(w_gate)[None, :]))
    s = bf16_to_f32(rn_bf16(sigmoid(bf16_to_f32(z))))
    with np.errstate(over="ignore", invalid="ignore"):
        p = bf16_to_f32(rn_bf16(s[:, None] * y))
        return rn_bf16(bf16_to_f32(routed) + p)


def layer(
    x: U16, topk_ids: I32, topk_weights: F32, w: LayerWeights, *, quant: str, epilogue: str, act: str, combine_fma: str
) -> U16:
    """Hidden rows bf16 [T, H] → bf16 [T, H]: quantise, route, remap, middle, combine."""
    q, scale = quantize(bf16_to_f32(x), quant)
    _, offsets, permuted = route(topk_ids, w.w13.total)
    rows, row_scale = remap(q, scale, permuted)
    y = middle(rows, row_scale, offsets, w, epilogue=epilogue, act=act, quant=quant)
    return combine(y, permuted, topk_weights, combine_fma)
