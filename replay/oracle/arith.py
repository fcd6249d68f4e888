"""Scalar arithmetic to the bit: bf16, correctly rounded exp, roundings, a true fma.

bf16 travels as uint16 bit patterns, since numpy has no such dtype. f32 results are IEEE round-to-nearest-even because
numpy rounds every operation on its own and never contracts.
"""

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U16 = NDArray[np.uint16]
I8 = NDArray[np.int8]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


def rn_bf16(x: F32) -> U16:
    """f32 → bf16 bits, round to nearest even; every NaN becomes 0x7fc0."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((u + (0x7FFF + ((u >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where((u & 0x7FFFFFFF) > 0x7F800000, np.uint16(0x7FC0), rounded)


def bf16_to_f32(x: U16) -> F32:
    """bf16 bits → f32, exact."""
    return (x.astype(np.uint32) << 16).view(np.float32)


def exp_cr(x: F32) -> F32:
    """exp evaluated in f64 and rounded once to f32 (semantics: ``exp_cr``)."""
    with np.errstate(over="ignore", under="ignore"):
        result: F32 = np.exp(x.astype(np.float64)).astype(np.float32)
    return result


def log_cr(x: F32) -> F32:
    """log evaluated in f64 and rounded once to f32."""
    with np.errstate(divide="ignore", invalid="ignore"):
        result: F32 = np.log(x.astype(np.float64)).astype(np.float32)
    return result


def log1p_cr(x: F32) -> F32:
    """log(1 + x) evaluated in f64 and rounded once to f32."""
    with np.errstate(divide="ignore", invalid="ignore"):
        result: F32 = np.log1p(x.astype(np.float64)).astype(np.float32)
    return result


def silu(g: F32) -> F32:
    """g / (1 + exp_cr(−g)), every step but exp in f32."""
    with np.errstate(over="ignore", invalid="ignore"):
        return g / (np.float32(1) + exp_cr(-g))


def sigmoid(x: F32) -> F32:
    """1 / (1 + exp_cr(−x)), every step but exp in f32."""
    with np.errstate(over="ignore"):
        return np.float32(1) / (np.float32(1) + exp_cr(-x))


def strided32_tree(terms: F32) -> F32:
    """Sum f32 [R, K] over K in the contract's order → [R].

    Lane l of 32 adds k = l, l+32, … ascending from +0.0; then lanes fold by 16, 8, 4, 2, 1. Padding K with +0.0 changes
    no lane, since a lane that began at +0.0 is never −0.0.
    """
    rows, depth = terms.shape
    padded = np.pad(terms, ((0, 0), (0, -depth % 32)))
    lanes = np.zeros((rows, 32), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, depth, 32):
            lanes = lanes + padded[:, first : first + 32]
        for half in (16, 8, 4, 2, 1):
            lanes = lanes[:, :half] + lanes[:, half:]
    return lanes.ravel()


def round_half_away(x: F32) -> F32:
    """C ``roundf``: ties away from zero. The +0.5 is made in f64, where it is exact for every f32."""
    wide = x.astype(np.float64)
    return np.copysign(np.trunc(np.abs(wide) + 0.5), wide).astype(np.float32)


def fma(a: F32, b: F32, c: F32) -> F32:
    """a·b + c rounded once to f32.

    The f64 product of two f32 is exact. The f64 sum is then rounded *to odd* (TwoSum gives its error), after which
    rounding to f32 is correct because f64 has more than 2·24 + 2 bits (Boldo and Melquiond, 2008).
    """
    with np.errstate(all="ignore"):
        product = a.astype(np.float64) * b
        total = product + c
        back = total - product
        error = (product - (total - back)) + (c - back)
        even = (total.view(np.int64) & 1) == 0
        towards = np.where(error > 0, np.inf, -np.inf)
        nudge = np.isfinite(total) & (error != 0) & even
        odd = np.where(nudge, np.nextafter(total, towards), total)
        result: F32 = odd.astype(np.float32)
    return result
