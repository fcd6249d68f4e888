"""The GDN oracle against sums written out by hand, and against f64."""

import math

import numpy as np
import pytest

from replay.oracle import gdn
from replay.oracle.arith import bf16_to_f32, rn_bf16

HEADS = gdn.Heads(1, 2, 64, 64)
RNG = np.random.default_rng(3)


def bf16(*shape: int) -> np.ndarray:
    """Drawn bf16 bits."""
    return rn_bf16(RNG.standard_normal(shape).astype(np.float32))


def step_by_hand(s: list[float], q: list[float], k: list[float], v: float, g: float, beta: float) -> tuple[list[float], float]:
    """One row of one head in Python's own f64, from the formula."""
    decayed = [x * g for x in s]
    d = (v - math.fsum(x * y for x, y in zip(decayed, k, strict=True))) * beta
    after = [x + d * y for x, y in zip(decayed, k, strict=True)]
    return after, math.fsum(x * y for x, y in zip(after, q, strict=True))


def test_the_recurrence_is_the_formula() -> None:
    """Every row of both heads, within f32's rounding of what the formula gives in f64."""
    qkv, a, b = bf16(1, 256), bf16(1, 2), bf16(1, 2)
    a_log, dt_bias = np.array([0.5, 1.5], np.float32), np.array([-3, 1], np.float32)
    state = RNG.standard_normal((3, 2, 64, 64)).astype(np.float32)
    slots, starts, left = np.array([2], np.int32), np.array([0, 1], np.int32), np.zeros((1, 2, 64), np.uint16)
    out, after = gdn.recurrent(qkv, a, b, a_log, dt_bias, state, slots, starts, left, HEADS, gdn.Modes())
    assert np.array_equal(after[:2], state[:2])
    raw = bf16_to_f32(qkv)[0].astype(float)
    q, k = (x / math.sqrt(math.fsum(x * x) + 1e-6) for x in (raw[:64], raw[64:128]))
    for h in range(2):
        spread = math.log1p(math.exp(float(bf16_to_f32(a)[0, h]) + float(dt_bias[h])))
        g = math.exp(-math.exp(float(a_log[h])) * spread)
        beta = 1 / (1 + math.exp(-float(bf16_to_f32(b)[0, h])))
        for row in range(64):
            s, o = step_by_hand(state[2, h, row].tolist(), (q / 8).tolist(), k.tolist(), raw[128 + 64 * h + row], g, beta)
            assert np.allclose(after[2, h, row], s, rtol=0, atol=4e-6)
            assert abs(float(bf16_to_f32(out)[0, h, row]) - o) <= 2**-8 * abs(o) + 1e-5


def test_the_conv_is_the_formula() -> None:
    """Taps from the oldest, the raw x kept, bias before or behind."""
    x, w, bias, state = bf16(2, 8), bf16(8, 4), bf16(8), bf16(2, 3, 8)
    slots, starts, left = np.array([1], np.int32), np.array([0, 2], np.int32), np.zeros((2, 8), np.uint16)
    out, after = gdn.conv(x, w, bias, state, slots, starts, left, "bias_last")
    held = np.concatenate([state[1], x])
    for t in range(2):
        for c in range(8):
            r = sum(float(bf16_to_f32(held[t + i : t + i + 1, c])[0]) * float(bf16_to_f32(w[c, i : i + 1])[0]) for i in range(4))
            r += float(bf16_to_f32(bias[c : c + 1])[0])
            assert abs(float(bf16_to_f32(out[t, c : c + 1])[0]) - r / (1 + math.exp(-r))) <= 2**-8 * abs(r) + 1e-6
    assert np.array_equal(after[1], held[-3:])
    assert np.array_equal(after[0], state[0])


def test_eps_matters_where_a_row_is_near_zero() -> None:
    """|q| near 1e-4: with eps inside the root the length is 0.1, outside it is 0.99."""
    q = np.zeros((1, 64), np.float32)
    q[0, 0] = 1e-4
    lengths = [float(np.linalg.norm(gdn.l2norm(q, mode))) for mode in ("div_sqrt_eps_in", "rsqrt_eps_in", "eps_out")]
    assert lengths == pytest.approx([0.0995, 0.0995, 0.990], rel=1e-2)


def test_softplus_has_two_forms_and_an_end() -> None:
    """x itself above 20; below, two forms that differ in many elements by no more than their rounding."""
    x = RNG.uniform(-10, 19, 4096).astype(np.float32)
    log, log1p = (gdn.softplus(x, mode) for mode in ("softplus_log", "softplus_log1p"))
    assert 0.3 < np.mean(log != log1p) < 0.9
    assert np.allclose(log, log1p, rtol=0, atol=2e-6 * 20)
    assert gdn.softplus(np.array([20.5], np.float32), "softplus_log")[0] == np.float32(20.5)


@pytest.mark.parametrize("order", ["contiguous", "interleaved"])
def test_orders_of_the_projection(order: str) -> None:
    """Every element of a row goes to one place, and z is a bitwise slice."""
    heads = gdn.Heads(2, 6, 64, 64)
    row = np.arange(heads.conv_dim + 6 * 64)[None]
    mixed, z = gdn.split_qkvz(row, heads, order)
    assert sorted([*mixed.ravel(), *z.ravel()]) == row[0].tolist()
    group = (2 + 2 * 3) * 64
    assert z[0, 3, 0] == (heads.conv_dim + 3 * 64 if order == "contiguous" else group + (2 + 3) * 64)
    b, a = gdn.split_ba(np.arange(12)[None], heads, order)
    assert (b[0].tolist(), a[0].tolist()) == (
        ([0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]) if order == "contiguous" else ([0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11])
    )


def test_a_state_goes_through_its_dtype_once_a_sequence() -> None:
    """Two tokens in a bf16 state are not one token twice: it is rounded behind the last."""
    qkv, a, b = bf16(2, 256), bf16(2, 2), bf16(2, 2)
    a_log = dt_bias = np.zeros(2, np.float32)
    state = bf16(1, 2, 64, 64)
    slots, left = np.array([0], np.int32), np.zeros((2, 2, 64), np.uint16)

    def run(state: np.ndarray, first: int, last: int) -> np.ndarray:
        starts = np.array([first, last], np.int32)
        return gdn.recurrent(qkv, a, b, a_log, dt_bias, state, slots, starts, left, HEADS, gdn.Modes())[1]

    once, twice = run(state, 0, 2), run(run(state, 0, 1), 1, 2)
    assert not np.array_equal(once, twice)
    wide = gdn.narrow(run(gdn.widen(state), 0, 2), state)
    assert np.array_equal(once, wide)
