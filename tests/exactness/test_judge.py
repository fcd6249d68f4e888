"""Grades below BITWISE: within a stage's budget, or another choice among equal values; and no further."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from replay.exactness import Got
from replay.exactness.judge import judge, judge_twin
from replay.model import Case, Exact, Inexact, Problem, Spec
from replay.stages import STAGES
from replay.stages.stage import Budget, Outputs, Stage
from tests.conftest import make_case

BUDGET = Budget("other_order", ulp=2, flips=3, reason="a sum in another order")
LOOSE = dataclasses.replace(STAGES["moe.combine"], budgets={"out": BUDGET})
CASE = make_case("moe.combine", tokens=4)
INPUTS = LOOSE.inputs(CASE)
WANT = LOOSE.expected(CASE.problem, INPUTS)


def off(*steps: int, row: int = 2) -> Got:
    """The oracle's output with the first elements of a row so many representable numbers away."""
    out = WANT["out"].copy()
    out[row, : len(steps)] += np.array(steps, np.int16).astype(np.uint16)
    return Got({"out": out}, 0xFF)


def judged(*repeats: Got, stage: Stage = LOOSE, case: Case = CASE) -> Exact | Inexact:
    """The outcome of these repeats."""
    return judge(stage, case, INPUTS, WANT, repeats, ())


def test_within_its_budget() -> None:
    """As far as the budget goes, with what was spent; the same bits without a budget are a FAIL."""
    found = judged(off(1, 0, 2), off(1, 0, 2))
    assert found == Exact("WITHIN_ULP", 2, detail="out within other_order: 2 of 2 scaled ulp, 2 of 3 flips a row")
    assert isinstance(judged(off(1), stage=STAGES["moe.combine"]), Inexact)
    assert judged(off(0)) == Exact("BITWISE", 1)


@pytest.mark.parametrize("steps", [(3,), (1, 1, 1, 1)], ids=["too far", "too many"])
def test_beyond_its_budget(steps: tuple[int, ...]) -> None:
    """Row, token and budget are named; rows within the budget do not count as wrong."""
    got = off(*steps)
    got.outputs["out"][0, 0] += 1
    found = judged(got)
    assert isinstance(found, Inexact)
    assert (found.status, found.row) == ("FAIL", 2)
    assert "(token 2, experts" in found.detail
    assert f"{max(steps)} scaled ulp (budget other_order: 2, 3 flips)" in found.detail
    assert "1 of 4 rows wrong" in found.detail


def test_a_row_of_larger_terms_allows_more() -> None:
    """row_scale is the absmax of what was reduced into the row: the same distance is less of it."""
    scale = np.abs(np.array([1e3, 1e3, 1e3, 1e3]))
    scaled = dataclasses.replace(LOOSE, row_scale=lambda p, t, name: scale)
    assert isinstance(judged(off(9)), Inexact)
    assert getattr(judged(off(9), stage=scaled), "grade", "") == "WITHIN_ULP"


def test_repeats_that_differ_within_the_budget_are_not_averaged_away() -> None:
    """NONDETERMINISTIC, with the row."""
    found = judged(off(1), off(2), off(1))
    assert isinstance(found, Inexact)
    assert (found.status, found.row) == ("NONDETERMINISTIC", 2)


def test_a_guard_band_weighs_more_than_a_budget() -> None:
    """What was written outside is a FAIL however near the output is."""
    found = judge(LOOSE, CASE, INPUTS, WANT, [off(1)], ["wrote outside out"])
    assert found == Inexact("FAIL", -1, "wrote outside out")


def test_a_twin_has_the_same_budget() -> None:
    """Other bytes and strided inputs are held to what the case is held to."""
    twin = CASE.twinned("strided")
    assert judge_twin(LOOSE, twin, INPUTS, WANT, off(2)) is None
    found = judge_twin(LOOSE, twin, INPUTS, WANT, off(3))
    assert found is not None
    assert found.detail.startswith("on strided inputs (a kernel that takes contiguous ones only declares")


# ---------------------------------------------------------------- a stage that selects

VALUES = np.array([[5, 9, 9, 1], [7, 7, 7, 7], [0, 1, 2, 3]], np.int32)


def _canonical(problem: Problem, inputs: Any, outputs: Outputs) -> Outputs:
    """A choice of a largest value is as good as the lowest index of one; anything else stays as it is."""
    chosen = outputs["index"]
    best = VALUES.max(1)
    right = [0 <= i < 4 and VALUES[r, i] == best[r] for r, i in enumerate(chosen)]
    return {"index": np.where(right, VALUES.argmax(1), chosen).astype(np.int32)}


GREEDY = dataclasses.replace(
    STAGES["moe.route"], selects=True, canonical=_canonical, specs=lambda p: (Spec("index", "out", (3,), "i32"),),
    label=lambda case, output, row: f"token {row}", modes={},
)  # fmt: skip


@pytest.mark.parametrize(
    ("chosen", "grade", "detail"),
    [
        ([1, 0, 3], "BITWISE", "lowest index first"),
        ([2, 0, 3], "TIE_EQUIVALENT", "not the lowest index first in 1 rows of index, first 0"),
        ([2, 3, 3], "TIE_EQUIVALENT", "not the lowest index first in 2 rows of index, first 0"),
        ([1, 0, 2], "FAIL", "row 2 (token 2) of index"),
    ],
)
def test_a_selection_among_equals(chosen: list[int], grade: str, detail: str) -> None:
    """Any index of a largest value is right, and whether it is the lowest is told; another value is not."""
    got = Got({"index": np.array(chosen, np.int32)}, 0xFF)
    found = judge(GREEDY, CASE, {}, {"index": np.array([1, 0, 3], np.int32)}, [got, got], ())
    assert (getattr(found, "grade", "") or getattr(found, "status", "")) == grade
    assert found.detail.startswith(detail)


def test_ties_that_fall_otherwise_in_each_repeat_are_one_answer() -> None:
    """Repeats are compared in their canonical form: an atomic's order is no race in the result."""
    repeats = [Got({"index": np.array(i, np.int32)}, 0xFF) for i in ([1, 0, 3], [2, 1, 3])]
    found = judge(GREEDY, CASE, {}, {"index": np.array([1, 0, 3], np.int32)}, repeats, ())
    assert getattr(found, "grade", "") == "TIE_EQUIVALENT"
