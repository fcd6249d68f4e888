"""The oracle of selection against sorting by hand, and what it takes for a right selection."""

import itertools
import math

import numpy as np
import pytest

from replay.oracle import topk as oracle
from replay.oracle.arith import rn_bf16
from tests.topk import edges

ROWS = oracle.canonical(edges(97))


def by_hand(row: np.ndarray, k: int) -> list[int]:
    """Python's own stable sort over what is a number."""
    numbers = [i for i, x in enumerate(row.tolist()) if not math.isnan(x)]
    chosen = sorted(numbers, key=lambda i: -float(row[i]))[:k]
    return chosen + [-1] * (k - len(chosen))


@pytest.mark.parametrize("k", [1, 2, 20, 64, 96, 97, 98, 200])
def test_every_edge_as_by_hand(k: int) -> None:
    """NaN of either sign, infinities, zeros, ties, one value: the k largest, lowest index first, −1 where there are fewer."""
    for row in ROWS:
        assert oracle.top(row, k).tolist() == by_hand(row, k)
    bits = rn_bf16(edges(97))
    for row in oracle.canonical(bits):
        assert oracle.top(row, k).tolist() == by_hand(row, k)


def test_greedy_is_the_first_of_the_largest() -> None:
    """Lowest index among equals, zeros of both signs alike, −inf where there is nothing else, −1 for NaN alone."""
    nan, inf = np.nan, np.inf
    rows = [[1, 3, 3, nan], [-0.0, 0.0, -1, nan], [nan, -inf, nan, -inf], [nan] * 4, [nan, inf, 9, inf]]
    assert oracle.greedy(oracle.canonical(np.array(rows, np.float32))).tolist() == [1, 0, 1, -1, 1]


def test_the_columns_that_count() -> None:
    """seq_lens[r // next_n] − next_n + r % next_n + 1, within the row."""
    lengths = np.array([5, 0, 9], np.int32)
    assert oracle.valid_columns(lengths, 1, 3, 8).tolist() == [5, 0, 8]
    assert oracle.valid_columns(lengths, 2, 6, 8).tolist() == [4, 5, 0, 0, 8, 8]


@pytest.mark.parametrize("k", [1, 20, 64])
def test_ranks_joined_are_the_whole(k: int) -> None:
    """Each rank's k largest of its columns, joined, are the k largest of all, ties by the lowest index included."""
    for row in oracle.canonical(edges(4 * 62)):
        parts = np.split(row, 4)
        chosen = [oracle.top(part, k) for part in parts]
        whole = [np.where(c >= 0, c + 62 * rank, -1) for rank, c in enumerate(chosen)]
        values = [part[np.maximum(c, 0)] for part, c in zip(parts, chosen, strict=True)]
        assert oracle.merge(values, whole, k).tolist() == oracle.top(row, k).tolist()


def test_a_right_selection_is_one_of_equal_values() -> None:
    """Whatever the order, whichever of equals; and every wrong one of three of seven is told from it, all of them tried."""
    row = np.array([2, 5, 2, np.nan, 7, 2, 1], np.float32)
    for chosen in itertools.product(range(-1, 8), repeat=3):
        values = sorted(float(row[i]) if 0 <= i < 7 else math.nan for i in chosen)
        right = len(set(chosen)) == 3 and values == [2, 5, 7]
        assert oracle.is_selection(row, np.array(chosen), 3) == right, chosen
        if right:
            assert oracle.lowest_first(row, np.array(chosen)).tolist() == [4, 1, 0]
            assert oracle.in_order(row, np.array(chosen)).tolist()[:2] == [4, 1]


def test_fewer_than_were_asked_for() -> None:
    """−1 in as many places as there are numbers too few, not in more and not in fewer."""
    row = np.array([np.nan, 4, -np.inf], np.float32)
    assert oracle.is_selection(row, np.array([-1, 2, 1, -1]), 4)
    assert not oracle.is_selection(row, np.array([-1, -1, 1, -1]), 4)
    assert not oracle.is_selection(row, np.array([0, 2, 1, -1]), 4)
    assert oracle.is_selection(row[:0], np.array([-1, -1]), 2)
    assert oracle.lowest_first(row[:0], np.array([-1, -1])).tolist() == [-1, -1]
