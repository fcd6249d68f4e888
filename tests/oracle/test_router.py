"""The router's oracle on rows that can be worked out by hand."""

import numpy as np

from replay.oracle.router import route, softmax

LOG = np.log(np.array([[1, 4, 2, 1]], np.float64)).astype(np.float32)  # p = 1/8, 1/2, 1/4, 1/8


def test_the_largest_first_and_of_equals_the_lower_id() -> None:
    """Experts 0 and 3 have one p."""
    weights, ids = route(LOG, None, None, 4, renormalize=False)
    assert ids.tolist() == [[1, 2, 0, 3]]
    assert np.allclose(weights, [[0.5, 0.25, 0.125, 0.125]], atol=1e-6)


def test_a_bias_chooses_and_does_not_weigh() -> None:
    """Expert 3 is chosen by its bias, and has the weight that it had."""
    bias = np.array([0, 0, 0, 1], np.float32)
    weights, ids = route(LOG, bias, None, 2, renormalize=False)
    assert ids.tolist() == [[3, 1]]
    assert weights[0, 0] == softmax(LOG)[0, 3]


def test_renormalised_weights_are_over_their_sum_in_order() -> None:
    """1/2 and 1/4 become 2/3 and 1/3, each a quotient of f32."""
    plain, _ = route(LOG, None, None, 2, renormalize=False)
    weights, _ = route(LOG, None, None, 2, renormalize=True)
    total = np.float32(0) + plain[0, 0] + plain[0, 1]
    assert weights.tolist() == [[plain[0, 0] / total, plain[0, 1] / total]]


def test_a_padded_row_chooses_nobody() -> None:
    """−1 and 0; its neighbour is as it was."""
    weights, ids = route(np.concatenate([LOG, LOG]), None, np.array([True, False]), 2, renormalize=True)
    assert ids.tolist() == [[-1, -1], [1, 2]]
    assert weights[0].tolist() == [0, 0]
    assert weights[1].all()


def test_a_nan_comes_behind_an_expert_that_a_bias_masks() -> None:
    """A bias of −inf is a number, if the least."""
    bias = np.array([np.nan, -np.inf, 0, 0], np.float32)
    _, ids = route(LOG, bias, None, 4, renormalize=False)
    assert ids.tolist() == [[2, 3, 1, 0]]


def test_nan_and_infinities() -> None:
    """A row with a NaN is NaN throughout, its ids in order; −inf has no weight; +inf makes NaN."""
    rows = np.array([[0, np.nan, 1, 2], [0, -np.inf, 1, 2], [0, np.inf, 1, 2]], np.float32)
    weights, ids = route(rows, None, None, 4, renormalize=False)
    assert np.isnan(weights[[0, 2]]).any(axis=1).all()
    assert ids[0].tolist() == [0, 1, 2, 3]
    assert ids[1].tolist() == [3, 2, 0, 1]
    assert weights[1, 3] == 0
