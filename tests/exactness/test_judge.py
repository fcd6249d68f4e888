"""Grades below BITWISE: within a stage's budget, or another choice among equal values; and no further."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from replay.exactness import Got
from replay.exactness.judge import TWIN, judge, with_twin
from replay.model import Case, Exact, Geometry, Inexact, Problem, Spec, Twin
from replay.oracle.arith import bf16_to_f32
from replay.stages import STAGES
from replay.stages.stage import Budget, Outputs, Stage
from tests.conftest import make_case

BUDGET = Budget("other_order", ulp=2, flips=3)  # as a sum in another order would need
LOOSE = dataclasses.replace(STAGES["moe.combine"], budgets=lambda p: {"out": BUDGET})
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
    assert found == Exact("WITHIN_ULP", 2, detail="out within other_order: 2 of 2 scaled ulp (elementwise 2), 2 of 3 flips a row")
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
    """row_scale is the absmax of what was reduced into the row: the same distance is less of it, and printed beside it."""
    scaled = dataclasses.replace(LOOSE, row_scale=lambda p, t, name, want: np.full((4, 1), 1e3))
    assert isinstance(judged(off(9)), Inexact)
    found = judged(off(9), stage=scaled)
    assert getattr(found, "grade", "") == "WITHIN_ULP"
    assert "(elementwise 9)" in found.detail


def test_past_a_budget_the_worst_is_what_is_worst_on_its_scale() -> None:
    """An element that cancels is far off by its own measure and no fault; the one named is the one past the budget."""
    scaled = dataclasses.replace(LOOSE, row_scale=lambda p, t, name, want: np.full((4, 1), 1.0))
    out = WANT["out"].copy()
    wide = bf16_to_f32(out[2])
    small, large = int(np.abs(wide).argmin()), int(np.abs(wide).argmax())
    out[2, large] += 16
    out[2, small] ^= 0x8000
    found = judged(Got({"out": out}, 0xFF), stage=scaled)
    assert isinstance(found, Inexact)
    assert f"worst at column {large} " in found.detail


def test_repeats_that_differ_within_the_budget_are_not_averaged_away() -> None:
    """NONDETERMINISTIC, with the row."""
    found = judged(off(1), off(2), off(1))
    assert isinstance(found, Inexact)
    assert (found.status, found.row) == ("NONDETERMINISTIC", 2)


def test_a_guard_band_weighs_more_than_a_budget() -> None:
    """What was written outside is a FAIL however near the output is."""
    found = judge(LOOSE, CASE, INPUTS, WANT, [off(1)], ["wrote outside out"])
    assert found == Inexact("FAIL", -1, "wrote outside out")


@pytest.mark.parametrize("name", TWIN)
def test_a_twin_counts_as_much_as_a_repeat(name: Twin) -> None:
    """A twin within the budget takes BITWISE from its case; one beyond it is a FAIL that says on which inputs."""
    twin, green = CASE.twinned(name), Exact("BITWISE", 2)
    assert with_twin(LOOSE, twin, INPUTS, WANT, off(0), green) == green
    less = with_twin(LOOSE, twin, INPUTS, WANT, off(2), green)
    assert isinstance(less, Exact)
    assert (less.grade, less.detail.startswith(TWIN[name])) == ("WITHIN_ULP", True)
    wrong = with_twin(LOOSE, twin, INPUTS, WANT, off(3), green)
    assert isinstance(wrong, Inexact)
    assert wrong.detail.startswith(TWIN[name])


def test_the_mode_that_matches_is_told_of_a_twin_too() -> None:
    """Wrong on strided inputs alone, and right there under another mode."""
    stage = STAGES["moe.quantize"]
    case = make_case("moe.quantize", Geometry.parse("qwen36:tp4:hidden=2048,experts=16,top_k=4"), tokens=64).twinned("strided")
    inputs = stage.inputs(case)
    other = stage.oracle(case.problem.with_mode("quant", "div_half_even"), inputs)
    found = with_twin(stage, case, inputs, stage.expected(case.problem, inputs), Got(other, 0xFF), Exact("BITWISE", 2))
    assert isinstance(found, Inexact)
    assert "matches mode quant=div_half_even" in found.detail


# ---------------------------------------------------------------- a stage that selects

VALUES = np.array([[5, 9, 9, 1], [7, 7, 7, 7], [0, 1, 2, 3]], np.int32)


def _canonical(problem: Problem, inputs: Any, outputs: Outputs) -> Outputs:
    """A choice of a largest value is as good as the lowest index of one; anything else stays as it is."""
    chosen = outputs["index"]
    best = VALUES.max(1)
    right = [0 <= i < 4 and VALUES[r, i] == best[r] for r, i in enumerate(chosen)]
    return {"index": np.where(right, VALUES.argmax(1), chosen).astype(np.int32)}


GREEDY = dataclasses.replace(
    STAGES["moe.route"], arranged=lambda problem, inputs, outputs: outputs, canonical=_canonical, specs=lambda p: (Spec("index", "out", (3,), "i32"),),
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
