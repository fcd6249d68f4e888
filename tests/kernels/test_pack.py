"""Prepacked weights hold every code at its place, and zeros behind the real sizes."""

import numpy as np
import torch

from replay.kernels.sycl.moe import pack_matrix, pack_rows
from tests.conftest import make_case

PROBLEM = make_case("moe.gemm1").problem
W = torch.randint(-128, 128, (3, 37, 21), dtype=torch.int8)


def test_blocks_of_columns_for_the_cpu() -> None:
    """[n, N/16, K/2, 16, 2]: element (k, n) lies in block n//16, pair k//2."""
    packed = pack_rows(PROBLEM, {"w13": W, "w13_scale": torch.ones(3, 21)})["w13"]
    assert packed.shape == (3, 2, 19, 16, 2)
    for k, n in np.ndindex(37, 21):
        assert (packed[:, n // 16, k // 2, n % 16, k % 2] == W[:, k, n]).all()
    assert int(packed.ne(0).sum()) == int(W.ne(0).sum())


def test_words_of_four_for_the_matrix_engine() -> None:
    """[n, Kp/4, Np, 4]: element (k, n) lies in word k//4 of column n; depth padded to 32, width to 16."""
    packed = pack_matrix(PROBLEM, {"w13": W})["w13"]
    assert packed.shape == (3, 16, 32, 4)
    for k, n in np.ndindex(37, 21):
        assert (packed[:, k // 4, n, k % 4] == W[:, k, n]).all()
    assert int(packed.ne(0).sum()) == int(W.ne(0).sum())
