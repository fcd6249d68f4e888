"""Per-row int8 quantisation, all modes (semantics: MoE, step 2)."""

from typing import Any

import numpy as np

from replay.oracle.arith import F32, I8, round_half_away

EPS = np.float32(1e-10)
LIMIT = np.float32(127)


def quantize(x: F32, mode: str) -> tuple[I8, F32]:
    """Quantise rows of f32 [R, H] → (q int8 [R, H], scale f32 [R], or [R, H/G] for ``group_trunc:G``).

    A row (or group) with NaN or inf gets that NaN or inf as its scale and 0 for all its q.
    """
    name, _, group = mode.partition(":")
    if name == "group_trunc":
        rows, width = x.shape
        groups = width // int(group)
        q, scale = _rows(x.reshape(rows * groups, int(group)), name)
        return q.reshape(rows, width), scale.reshape(rows, groups)
    return _rows(x, name)


def _rows(x: F32, mode: str) -> tuple[I8, F32]:
    with np.errstate(all="ignore"):
        absmax: F32 = np.max(np.abs(x), axis=1)  # NaN wins, as it must: a row with both NaN and inf has scale NaN
        m: F32 = absmax if mode == "rmsnorm_int8" else np.maximum(absmax, EPS)
        scale: F32 = m / LIMIT
        if mode == "rmsnorm_int8":
            scale = np.where(m > 0, scale, np.float32(1))
        scale = np.where(np.isfinite(absmax), scale, absmax)
        q = _codes(x, m[:, None], scale[:, None], mode)
    # NaN quantises to 0: what came of a NaN, inf·0 of a row with an inf, 0·inf where 1/s overflows on a denormal row.
    return np.where(np.isnan(q), 0, q).astype(np.int8), scale


def _codes(x: F32, m: F32, scale: F32, mode: str) -> Any:
    if mode == "recip_half_away":
        return np.clip(round_half_away(x * (LIMIT / m)), -LIMIT, LIMIT)
    if mode == "recip_half_even":
        return np.clip(np.rint(x * (LIMIT / m)), -LIMIT, LIMIT)
    if mode == "div_half_even":
        return np.clip(np.rint(x / scale), -LIMIT, LIMIT)
    if mode == "rmsnorm_int8":
        return np.clip(np.rint(x * (np.float32(1) / scale)), np.float32(-128), LIMIT)
    if mode == "group_trunc":
        return np.trunc(np.clip(x / scale, np.float32(-128), LIMIT))
    raise ValueError(f"quantisation mode {mode!r}")
