"""A router's kernels: the oracle's bits on every edge, and what a wrong one looks like."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay.kernels import eager_topk
from replay.model import Exact, Inexact, Problem
from replay.oracle.arith import rn_bf16
from tests.conftest import judge_here
from tests.topk import edges, logit_case


@pytest.mark.parametrize("bf16", [False, True], ids=["f32", "bf16"])
@pytest.mark.parametrize("modes", [{}, {"bias": "on", "padding": "on", "renormalize": "off"}], ids=["default", "all"])
def test_eager_on_every_edge(modes: dict[str, str], bf16: bool, tmp_path: Path) -> None:
    """Ties, NaN, infinities, both zeros, all equal: bits and ids."""
    rows = edges(300)
    outcome = judge_here("eager:topk.router", logit_case("topk.router", tmp_path, rn_bf16(rows) if bf16 else rows, **modes))
    assert isinstance(outcome, Exact), outcome
    assert outcome.grade == "BITWISE"


def _wrong(right: Any, change: Any, problem: Problem, weights: Any) -> Any:
    run = right(problem, weights)

    def changed(t: Any) -> None:
        run(t)
        change(problem, t)

    return changed


def _biased(p: Problem, t: Any) -> None:
    t["topk_weights"].add_(t["bias"][t["topk_ids"].clamp_min(0).long()])


def _higher(p: Problem, t: Any) -> None:
    """Of equals the higher id."""
    turned = t["gating_output"].float().flip(1).sort(dim=1, descending=True, stable=True)[1]
    t["topk_ids"].copy_((p.geometry.experts - 1 - turned[:, : p.geometry.top_k]).int())


def _padding_kept(p: Problem, t: Any) -> None:
    t["topk_ids"].clamp_min_(0)


@pytest.mark.parametrize(
    ("change", "modes"),
    [
        (lambda p, t: t["topk_weights"].div_(t["topk_weights"].sum(1, keepdim=True)), {"renormalize": "off"}),
        (_biased, {"bias": "on"}), (_higher, {}), (_padding_kept, {"padding": "on"}),
    ],
    ids=["renormalised unasked", "weights biased", "higher id on ties", "padding kept"],
)  # fmt: skip
def test_a_planted_fault_is_red(
    change: Any, modes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Each of what implementations differ in."""
    rows = np.round(np.random.default_rng(1).standard_normal((8, 300)).astype(np.float32) * 2)
    monkeypatch.setattr(eager_topk, "prepare_router", partial(_wrong, eager_topk.prepare_router, change))
    outcome = judge_here("eager:topk.router", logit_case("topk.router", tmp_path, rows, **modes))
    assert isinstance(outcome, Inexact), outcome


def test_too_few_columns_are_refused(tmp_path: Path) -> None:
    """A row must have an expert each."""
    from replay.errors import InputError

    with pytest.raises(InputError, match=r"experts: expected at most the 100 columns of a row, one an expert .*, got 256"):
        judge_here("eager:topk.router", logit_case("topk.router", tmp_path, edges(100)))
