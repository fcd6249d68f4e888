"""Faults of top-k and greedy kernels from the field, each in small, with the right value; every kernel of ours has it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from replay.kernels.registry import registered
from replay.model import Exact
from replay.oracle import topk as oracle
from tests.conftest import judge_here
from tests.topk import logit_case

GREEDY = [k.id for k in registered().values() if k.stage == "topk.greedy" and "cpu" in k.devices]
ROWS = [k.id for k in registered().values() if k.stage == "topk.rows" and "cpu" in k.devices]
WIDTH = 8320


def selected(folder: Path, rows: np.ndarray, k: int) -> np.ndarray:
    """What the oracle selects, after every kernel has been found right on these rows and their twins."""
    for kernel in ROWS:
        outcome = judge_here(kernel, logit_case("topk.rows", folder, rows, k=str(k)))
        assert isinstance(outcome, Exact), (kernel, outcome)
    return oracle.rows(oracle.canonical(rows), np.full(len(rows), rows.shape[1]), k)


def tokens(folder: Path, rows: np.ndarray) -> list[int]:
    """The oracle's tokens, after every kernel has been found right to the bit."""
    for kernel in GREEDY:
        outcome = judge_here(kernel, logit_case("topk.greedy", folder, rows))
        assert isinstance(outcome, Exact), (kernel, outcome)
        assert outcome.grade == "BITWISE"
    return oracle.greedy(oracle.canonical(rows)).tolist()


def test_few_winners_and_zeros(tmp_path: Path) -> None:
    """sglang 30645: 8320 logits, 100 winners and 8220 zeros, k = 2048: the winners and 1948 distinct zeros."""
    rng = np.random.default_rng(0)
    row = np.zeros((1, WIDTH), np.float32)
    winners = rng.choice(WIDTH, 100, replace=False)
    row[0, winners] = 1 + rng.random(100)
    (found,) = selected(tmp_path, row, 2048)
    assert set(winners) <= set(found.tolist())
    assert len(set(found.tolist())) == 2048
    assert np.count_nonzero(row[0, found] == 0) == 1948


def test_nan_is_never_selected(tmp_path: Path) -> None:
    """vllm 50201: one NaN, and rows of NaN alone: what is missing is −1."""
    row = np.random.default_rng(1).standard_normal((3, 40), np.float32)
    row[0, 7], row[1] = np.nan, np.nan
    found = selected(tmp_path, row, 40)
    assert 7 not in found[0]
    assert (found[0] == -1).sum() == 1
    assert (found[1] == -1).all()
    assert tokens(tmp_path, row)[1] == -1


def test_the_oracle_runs_on_a_cpu(tmp_path: Path) -> None:
    """torch-xpu-ops 3777: an accelerator's own topk was wrong about four numbers; the first of these is index 3."""
    row = np.array([[0.9589, -1.137, 0.0013, 1.3174]], np.float32)
    assert tokens(tmp_path, row) == [3]
    assert selected(tmp_path, row, 1).tolist() == [[3]]


def test_all_equal(tmp_path: Path) -> None:
    """Any 2048 distinct indices are right, and the lowest are the contract's; the token is index 0."""
    row = np.full((2, WIDTH), -3.25, np.float32)
    assert np.array_equal(np.sort(selected(tmp_path, row, 2048)[0]), np.arange(2048))
    assert tokens(tmp_path, row) == [0, 0]


def test_a_narrow_range(tmp_path: Path) -> None:
    """Values that differ in their low ten bits: leading digits tell none from another."""
    rng = np.random.default_rng(2)
    row = (rng.integers(0, 1024, (2, WIDTH), np.uint32) + np.uint32(0x3F800000)).view(np.float32)
    for k in (50, 2048):
        for values, chosen in zip(row, selected(tmp_path, row, k), strict=True):
            assert np.array_equal(values[chosen], np.sort(values)[::-1][:k])
    assert tokens(tmp_path, row) == row.argmax(1).tolist()


@pytest.mark.parametrize("kernel", ROWS)
def test_an_empty_range(kernel: str, tmp_path: Path) -> None:
    """A sequence of length 0 selects nothing: −1 everywhere, in the twin that has such lengths, and by hand."""
    case = logit_case("topk.rows", tmp_path, np.ones((3, 30), np.float32), k="4")
    assert isinstance(judge_here(kernel, case), Exact)
    module, _, name = registered()[kernel].prepare.partition(":")
    run = getattr(__import__(module, fromlist=[name]), name)(case.problem, {})
    lengths = torch.tensor([0, 2, 9], dtype=torch.int32)
    t = {"logits": torch.rand(3, 30), "seq_lens": lengths, "indices": torch.full((3, 4), 7, dtype=torch.int32)}
    run(t)
    assert t["indices"][0].tolist() == [-1] * 4
    assert sorted(t["indices"][1].tolist()) == [-1, -1, 0, 1]
    assert max(t["indices"][2].tolist()) < 9


def test_a_slot_past_a_billion_elements_is_reached(tmp_path: Path) -> None:
    """vllm-xpu-kernels 545 in the shape of logits: a row that begins past 2^31 elements of its storage is read where it lies."""
    vocab, apart = 64, 1 << 30
    for kernel in ("sycl:topk.greedy:single_pass", "eager:topk.greedy"):
        case = logit_case("topk.greedy", tmp_path, np.zeros((3, vocab), np.float32), logits="bf16")
        module, _, name = registered()[kernel].prepare.partition(":")
        run = getattr(__import__(module, fromlist=[name]), name)(case.problem, {})
        # numpy's zero pages cost nothing until they are written to; torch writes its own.
        storage = torch.from_numpy(np.zeros(2 * apart + vocab, np.uint16)).view(torch.bfloat16)
        logits = storage.as_strided((3, vocab), (apart, 1))
        logits[2, 17], logits[1, 5] = 3, 2
        t = {
            "logits": logits,
            "slots": torch.arange(3, dtype=torch.int32),
            "token": torch.zeros(3).long(),
            "next_input_ids": torch.zeros(5).long(),
        }
        run(t)
        assert t["token"].tolist() == [0, 5, 17]
