"""The recurrence in f64, to measure by how far a chain of steps drifts. No kernel is held to its bits.

Gates and normed q and k are those that the contract rounds to f32: what is measured is what the state gathers, step by step.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from replay.oracle.arith import F32

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Step:
    """One token of N sequences: the state behind it [N, Hv, V, K], out = Σ_K S'·q [N, Hv, V], and max_K |S'·q|, which is what
    an error of ``out`` is measured by."""

    state: F64
    out: F64
    terms: F64


def step(state: F64, q: F32, k: F32, v: F32, g: F32, beta: F32) -> Step:
    """state [N, Hv, V, K], q and k [N, Hv, K], v [N, Hv, V], g and beta [N, Hv] → the step behind them."""
    q64, k64 = q.astype(np.float64), k.astype(np.float64)
    decayed = state * g.astype(np.float64)[:, :, None, None]
    d = (v - np.einsum("nhvk,nhk->nhv", decayed, k64)) * beta[:, :, None]
    after = decayed + d[:, :, :, None] * k64[:, :, None, :]
    terms = after * q64[:, :, None, :]
    return Step(after, terms.sum(axis=3), np.abs(terms).max(axis=3))
