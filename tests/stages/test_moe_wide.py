"""The MoE stages without quantisation: which of a stage's tensors and modes its oracle is given."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from replay.model import Geometry
from replay.oracle import moe, moe_wide
from replay.stages import STAGES
from tests.conftest import make_case

ODD = Geometry.parse("qwen36:tp4:hidden=36,experts=5,top_k=3,inter=20")
ASKED = {"quant": "bf16", "epilogue": "bf16", "act": "silu_f32", "combine_fma": "chain"}


def gemm1(t: Any) -> Any:
    """Rows a against w13."""
    return moe_wide.grouped_gemm(t["a"], t["offsets"], t["w13"])


def act_quant(t: Any) -> Any:
    """The rows that are somebody's."""
    return moe_wide.activate(t["gate_up"][: t["offsets"][-1]], "silu_f32")


def gemm2(t: Any) -> Any:
    """Rows h against w2."""
    return moe_wide.grouped_gemm(t["h"], t["offsets"], t["w2"])


def middle(t: Any) -> Any:
    """The three in a row."""
    gate_up = gemm1(t)
    return gemm2({**t, "h": act_quant({**t, "gate_up": gate_up})})


def layer(t: Any) -> Any:
    """Routes and rows to their places, the middle, and back."""
    _, offsets, permuted = moe.route(t["topk_ids"], ODD.experts)
    y = middle({**t, "a": moe_wide.remap(t["x"], permuted), "offsets": offsets})
    return moe.combine(y, permuted, t["topk_weights"], "chain")


@pytest.mark.parametrize("by_hand", [gemm1, act_quant, gemm2, middle, layer], ids=lambda f: f.__name__)
def test_an_oracle_is_given_the_stages_own_tensors(by_hand: Callable[[Any], Any]) -> None:
    """The stage's output is what its tensors give, put together one by one; some pairs are nobody's."""
    stage = STAGES[f"moe.{by_hand.__name__}"]
    case = make_case(stage.name, ODD, tokens=4, padding=0.3, **{n: v for n, v in ASKED.items() if n in stage.modes})
    inputs = stage.inputs(case)
    (output,) = stage.oracle(case.problem, inputs).values()
    assert np.array_equal(output, by_hand(inputs))
