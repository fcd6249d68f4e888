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


def first_column_skipped(logits: Any) -> Any:
    """Column 0 counts for nothing."""
    found = KEYS(logits)
    found[:, 0] = eager_topk.NO_KEY
    return found


def changed(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Keys of logits that were changed before."""
    return lambda logits: KEYS(change(logits.float()))


def minus_nan_is_lowest(logits: Any) -> Any:
    """A NaN is masked where its sign is positive; the other is the least of all, and may be selected."""
    bits = (logits.float() + 0.0).view(torch.int32)
    keys = torch.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), torch.tensor(eager_topk.NO_KEY + 1))
    return torch.where(logits.isnan() & (bits > 0), eager_topk.NO_KEY, keys)


def nan_is_a_number_at_last(logits: Any) -> Any:
    """A NaN is chosen where numbers run out."""
    return torch.where(logits.isnan(), eager_topk.NO_KEY + 1, KEYS(logits))


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


def lengths(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Other lengths than were given."""

    def prepare(problem: Any, weights: Any) -> Any:
        right = ROWS(problem, weights)
        return lambda t: right({**t, "seq_lens": change(t["seq_lens"])})

    return prepare


def never_filled(problem: Any, weights: Any) -> Any:
    """−1 is not written: what was in its place stays."""
    right = ROWS(problem, weights)

    def run(t: Any) -> None:
        before = t["indices"].clone()
        right(t)
        t["indices"].copy_(torch.where(t["indices"] < 0, before, t["indices"]))

    return run


def next_n_ignored(problem: Any, weights: Any) -> Any:
    """Every row of a sequence sees as much as its last."""
    right, next_n = ROWS(problem.with_mode("next_n", "1"), weights), int(problem.mode("next_n"))
    return lambda t: right({**t, "seq_lens": t["seq_lens"].repeat_interleave(next_n)})


def in_order_of_rows(problem: Any, weights: Any) -> Any:
    """Tokens go to the first slots, one behind the other."""
    right = GREEDY(problem, weights)
    return lambda t: right({**t, "slots": torch.where(t["slots"] < 0, -1, torch.arange(len(t["slots"]), dtype=torch.int32))})


def padded_rows(problem: Any, weights: Any) -> Any:
    """A row whose slot is −1 hands its token over, to the last slot."""
    right = GREEDY(problem, weights)
    return lambda t: right({**t, "slots": t["slots"] % len(t["next_input_ids"])})


GREEDY = eager_topk.prepare_greedy
GREEDY_FAULTS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "NaN chosen": ("keys", nan_chosen, "of token"),
    "NaN of one sign chosen": ("keys", minus_nan_is_lowest, "on edges: row 1 "),
    "first column skipped": ("keys", first_column_skipped, "want 0, "),
    "last partial vector skipped": ("keys", last_vector_skipped, f"want {VOCAB - 1}, "),
    "−0 below +0": ("keys", zero_below_zero, "on edges: row 2 (captured row 0) of token"),
    "denormals flushed": ("keys", changed(lambda x: torch.where(x.abs() < 1.2e-38, 0.0, x)), "on edges: row 5 "),
    "−inf is nothing": ("keys", changed(lambda x: torch.where(x == -torch.inf, torch.nan, x)), "on edges: row 7 "),
    "large ones clamped": ("keys", changed(lambda x: x.clamp(max=1e4)), "on edges: row"),
    "+inf is nothing": ("keys", changed(lambda x: torch.where(x == torch.inf, torch.nan, x)), "on edges: row 9 "),
    "rounded to bf16": ("keys", changed(lambda x: x.bfloat16().float()), "on edges: row"),
    "a padding row's token handed over": ("prepare_greedy", padded_rows, "of next_input_ids"),
    "slots not looked at": ("prepare_greedy", in_order_of_rows, "of next_input_ids"),
}
ROWS_FAULTS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "NaN chosen": ("keys", nan_chosen, "of indices"),
    "NaN chosen where numbers run out": ("keys", nan_is_a_number_at_last, "want -1, "),
    "duplicate id": ("prepare_rows", behind(duplicate), "of indices"),
    "boundary tie wrongly dropped": ("prepare_rows", behind(tie_dropped), "got -1"),
    "first column skipped": ("keys", first_column_skipped, "want 0, "),
    "last partial vector skipped": ("keys", last_vector_skipped, f"want {VOCAB - 1}, "),
    "index truncated at 65,536": ("prepare_rows", behind(truncated), "of indices"),
    "denormals flushed": ("keys", changed(lambda x: torch.where(x.abs() < 1.2e-38, 0.0, x)), "on edges: row 5 "),
    "−inf is nothing": ("keys", changed(lambda x: torch.where(x == -torch.inf, torch.nan, x)), "got -1"),
    "rounded to bf16": ("keys", changed(lambda x: x.bfloat16().float()), "on edges: row"),
    "a stride not looked at": ("keys", of_rows_side_by_side, "on strided inputs"),
    "padded columns read": ("prepare_rows", past_the_end, "on edges"),
    "a column too many": ("prepare_rows", lengths(lambda n: n + 1), "on edges"),
    "a column too few": ("prepare_rows", lengths(lambda n: n - 1), "of indices"),
    "−1 never written": ("prepare_rows", never_filled, "want -1, "),
}
FAULTS = [
    (stage, fault, *planted)
    for stage, faults in (("topk.greedy", GREEDY_FAULTS), ("topk.rows", ROWS_FAULTS))
    for fault, planted in faults.items()
]


@pytest.fixture(scope="module")
def row() -> np.ndarray:
    """One row as captured, its largest logit in neither end."""
    drawn = draw_rows(np.random.Generator(np.random.Philox(key=5)), 1, VOCAB)
    drawn[0, 69_000] = 0x4300  # bf16 128, past 65,536
    return (drawn.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize(("stage", "fault", "function", "wrong", "told"), FAULTS, ids=[f"{f[0]} {f[1]}" for f in FAULTS])
def test_each_is_red(
    stage: str, fault: str, function: str, wrong: Any, told: str, row: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a single captured row and its twins: FAIL, with the row; the same case is right without the fault."""
    case = logit_case(stage, tmp_path, row)
    assert isinstance(judge_here(f"eager:{stage}", case), Exact)
    monkeypatch.setattr(eager_topk, function, wrong)
    outcome = judge_here(f"eager:{stage}", case)
    assert isinstance(outcome, Inexact), outcome
    assert outcome.status == "FAIL"
    assert told in outcome.detail, outcome.detail
    assert "row" in outcome.detail


def test_next_n_is_looked_at(row: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of one sequence, the first of which sees a column less."""
    case = logit_case("topk.rows", tmp_path, np.concatenate([row, row]), next_n="2")
    assert isinstance(judge_here("eager:topk.rows", case), Exact)
    monkeypatch.setattr(eager_topk, "prepare_rows", next_n_ignored)
    assert isinstance(judge_here("eager:topk.rows", case), Inexact)


def test_what_is_right_in_a_wrong_row_stays_where_it_is(row: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One index of twenty is wrong: one flip, not twenty, whatever the order that the kernel wrote them in."""

    def shuffled(indices: Any, t: Any) -> None:
        indices[:, 3] = 11
        indices.copy_(indices.flip(1))

    monkeypatch.setattr(eager_topk, "prepare_rows", behind(shuffled))
    outcome = judge_here("eager:topk.rows", logit_case("topk.rows", tmp_path, row))
    assert isinstance(outcome, Inexact)
    assert ": 1 flips," in outcome.detail
    assert "got 11)" in outcome.detail
