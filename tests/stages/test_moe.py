"""The stages: relabelling keeps outputs, floors follow the routes, inputs are the same bytes every time."""

import itertools

import numpy as np
import pytest

from replay.model import Case, CaseId, Routes, Source
from replay.oracle.moe import ExpertRows
from replay.stages import STAGES, problem_for
from tests.conftest import QWEN36, SMALL, make_case

WEIGHTED = [s for s in STAGES.values() if s.relabel]


@pytest.mark.parametrize("stage", WEIGHTED, ids=lambda s: s.name)
def test_relabelling_keeps_every_output(stage) -> None:  # type: ignore[no-untyped-def]  # parametrised
    """Experts moved to other slots, in order: the expected output is the same to the bit."""
    case = make_case(stage.name, tokens=2)
    inputs = stage.inputs(case)
    active = next(t for t in inputs.values() if isinstance(t, ExpertRows)).experts
    want = stage.oracle(case.problem, inputs)
    slots = np.arange(SMALL.experts - len(active), SMALL.experts)
    moved = stage.oracle(case.problem, stage.relabel(inputs, slots))
    for name, array in want.items():
        assert (moved[name] == array).all()


@pytest.mark.parametrize("stage", STAGES.values(), ids=lambda s: s.name)
def test_inputs_are_drawn_alike_every_time(stage) -> None:  # type: ignore[no-untyped-def]  # parametrised
    """A child process draws the bytes that the parent's oracle saw; another seed draws others."""
    from replay.stages.moe_chain import _chain

    case = make_case(stage.name)
    first = stage.inputs(case)
    _chain.cache_clear()
    again = stage.inputs(case)
    for name, value in first.items():
        a, b = (v.rows if isinstance(v, ExpertRows) else v for v in (value, again[name]))
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("stage", STAGES.values(), ids=lambda s: s.name)
def test_inputs_and_outputs_fit_the_specs(stage) -> None:  # type: ignore[no-untyped-def]  # parametrised
    """Every spec has its tensor, of its shape."""
    case = make_case(stage.name, padding=0.3)
    inputs = stage.inputs(case)
    outputs = stage.oracle(case.problem, inputs)
    for spec in stage.specs(case.problem):
        if spec.role == "out":
            assert outputs[spec.name].shape[1:] == spec.shape[1:]
            assert len(outputs[spec.name]) <= spec.shape[0]
            continue
        value = inputs[spec.name]
        shape = (value.total, *value.rows.shape[1:]) if isinstance(value, ExpertRows) else value.shape
        assert shape == spec.shape


def test_work_counts_distinct_experts() -> None:
    """Two records of equal shape and different skew have different bytes."""
    stage = STAGES["moe.layer"]
    problem = problem_for(stage, QWEN36, 2, {})
    alike = Case(CaseId(problem, Source("x", "L9", 0, 2), 7), Routes((tuple(range(8)),) * 2))
    apart = Case(CaseId(problem, Source("x", "L9", 0, 2), 7), Routes((tuple(range(8)), tuple(range(8, 16)))))
    a, b = (stage.work(problem, stage.inputs(c)) for c in (alike, apart))
    assert b.read_bytes == 2 * a.read_bytes
    assert a.read_bytes == 8 * (2048 * 256 + 4 * 256 + 128 * 2048 + 4 * 2048)
    assert a.int8_ops == 2 * 8 * 2 * 3 * 2048 * 128


def test_a_token_is_the_same_in_every_window() -> None:
    """Row 5 of a layer has the same hidden values alone and inside a window."""
    stage = STAGES["moe.quantize"]
    rows = tuple(tuple(range(8)) for _ in range(4))
    one = Case(CaseId(problem_for(stage, QWEN36, 1, {}), Source("x", "L9", 5, 1), 7), Routes(rows[:1]))
    four = Case(CaseId(problem_for(stage, QWEN36, 4, {}), Source("x", "L9", 3, 4), 7), Routes(rows))
    assert (stage.inputs(one)["x"][0] == stage.inputs(four)["x"][2]).all()


# ---------------------------------------------------------------- the map that a kernel with atomics may make


def accepted(case: Case, permuted: np.ndarray) -> bool:
    """Whether the stage takes a map for right."""
    stage = STAGES["moe.route"]
    inputs = stage.inputs(case)
    want = stage.oracle(case.problem, inputs)
    found = stage.canonical(case.problem, inputs, want | {"unpermuted_to_permuted": permuted})
    return bool((found["unpermuted_to_permuted"] == want["unpermuted_to_permuted"]).all())


RANKS = ("off", "ep4:0", "ep4:1", "ep4:3")
MAPS = [make_case("moe.route", tokens=24, padding=0.2, expert_map=rank) for rank in RANKS]


@pytest.mark.parametrize("case", MAPS, ids=RANKS)
def test_any_order_inside_an_expert_is_right(case: Case) -> None:
    """Every expert's rows turned round at once, padding and other ranks' experts left at −1."""
    want = STAGES["moe.route"].oracle(case.problem, STAGES["moe.route"].inputs(case))
    offsets = want["offsets"]
    permuted = want["unpermuted_to_permuted"].copy()
    for first, end in itertools.pairwise(offsets):
        mine = (permuted >= first) & (permuted < end)
        permuted[mine] = first + end - 1 - permuted[mine]
    assert (permuted != want["unpermuted_to_permuted"]).any()
    assert accepted(case, permuted)


@pytest.mark.parametrize("case", MAPS, ids=RANKS)
def test_a_map_that_is_none_is_wrong(case: Case) -> None:
    """A row used twice, a row of the next expert or of the one before, an id of −1 that got a row, a row past the end."""
    want = STAGES["moe.route"].oracle(case.problem, STAGES["moe.route"].inputs(case))
    right, offsets = want["unpermuted_to_permuted"], want["offsets"]
    busy = np.flatnonzero(np.diff(offsets) > 1)
    first = int(offsets[busy[1]])

    def changed(at: np.ndarray, to: int) -> np.ndarray:
        permuted = right.copy()
        assert at.any()
        permuted[at] = to
        return permuted

    assert not accepted(case, changed(right == first + 1, first))  # twice in one expert
    assert not accepted(case, changed(right == first, int(offsets[busy[1] + 1])))  # the next one's first row
    assert not accepted(case, changed(right == first, first - 1))  # the last row of the one before
    assert not accepted(case, changed(right == -1, 0))
    assert not accepted(case, changed(right == -1, -2))
    assert not accepted(case, changed(right == right.max(), int(offsets[-1])))
    swapped = right.copy()  # a bijection still, but not grouped
    swapped[right == first], swapped[right == first - 1] = first - 1, first
    assert not accepted(case, swapped)
