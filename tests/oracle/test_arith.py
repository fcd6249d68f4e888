"""The arithmetic of the contract, against exact arithmetic and against torch where torch is right."""

import math
from fractions import Fraction

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from replay.oracle.arith import bf16_to_f32, exp_cr, fma, rn_bf16, round_half_away, silu

f32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
small = st.floats(min_value=-(2.0**30), max_value=2.0**30, width=32, allow_subnormal=True)


def as_f32(*values: float) -> list[np.ndarray]:
    """One-element f32 arrays."""
    return [np.array([v], np.float32) for v in values]


@given(f32)
def test_bf16_rounds_as_torch_does(x: float) -> None:
    """Round to nearest even, overflow to infinity."""
    want = torch.tensor([x]).bfloat16().view(torch.uint16).numpy()
    assert rn_bf16(np.array([x], np.float32)) == want


def test_bf16_round_trip_of_every_pattern() -> None:
    """All 65,536 patterns come back, NaNs as the one NaN."""
    every = np.arange(65536, dtype=np.uint16)
    back = rn_bf16(bf16_to_f32(every))
    nan = (every & 0x7FFF) > 0x7F80
    assert (back[~nan] == every[~nan]).all()
    assert (back[nan] == 0x7FC0).all()


def test_round_half_away_at_the_trap() -> None:
    """trunc(|y| + 0.5) in f32 would give 1 for 0.49999997."""
    x = np.array([0.49999997, 0.5, -0.5, 1.5, 2.5, -2.5, 8388609.0], np.float32)
    assert round_half_away(x).tolist() == [0, 1, -1, 2, 3, -3, 8388609]


@given(small, small, small)
def test_fma_is_one_rounding(a: float, b: float, c: float) -> None:
    """Against exact rational arithmetic, double rounding and all."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    got = Fraction(float(fma(*as_f32(a, b, c))[0]))
    step = Fraction(float(np.spacing(np.float32(abs(float(got))))))
    assert abs(got - exact) * 2 <= step


def test_fma_where_two_roundings_go_wrong() -> None:
    """The f64 sum is a tie of f32 that the lost bit decides."""
    a, b, c = as_f32(1 + 2**-12, 1 + 2**-12, 2**-50)
    exact = (1 + 2**-12) ** 2  # 1 + 2^-11 + 2^-24: a tie between two f32, and 2^-50 above it rounds up
    assert float((a * b + c)[0]) < exact
    assert float(fma(a, b, c)[0]) > exact


def test_exp_is_f64_rounded_once() -> None:
    """Correct to the last bit against math.exp, overflow and underflow included."""
    x = np.linspace(-110, 95, 20001).astype(np.float32)
    with np.errstate(over="ignore"):
        want = np.array([math.exp(v) for v in x.tolist()]).astype(np.float32)
    assert (exp_cr(x) == want).all()


def test_silu_of_the_extremes() -> None:
    """Far out silu is the identity or zero; at −inf it is NaN, as its formula says."""
    out = silu(np.array([0.0, 200.0, -200.0, np.inf, -np.inf], np.float32))
    assert out[:4].tolist() == [0.0, 200.0, 0.0, np.inf]
    assert np.isnan(out[4])
