"""A router's choice (docs/topk.md has its contract): softmax over experts, the k largest, their weights."""

import numpy as np
from numpy.typing import NDArray

from replay.oracle.arith import F32, I32, exp_cr, strided32_tree

NONE = -1


def softmax(x: F32) -> F32:
    """[T, E] → exp_cr(x − max)·(1/Σ), Σ in ``strided32_tree``; a row with a NaN or +inf is NaN throughout."""
    with np.errstate(invalid="ignore", over="ignore"):
        e = exp_cr(x - x.max(axis=1, keepdims=True))
        return e * (np.float32(1) / strided32_tree(e))[:, None]


def route(x: F32, bias: F32 | None, padding: NDArray[np.bool_] | None, k: int, *, renormalize: bool) -> tuple[F32, I32]:
    """Logits [T, E] → (weights f32 [T, k], ids int32 [T, k]), the largest first.

    Chosen by p + bias, of equals the lower id, a NaN last; weighted by p alone, over their sum in that order where
    renormalised. A padded row has ids −1 and weights 0.
    """
    p = softmax(x)
    score = p if bias is None else p + bias[None, :]
    columns = np.broadcast_to(np.arange(score.shape[1]), score.shape)
    ids = np.lexsort((columns, -score, np.isnan(score)), axis=1)[:, :k].astype(np.int32)
    weights = np.take_along_axis(p, ids.astype(np.int64), 1)
    if renormalize:
        total = np.zeros(len(x), np.float32)
        for j in range(k):
            total = total + weights[:, j]
        with np.errstate(invalid="ignore", divide="ignore"):
            weights = weights / total[:, None]
    if padding is not None:
        weights, ids = np.where(padding[:, None], np.float32(0), weights), np.where(padding[:, None], NONE, ids)
    return weights, ids
