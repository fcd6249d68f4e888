"""The arithmetic of the contract, against exact arithmetic and against torch where torch is right."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replay.oracle.arith import bf16_to_f32, exp_cr, fma, rn_bf16, round_half_away, sigmoid, silu, strided32_tree

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


def test_every_nan_of_f32_becomes_the_one_of_bf16() -> None:
    """The NaN with the smallest payload too, which truncation or rounding would make an infinity."""
    nans = np.array([0x7F800001, 0xFF800001, 0x7FBFFFFF, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert (rn_bf16(nans) == 0x7FC0).all()
    assert (rn_bf16(np.array([np.inf, -np.inf], np.float32)) == [0x7F80, 0xFF80]).all()


def test_round_half_away_at_the_trap() -> None:
    """trunc(|y| + 0.5) in f32 would give 1 for 0.49999997."""
    x = np.array([0.49999997, 0.5, -0.5, 1.5, 2.5, -2.5, 8388609.0], np.float32)
    assert round_half_away(x).tolist() == [0, 1, -1, 2, 3, -3, 8388609]
    assert round_half_away(x).dtype == np.float32
    assert np.signbit(round_half_away(np.array([-0.25, -0.0], np.float32))).all()


@given(small, small, small)
def test_fma_is_one_rounding(a: float, b: float, c: float) -> None:
    """Against exact rational arithmetic, double rounding and all."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    got = Fraction(float(fma(*as_f32(a, b, c))[0]))
    step = Fraction(float(np.spacing(np.float32(abs(float(got))))))
    assert abs(got - exact) * 2 <= step


def test_fma_where_two_roundings_go_wrong() -> None:
    """a·b is a tie of f32, or one step of f64 away from it, and c says on which side: the f64 sum alone would not."""
    rng = np.random.Generator(np.random.Philox(key=9))
    i, j = (2 * rng.integers(0, 1 << 10, 4000) + 1 for _ in range(2))
    sign = np.where(rng.random(4000) < 0.5, -1, 1)
    a, b = ((1 + i * 2.0**-12) * sign).astype(np.float32), (1 + j * 2.0**-12).astype(np.float32)
    beside = np.float64(2) ** -rng.integers(54, 100, 4000)
    step = np.float64(2) ** -52 * (1 + np.where(rng.random(4000) < 0.5, -1, 1) * 2.0**-20)
    for c in (beside, -beside, step, -step):
        got = fma(a, b, c.astype(np.float32))
        assert got.dtype == np.float32
        for x, y, z, found in zip(a.tolist(), b.tolist(), c.astype(np.float32).tolist(), got.tolist(), strict=True):
            exact = Fraction(x) * Fraction(y) + Fraction(z)
            half = Fraction(float(np.spacing(np.float32(abs(found))))) / 2
            assert abs(Fraction(found) - exact) < half, (x, y, z)


@pytest.mark.parametrize("sign", [1, -1])
def test_fma_of_a_small_product(sign: int) -> None:
    """The product lies 2^-70 below half a step of c, so the sum is c: the f64 sum is a tie, which half of all c lose."""
    a, b = np.float32(2.0**-24 * (1 + 2.0**-23)), np.float32(1 - 2.0**-23)
    c = (1 + np.arange(64) * 2.0**-23).astype(np.float32) * np.float32(sign)
    assert (fma(np.full(64, a * np.float32(sign)), np.full(64, b), c) == c).all()


def test_fma_of_what_is_not_finite() -> None:
    """Infinities and NaN as IEEE-754 has them, and an overflow."""
    a, b, c = as_f32(np.inf)[0], np.array([2, 0, 2], np.float32), np.array([1, 1, -np.inf], np.float32)
    out = fma(np.repeat(a, 3), b, c)
    assert out[0] == np.inf
    assert np.isnan(out[1:]).all()
    assert fma(*as_f32(3e38, 2.0, 0.0))[0] == np.inf


def test_a_sum_over_k_has_its_order() -> None:
    """strided32_tree, written out: every depth up to 100, on terms that cancel, so that another order shows."""
    rng = np.random.Generator(np.random.Philox(key=11))
    for depth in range(1, 101):
        terms = (rng.standard_normal((8, depth)) * 10.0 ** rng.integers(-4, 5, (8, depth))).astype(np.float32)
        got = strided32_tree(terms)
        assert got.dtype == np.float32
        for row, found in zip(terms, got, strict=True):
            lanes = [np.float32(0)] * 32
            for k, term in enumerate(row):
                lanes[k % 32] = lanes[k % 32] + term
            for half in (16, 8, 4, 2, 1):
                lanes = [lanes[lane] + lanes[lane + half] for lane in range(half)]
            assert found == lanes[0], depth


def test_sigmoid_is_f32_but_for_its_exp() -> None:
    """Each step rounded, against the formula in scalars."""
    x = np.linspace(-100, 100, 5001).astype(np.float32)
    got = sigmoid(x)
    assert got.dtype == np.float32
    with np.errstate(over="ignore"):
        want = [np.float32(1) / (np.float32(1) + np.float32(np.exp(-np.float64(v)))) for v in x]
    assert got.tolist() == [float(v) for v in want]


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
