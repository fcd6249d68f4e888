"""The f64 oracle of a MoE without quantisation."""

from fractions import Fraction

import numpy as np

from replay.oracle.arith import bf16_to_f32, rn_bf16
from replay.oracle.moe import ExpertRows
from replay.oracle.moe_wide import grouped_gemm, layer, rn_bf16_of_f64


def nearest(x: float) -> int:
    """The bits of the bf16 nearest to a number, of two equally near the even one; by exact fractions."""
    guess = int(rn_bf16(np.array([x], np.float32))[0])
    near = [bits for bits in (guess - 1, guess, guess + 1) if 0 <= bits < 0x10000]
    values = bf16_to_f32(np.array(near, np.uint16)).tolist()
    return min(zip(near, values, strict=True), key=lambda pair: (abs(Fraction(pair[1]) - Fraction(x)), pair[0] & 1))[0]


def test_a_number_of_f64_is_rounded_once() -> None:
    """Also where a detour through f32 would round to a tie first."""
    rng = np.random.default_rng(0)
    ties = 1 + 2.0**-8 + np.array([2.0**-40, -(2.0**-40), 0])
    numbers = np.concatenate([rng.standard_normal(500), ties, -ties, [0.0, 2.0**127, 1e-30]])
    assert rn_bf16_of_f64(numbers).tolist() == [nearest(x) for x in numbers.tolist()]


def test_infinities_and_nan_stay() -> None:
    """They are what they were."""
    found = bf16_to_f32(rn_bf16_of_f64(np.array([np.inf, -np.inf, np.nan])))
    assert found[:2].tolist() == [np.inf, -np.inf]
    assert np.isnan(found[2])


def test_one_token_and_one_expert_by_hand() -> None:
    """x = 1, w13 = (1, 2), w2 = 4: silu(1)·2, rounded twice, times four, weighted with a half."""
    bits = lambda *x: rn_bf16(np.array(x, np.float32))  # noqa: E731  # a word for what it is
    table = lambda *x: ExpertRows(1, np.array([0]), bits(*x).reshape(1, 1, -1))  # noqa: E731
    assert grouped_gemm(bits(1).reshape(1, 1), np.array([0, 1]), table(1, 2)).tolist() == [bits(1, 2).tolist()]
    ids, weights = np.zeros((1, 1), np.int32), np.full((1, 1), 0.5, np.float32)
    out = layer(bits(1).reshape(1, 1), ids, weights, table(1, 2), table(4), act="silu_round_twice", combine_fma="off")
    silu = bf16_to_f32(bits(1 / (1 + np.exp(-1.0))))[0]
    assert bf16_to_f32(out)[0, 0] == silu * 2 * 4 * 0.5
