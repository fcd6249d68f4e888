"""Distances in units in the last place, scaled where a reduction cancels (semantics: WITHIN_ULP)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.oracle.arith import bf16_to_f32

# Bits of a significand behind the point, and the least exponent of a normal number.
_FORMATS = {"bf16": (7, -126), "f16": (10, -14), "f32": (23, -126)}


def ulp(value: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    """The distance of representable numbers at |value|, those of the denormals included; f64 of the same shape."""
    digits, least = _FORMATS[dtype]
    _, exponent = np.frexp(np.abs(value))
    exponent = np.where(value == 0, least, np.maximum(exponent - 1, least))
    steps: NDArray[np.float64] = np.exp2(exponent.astype(np.float64) - digits)
    return steps


def scaled_ulp(want: NDArray[Any], got: NDArray[Any], dtype: str, scale: NDArray[Any] | float = 0.0) -> NDArray[np.float64]:
    """|got − want| / ulp(max(|want|, row scale)) of every element; arrays as outputs hold them, ``scale`` broadcasts to them.

    A NaN where a NaN should be is no distance, and neither is an infinity of the right sign; otherwise what is not finite
    is infinitely far away.
    """
    a, b = (bf16_to_f32(v) if dtype == "bf16" else v for v in (want, got))
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        distance = np.abs(b - a) / ulp(np.where(np.isfinite(a), np.maximum(np.abs(a), scale), 1.0), dtype)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, np.where(np.isfinite(a) & np.isfinite(b), distance, np.inf))
