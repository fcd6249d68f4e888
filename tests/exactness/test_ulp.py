"""Scaled ulp: the spacing of numbers at the larger of |want| and the row's scale."""

import numpy as np
import pytest

from replay.exactness.ulp import scaled_ulp, ulp
from replay.oracle.arith import bf16_to_f32


def test_f32_spacing_is_numpys() -> None:
    """At every size, denormals and powers of two included, but for zero, where it is the least denormal."""
    rng = np.random.Generator(np.random.Philox(key=3))
    values = np.abs(rng.integers(1, 0x7F800000, 4096).astype(np.uint32).view(np.float32))
    values = np.concatenate([values, np.exp2(np.arange(-149, 128)).astype(np.float32)])
    assert (ulp(values, "f32") == np.spacing(values).astype(np.float64)).all()
    assert ulp(np.zeros(1, np.float32), "f32")[0] == 2.0**-149


def test_bf16_spacing_is_the_next_pattern() -> None:
    """For every positive finite pattern the step to the next one."""
    patterns = np.arange(0x7F7F, dtype=np.uint16)
    here, there = bf16_to_f32(patterns).astype(np.float64), bf16_to_f32(patterns + np.uint16(1)).astype(np.float64)
    assert (ulp(here, "bf16") == there - here).all()


def test_cancellation_is_measured_on_the_rows_scale() -> None:
    """What is a thousand steps of a small result is a small part of one of what was summed."""
    want, got = np.array([[2.0**-10, 1.0]], np.float32), np.array([[2.0**-10 + 2.0**-23, 1.0]], np.float32)
    assert scaled_ulp(want, got, "f32")[0].tolist() == [1024.0, 0.0]
    assert scaled_ulp(want, got, "f32", np.array([[1.0]]))[0].tolist() == [1.0, 0.0]
    assert scaled_ulp(want, got, "f32", np.array([[0.0]]))[0].tolist() == [1024.0, 0.0]  # no reduction: plain ulp


@pytest.mark.parametrize(
    ("want", "got", "distance"),
    [
        (np.nan, np.nan, 0), (np.inf, np.inf, 0), (-np.inf, np.inf, np.inf), (np.nan, 1, np.inf), (1, np.nan, np.inf),
        (np.inf, 3e38, np.inf), (3e38, np.inf, np.inf), (0.0, -0.0, 0),
    ],
)  # fmt: skip
def test_what_is_not_finite_is_right_or_infinitely_far(want: float, got: float, distance: float) -> None:
    """A NaN is no wildcard, and no scale makes an infinity near."""
    one, other = np.array([[want]], np.float32), np.array([[got]], np.float32)
    assert scaled_ulp(one, other, "f32", np.array([[1e30]]))[0, 0] == distance
