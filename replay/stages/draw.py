"""Synthetic tensors from numpy's Philox, keyed by what they belong to.

A token's hidden row depends on seed, layer and its row in the capture; an expert's weights on seed, layer and expert.
So the same token or expert has the same values in every case and window. Distributions: hidden rows N(0, 1) in bf16;
weights uniform over all 256 codes of int8; weight scales u/(74·√K) with u uniform in [0.5, 1.5), which keeps outputs
near unit size (74 is the standard deviation of the codes); router weights, where a capture has none, the normalised
descending exponentials of N(0, 1).
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from replay.model import CaseId
from replay.oracle.arith import F32, I8, U16, rn_bf16

NAME = "philox-1"


def generator(case: CaseId, *what: object) -> np.random.Generator:
    """The stream that belongs to ``what`` in this case's seed and layer."""
    text = "/".join(map(str, (NAME, case.seed, case.source.layer, *what)))
    key = np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def hidden_rows(case: CaseId, width: int, what: str = "hidden") -> U16:
    """bf16 [rows, width]."""
    rows = [generator(case, what, case.source.start + t).standard_normal(width, np.float32) for t in range(case.source.rows)]
    return rn_bf16(np.stack(rows))


def router_weights(case: CaseId, top_k: int) -> F32:
    """f32 [rows, k], descending and summing to 1."""
    rows = []
    for t in range(case.source.rows):
        logits = np.sort(generator(case, "router", case.source.start + t).standard_normal(top_k))[::-1]
        p = np.exp(logits)
        rows.append((p / p.sum()).astype(np.float32))
    return np.stack(rows)


def expert_codes(case: CaseId, name: str, experts: NDArray[np.int64], shape: tuple[int, int]) -> I8:
    """s8 [len(experts), K, N]."""
    codes = np.empty((len(experts), *shape), np.int8)
    for i, e in enumerate(experts):
        codes[i] = np.frombuffer(generator(case, name, int(e)).bytes(shape[0] * shape[1]), np.int8).reshape(shape)
    return codes


def expert_scales(case: CaseId, name: str, experts: NDArray[np.int64], depth: int, width: int) -> F32:
    """f32 [len(experts), N] for weights of depth K."""
    base = np.float32(1 / (74 * depth**0.5))
    scales = np.empty((len(experts), width), np.float32)
    for i, e in enumerate(experts):
        scales[i] = (generator(case, name, int(e)).random(width, np.float32) + np.float32(0.5)) * base
    return scales
