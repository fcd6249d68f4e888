"""Quantisation modes, against their formulas element by element, and at the edges."""

import math
import warnings

import numpy as np
import pytest
import torch

from replay.oracle.quant import quantize

MODES = ("recip_half_away", "recip_half_even", "div_half_even", "rmsnorm_int8", "group_trunc:32")
F = np.float32


def by_hand(x: np.float32, m: np.float32, mode: str) -> int:
    """One element, in scalar f32 steps."""
    eps_m = max(m, F(1e-10))
    s = F(eps_m / F(127))
    if mode == "recip_half_away":
        y = float(F(x * F(F(127) / eps_m)))
        return int(math.copysign(math.floor(abs(y) + 0.5), y))
    if mode == "recip_half_even":
        return round(float(F(x * F(F(127) / eps_m))))
    if mode == "div_half_even":
        return round(float(F(x / s)))
    if mode == "rmsnorm_int8":
        s = F(m / F(127)) if m > 0 else F(1)
        return round(float(F(x * F(F(1) / s))))
    return math.trunc(float(F(x / s)))


@pytest.mark.parametrize("mode", MODES)
def test_every_element_follows_its_formula(mode: str) -> None:
    """8 rows of 64, scales from tiny to huge."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((8, 64)) * 10.0 ** rng.integers(-6, 6, (8, 1))).astype(np.float32)
    q, scale = quantize(x, mode)
    group = 32 if mode.startswith("group") else 64
    for r in range(8):
        for g in range(64 // group):
            part = x[r, g * group : (g + 1) * group]
            m = np.abs(part).max()
            assert scale[r] == F(m / F(127)) if group == 64 else scale[r, g] == F(m / F(127))
            assert q[r, g * group : (g + 1) * group].tolist() == [by_hand(v, m, mode.partition(":")[0]) for v in part]


@pytest.mark.parametrize("mode", MODES)
def test_zero_row_has_a_finite_positive_scale(mode: str) -> None:
    """q = 0 and a scale that can be divided by."""
    q, scale = quantize(np.zeros((2, 64), np.float32), mode)
    assert not q.any()
    assert (np.isfinite(scale) & (scale > 0)).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_row_is_marked_by_its_scale(mode: str, bad: float) -> None:
    """The scale is the NaN or inf, q is all 0, and the row beside it is untouched."""
    x = np.ones((2, 64), np.float32)
    x[0, 5] = bad
    q, scale = quantize(x, mode)
    first = scale.reshape(2, -1)[0, 0]
    assert np.isnan(first) if np.isnan(bad) else first == np.inf
    assert not q[0, :32].any()
    assert (q[1] == 127).all()


def test_modes_differ_on_ordinary_data() -> None:
    """Each pair of modes differs somewhere on N(0,1) bf16 rows, so a wrong one can be seen."""
    from replay.oracle.arith import bf16_to_f32, rn_bf16

    x = bf16_to_f32(rn_bf16(np.random.default_rng(1).standard_normal((64, 2048), np.float32)))
    found = {m: quantize(x, m)[0] for m in MODES}
    shares = {m: np.mean(found["recip_half_away"] != q) for m, q in found.items()}
    assert 1e-5 < shares["recip_half_even"] < 5e-3
    assert 1e-5 < shares["div_half_even"] < 5e-3
    assert shares["group_trunc:32"] > 0.4


def test_denormal_row_does_not_become_nan() -> None:
    """1/s overflows for a denormal row in rmsnorm_int8: zeros stay 0, the rest saturates."""
    x = np.zeros((1, 4), np.float32)
    x[0, 1], x[0, 2] = 9e-41, -9e-41
    q, _ = quantize(x, "rmsnorm_int8")
    assert q.tolist() == [[0, 127, -128, 0]]


@pytest.mark.parametrize("mode", MODES)
def test_types_and_no_warning(mode: str) -> None:
    """int8 codes and f32 scales, whatever is in a row; no NaN is ever cast to an integer."""
    x = np.ones((5, 64), np.float32)
    x[0, 1], x[1, 1], x[2, 1], x[3] = np.nan, np.inf, 1e-42, 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q, scale = quantize(x, mode)
    assert (q.dtype, scale.dtype) == (np.int8, np.float32)


@pytest.mark.parametrize("mode", ["recip_half_away", "recip_half_even", "div_half_even", "rmsnorm_int8"])
def test_every_step_is_f32(mode: str) -> None:
    """Against torch, whose f32 division on a CPU is correctly rounded: a step in f64 shows in some of 10^6 codes."""
    x = np.random.default_rng(6).standard_normal((512, 2048), np.float32)
    t = torch.from_numpy(x)
    m = t.abs().amax(1, keepdim=True).clamp(min=1e-10)
    y = {"div": lambda: t / (m / 127), "rms": lambda: t * (1.0 / (m / 127)), "rec": lambda: t * (127.0 / m)}[mode[:3]]()
    rounded = torch.sign(y) * torch.floor(y.abs().double() + 0.5) if mode == "recip_half_away" else torch.round(y)
    q, scale = quantize(x, mode)
    assert (q == rounded.numpy()).all()
    assert (scale == (m / 127).squeeze(1).numpy()).all()
