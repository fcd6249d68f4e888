"""Faults of selection, planted one at a time in the eager kernel: each is red on captured rows and their twins, with its row."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay.captures.generate_logits import draw_rows
from replay.kernels import eager_topk
from replay.model import Exact, Inexact
from tests.conftest import judge_here
from tests.topk import logit_case

KEYS, ROWS = eager_topk.keys, eager_topk.prepare_rows
VOCAB = 70_001  # past 65,536, and no multiple of a vector


def nan_chosen(logits: Any) -> Any:
    """As torch has it: a NaN above everything."""
    bits = (logits.float() + 0.0).view(torch.int32)
    return torch.where(logits.isnan(), (1 << 31) - 1, bits ^ ((bits >> 31) & 0x7FFFFFFF))


def zero_below_zero(logits: Any) -> Any:
    """−0.0 keeps its sign."""
    bits = logits.float().contiguous().view(torch.int32)
    return torch.where(logits.isnan(), eager_topk.NO_KEY, bits ^ ((bits >> 31) & 0x7FFFFFFF))


def last_vector_skipped(logits: Any) -> Any:
    """Columns behind the last sixteen that are whole count for nothing."""
    found = KEYS(logits)
    found[:, logits.shape[1] // 16 * 16 :] = eager_topk.NO_KEY
    return found


def of_rows_side_by_side(logits: Any) -> Any:
    """The stride is not looked at: what lies between the rows is read."""
    return KEYS(logits.as_strided(logits.shape, (logits.shape[1], 1)))


def behind(change: Callable[[Any, Any], None]) -> Callable[..., Any]:
    """A change of what a right kernel selected."""

    def prepare(problem: Any, weights: Any) -> Any:
        right = ROWS(problem, weights)

        def run(t: Any) -> None:
            right(t)
            change(t["indices"], t)

        return run

    return prepare


def duplicate(indices: Any, t: Any) -> None:
    """One index twice."""
    indices[:, 1] = indices[:, 0]


def tie_dropped(indices: Any, t: Any) -> None:
    """What has the boundary's value is left out, as by a comparison that is strict."""
    indices[:, -1] = -1


def truncated(indices: Any, t: Any) -> None:
    """An index in sixteen bits."""
    indices.copy_(torch.where(indices >= 0, indices & 0xFFFF, indices))


def past_the_end(problem: Any, weights: Any) -> Any:
    """Lengths are not looked at: padded columns are read."""
    right = ROWS(problem, weights)
    return lambda t: right({**t, "seq_lens": torch.full_like(t["seq_lens"], t["logits"].shape[1])})


def padded_rows(problem: Any, weights: Any) -> Any:
    """A row whose slot is −1 hands its token over, to the last slot."""
    right = GREEDY(problem, weights)
    return lambda t: right({**t, "slots": t["slots"] % len(t["next_input_ids"])})


GREEDY = eager_topk.prepare_greedy
FAULTS: dict[str, tuple[str, str, Callable[..., Any], str]] = {
    "NaN chosen, greedy": ("topk.greedy", "keys", nan_chosen, "of token"),
    "NaN chosen": ("topk.rows", "keys", nan_chosen, "of indices"),
    "duplicate id": ("topk.rows", "prepare_rows", behind(duplicate), "of indices"),
    "boundary tie wrongly dropped": ("topk.rows", "prepare_rows", behind(tie_dropped), "got -1"),
    "last partial vector skipped, greedy": ("topk.greedy", "keys", last_vector_skipped, f"want {VOCAB - 1}"),
    "last partial vector skipped": ("topk.rows", "keys", last_vector_skipped, f"want {VOCAB - 1}"),
    "index truncated at 65,536": ("topk.rows", "prepare_rows", behind(truncated), "of indices"),
    "−0 below +0": ("topk.greedy", "keys", zero_below_zero, "row 2 (captured row 2) of token"),
    "a stride not looked at": ("topk.rows", "keys", of_rows_side_by_side, "on strided inputs"),
    "padded columns read": ("topk.rows", "prepare_rows", past_the_end, "on other bytes"),
    "a padded row's token handed over": ("topk.greedy", "prepare_greedy", padded_rows, "of next_input_ids"),
}


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    """Four rows as captured, each with its largest logit in the last column."""
    drawn = draw_rows(np.random.Generator(np.random.Philox(key=5)), 4, VOCAB)
    drawn[:, -1] = 0x4300  # bf16 128
    return drawn


@pytest.mark.parametrize("fault", FAULTS)
def test_each_is_red(fault: str, rows: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAIL, with its row; the same case is right without the fault."""
    stage, function, wrong, told = FAULTS[fault]
    case = logit_case(stage, tmp_path, rows)
    assert isinstance(judge_here(f"eager:{stage}", case), Exact)
    monkeypatch.setattr(eager_topk, function, wrong)
    outcome = judge_here(f"eager:{stage}", case)
    assert isinstance(outcome, Inexact), outcome
    assert outcome.status == "FAIL"
    assert told in outcome.detail, outcome.detail
    assert "row" in outcome.detail


def test_what_is_right_in_a_wrong_row_stays_where_it_is(
    rows: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One index of twenty is wrong: one flip, not twenty, whatever the order that the kernel wrote them in."""

    def shuffled(indices: Any, t: Any) -> None:
        indices[:, 3] = 11
        indices.copy_(indices.flip(1))

    monkeypatch.setattr(eager_topk, "prepare_rows", behind(shuffled))
    outcome = judge_here("eager:topk.rows", logit_case("topk.rows", tmp_path, rows))
    assert isinstance(outcome, Inexact)
    assert ": 1 flips," in outcome.detail
    assert "got 11)" in outcome.detail
