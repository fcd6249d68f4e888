"""MISTRUSTED: an oracle that could not have failed, or that calls what it judges, is refused by name."""

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from replay.exactness.trust import candidates_code, dispatched, mistrust, probed
from replay.kernels import eager
from replay.stages import STAGES
from tests.conftest import QWEN36, make_case


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_our_own_oracles_are_trusted(stage: str, tokens: int) -> None:
    """Every probe of every stage moves its output, on a suite of single tokens too, and no oracle reaches a kernel."""
    assert STAGES[stage].probes
    assert mistrust(STAGES[stage], [make_case(stage, tokens=tokens)]) is None
    assert mistrust(STAGES[stage], [make_case(stage, QWEN36, tokens=tokens)]) is None
    assert candidates_code(STAGES[stage].oracle) == set()


@pytest.mark.parametrize("stage", STAGES)
def test_an_oracle_that_ignores_an_input_is_named(stage: str) -> None:
    """Each probe in turn is held where it was: the stage is mistrusted for exactly that input."""
    whole = STAGES[stage]
    case = make_case(stage, tokens=4)
    inputs = whole.inputs(probed(whole, case))
    for name in whole.probes:
        deaf = dataclasses.replace(whole, oracle=lambda p, t, name=name: whole.oracle(p, {**t, name: inputs[name]}))
        assert mistrust(deaf, [case]) == f"redrawing {name} moves no expected output beside {case.id}"


def test_an_oracle_that_calls_the_candidates_op_is_refused() -> None:
    """A library's op, whatever it computes: the lab's checker used the fused op as its own reference."""

    @torch.library.custom_op("lab::fused", mutates_args=())
    def fused(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    whole = STAGES["moe.quantize"]

    def oracle(problem: Any, t: Any) -> Any:
        fused(torch.ones(2))
        return whole.oracle(problem, t)

    case = make_case("moe.quantize")
    found = mistrust(dataclasses.replace(whole, oracle=oracle), [case])
    assert found == "the oracle calls operations that are not torch's: lab::fused"
    assert dispatched(lambda: {"y": torch.ones(3).add(1).numpy()})[1] == []


def test_an_oracle_made_of_kernels_is_refused() -> None:
    """However many calls away."""

    def helper(t: Any) -> Any:
        return eager.prepare_combine(t, {})

    def oracle(problem: Any, t: Any) -> Any:
        return helper(t)

    stage = dataclasses.replace(STAGES["moe.combine"], oracle=oracle)
    found = mistrust(stage, [make_case("moe.combine")])
    assert found is not None
    assert found.startswith("the oracle calls what it should judge: replay.kernels.eager")


def test_edge_cases_are_not_held_against_an_oracle() -> None:
    """A token without experts, alone in its suite, leaves the stage unprobed; beside another case it is passed over."""
    case = make_case("moe.combine", tokens=2)
    empty = msgspec.structs.replace(case, held=msgspec.structs.replace(case.routes, topk_ids=((-1,) * 4,) * 2))
    stage = STAGES["moe.combine"]
    assert stage.degenerate(empty.problem, stage.inputs(empty))
    assert not stage.degenerate(case.problem, stage.inputs(case))
    constant = dataclasses.replace(
        STAGES["moe.combine"], oracle=lambda p, t: {"out": np.zeros((2, p.geometry.hidden), np.uint16)}
    )
    assert mistrust(constant, [empty]) is None
    assert mistrust(constant, [empty, case]) is not None


def test_a_token_of_another_rank_is_an_edge() -> None:
    """Under an expert map a token may have no expert here, and one case whose ids all lie elsewhere spoils no stage."""
    stage = STAGES["moe.route"]
    elsewhere = make_case("moe.route", tokens=1, expert_map="ep16:15")
    ids = msgspec.structs.replace(elsewhere.routes, topk_ids=((1, 2, 3, 4),))
    elsewhere = msgspec.structs.replace(elsewhere, held=ids)
    assert stage.degenerate(elsewhere.problem, stage.inputs(elsewhere))
    here = msgspec.structs.replace(elsewhere, held=msgspec.structs.replace(ids, topk_ids=((15, 2, 3, 4),)))
    assert not stage.degenerate(here.problem, stage.inputs(here))
    assert mistrust(stage, [elsewhere]) is None
    assert mistrust(stage, [elsewhere, here]) is None


def test_a_row_of_zeros_is_an_edge() -> None:
    """Its output may legitimately stay where it is."""
    case = make_case("moe.layer", tokens=2)
    stage = STAGES["moe.layer"]
    inputs = dict(stage.inputs(case))
    inputs["x"] = np.array(inputs["x"])
    assert not stage.degenerate(case.problem, inputs)
    inputs["x"][1] = 0x8000  # −0 is zero as well
    assert stage.degenerate(case.problem, inputs)
