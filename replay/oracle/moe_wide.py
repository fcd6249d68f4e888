"""The MoE stages without quantisation: bf16 rows and weights, sums in f64, a rounding to bf16 where a stage ends.

f64 sums of a few thousand products of bf16 are as good as exact beside a step of bf16; whoever sums in f32 is held to a budget.
"""

import numpy as np

from replay.oracle import moe
from replay.oracle.arith import F32, F64, I32, I64, U16, bf16_to_f32, rn_bf16
from replay.oracle.moe import ExpertRows

_DROPPED = 52 - 7  # bits of a mantissa that f64 has and bf16 has not


def rn_bf16_of_f64(x: F64) -> U16:
    """f64 → bf16 bits, rounded once to nearest even; what is below the normal numbers of f32 may round twice."""
    bits = np.ascontiguousarray(x, np.float64).view(np.uint64)
    half = np.uint64((1 << (_DROPPED - 1)) - 1)
    rounded = bits + half + ((bits >> np.uint64(_DROPPED)) & np.uint64(1))
    kept = (rounded >> np.uint64(_DROPPED)) << np.uint64(_DROPPED)
    with np.errstate(over="ignore"):
        return rn_bf16(np.where(np.isfinite(x), kept.view(np.float64), x).astype(np.float32))


def grouped_gemm(a: U16, offsets: I64, weight: ExpertRows, bias: ExpertRows | None = None) -> U16:
    """Permuted rows bf16 [≥V, K] → bf16 [V, N]; rows offsets[e]…offsets[e+1] meet weight[e] bf16 [K, N]."""
    out = np.empty((int(offsets[-1]), weight.rows.shape[2]), np.uint16)
    for e in np.flatnonzero(np.diff(offsets)):
        part = slice(int(offsets[e]), int(offsets[e + 1]))
        with np.errstate(over="ignore", invalid="ignore"):
            y = bf16_to_f32(a[part]).astype(np.float64) @ bf16_to_f32(weight[e]).astype(np.float64)
            out[part] = rn_bf16_of_f64(y if bias is None else y + bias[e][None, :])
    return out


def activate(gate_up: U16, act: str) -> U16:
    """bf16 [R, 2I] (gate | up) → bf16 [R, I]: what is quantised elsewhere is kept in bf16."""
    return rn_bf16(moe.activate(gate_up, act))


def middle(a: U16, offsets: I64, w13: ExpertRows, w2: ExpertRows, act: str) -> U16:
    """gemm1, activation, gemm2 over permuted rows → bf16 [V, H]."""
    return grouped_gemm(activate(grouped_gemm(a, offsets, w13), act), offsets, w2)


def remap(x: U16, permuted: I32) -> U16:
    """Rows [T, H] → the valid permuted rows [V, H]."""
    rows, _ = moe.remap(x.view(np.int16), np.zeros(len(x), np.float32), permuted)
    return rows.view(np.uint16)


def layer(x: U16, ids: I32, weights: F32, w13: ExpertRows, w2: ExpertRows, *, act: str, combine_fma: str) -> U16:
    """Hidden rows bf16 [T, H] → bf16 [T, H]: route, remap, middle, combine."""
    _, offsets, permuted = moe.route(ids, w13.total)
    return moe.combine(middle(remap(x, permuted), offsets, w13, w2, act), permuted, weights, combine_fma)
