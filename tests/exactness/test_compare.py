"""Comparing to the bit: NaN is no wildcard, the worst row is named, rows past the valid ones keep their poison."""

import numpy as np

from replay.exactness import Got, compare, same_bits
from replay.model import Spec

OUT = (Spec("y", "out", (4, 8), "bf16"),)
F32 = (Spec("y", "out", (4,), "f32"),)


def rows() -> np.ndarray:
    """bf16 bit patterns of small numbers."""
    return np.arange(0x3F80, 0x3F80 + 32, dtype=np.uint16).reshape(4, 8)


def test_equal_is_no_mismatch() -> None:
    """The same bits are the same."""
    assert compare(OUT, {"y": rows()}, Got({"y": rows()}, 0xFF)) is None


def test_one_flipped_bit_is_one_ulp_in_its_row() -> None:
    """Row, column, flips and distance."""
    got = rows()
    got[2, 5] += 1
    got[2, 6] += 3
    found = compare(OUT, {"y": rows()}, Got({"y": got}, 0xFF))
    assert found is not None
    assert (found.row, found.column, found.flips, found.ulp, found.wrong_rows) == (2, 6, 2, 3, 1)
    assert found.text("token 0").startswith("row 2 (token 0) of y: 2 flips, 3 ulp, worst at column 6 (want 1.17188, got 1.19531)")


def test_the_worst_row_is_the_one_farthest_off() -> None:
    """A row with one large error comes before a row with many small ones."""
    got = rows()
    got[0] += 1
    got[3, 1] += 9
    found = compare(OUT, {"y": rows()}, Got({"y": got}, 0xFF))
    assert found is not None
    assert (found.row, found.wrong_rows) == (3, 2)


def test_nan_equals_nan_only() -> None:
    """Any NaN payload equals a NaN; a NaN for a number, or a number for a NaN, does not pass."""
    want = np.array([1.0, np.nan, 3.0, 4.0], np.float32)
    other = want.copy()
    other.view(np.uint32)[1] = 0xFFC12345
    assert compare(F32, {"y": want}, Got({"y": other}, 0xFF)) is None
    for row, value in ((0, np.nan), (1, 1.0)):
        wrong = want.copy()
        wrong[row] = value
        found = compare(F32, {"y": want}, Got({"y": wrong}, 0xFF))
        assert found is not None
        assert found.row == row


def test_minus_zero_is_not_zero() -> None:
    """Bitwise means the sign of zero too."""
    assert compare(F32, {"y": np.zeros(4, np.float32)}, Got({"y": -np.zeros(4, np.float32)}, 0xFF)) is not None


def test_rows_past_the_valid_ones_must_keep_their_poison() -> None:
    """An oracle output of 2 rows defines 2; a write to the others is named."""
    got = np.full((4, 8), 0x7B7B, np.uint16)
    got[:2] = rows()[:2]
    assert compare(OUT, {"y": rows()[:2]}, Got({"y": got}, 0x7B)) is None
    got[3, 4] = 0
    found = compare(OUT, {"y": rows()[:2]}, Got({"y": got}, 0x7B))
    assert found is not None
    assert found.past_end
    assert "row 3 of y is past the valid rows" in found.text("")
    assert "column 4" in found.text("")


def test_no_valid_row_at_all() -> None:
    """An oracle output without rows is compared as such."""
    got = np.full((4, 8), 0x7B7B, np.uint16)
    assert compare(OUT, {"y": rows()[:0]}, Got({"y": got}, 0x7B)) is None


def test_repeats_that_differ_are_told_by_row() -> None:
    """same_bits names output and rows."""
    other = rows()
    other[[1, 3], 0] += 1
    assert same_bits(OUT, {"y": rows()}, {"y": other}) == ("y", [1, 3])
    assert same_bits(OUT, {"y": rows()}, {"y": rows()}) is None


def test_a_residue_pattern_names_itself() -> None:
    """Rows with index % 64 == 5, and a column in every eight, are told as such; scattered rows are not."""
    spec = (Spec("y", "out", (256, 32), "i8"),)
    want = np.zeros((256, 32), np.int8)
    for modulus, residue in ((64, 5), (2, 1), (128, 0), (8, 7)):
        got = want.copy()
        got[residue::modulus] = 1
        found = compare(spec, {"y": want}, Got({"y": got}, 0xFF))
        assert found is not None
        assert found.text("").endswith(f"rows wrong: rows % {modulus} == {residue}")
    got = want.copy()
    got[:, 3::8] = 1
    found = compare(spec, {"y": want}, Got({"y": got}, 0xFF))
    assert found is not None
    assert found.text("").endswith("256 of 256 rows wrong: columns % 8 == 3")
    for scattered in ([5, 69], [5, 69, 133, 198], [7]):
        got = want.copy()
        got[scattered, 0] = 1
        found = compare(spec, {"y": want}, Got({"y": got}, 0xFF))
        assert found is not None
        assert found.text("").endswith("rows wrong")
