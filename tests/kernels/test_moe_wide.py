"""A MoE without quantisation: kernels within their budgets at odd and real sizes, wrong ones red, int8 kernels not asked."""

from functools import partial
from typing import Any

import pytest

from replay.errors import InputError
from replay.kernels import eager_wide
from replay.kernels.registry import registered, unavailable
from replay.kernels.sycl import moe_wide
from replay.model import Exact, Geometry, Inexact
from replay.stages import STAGES
from tests.conftest import QWEN36, judge_here, make_case

ODD = Geometry.parse("qwen36:tp4:hidden=96,experts=5,top_k=3,inter=20")
WIDE = {"quant": "bf16", "epilogue": "bf16"}
KERNELS = [k.id for k in registered().values() if k.id.endswith(":bf16")]
STAGES_OF = {k.split(":")[1] for k in KERNELS}


def wide_case(stage: str, *args: Any, **kwargs: Any) -> Any:
    """A case in the mode."""
    modes = {name: value for name, value in WIDE.items() if name in STAGES[stage].modes}
    return make_case(stage, *args, **modes, **kwargs)


@pytest.mark.parametrize("act", ["silu_round_twice", "silu_f32"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_within_its_budget_on_odd_sizes_with_padding(kernel: str, act: str) -> None:
    """Sizes that are no power of two, some ids −1, either activation."""
    stage = kernel.split(":")[1]
    modes = {"act": act} if "act" in STAGES[stage].modes else {}
    outcome = judge_here(kernel, wide_case(stage, ODD, tokens=4, padding=0.3, **modes))
    assert isinstance(outcome, Exact), outcome


@pytest.mark.parametrize("kernel", KERNELS)
def test_within_its_budget_at_the_models_own_size(kernel: str) -> None:
    """Qwen3.6 at TP4."""
    outcome = judge_here(kernel, wide_case(kernel.split(":")[1], QWEN36, tokens=2))
    assert isinstance(outcome, Exact), outcome


def test_the_gpu_body_on_a_cpu_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a card will run."""
    monkeypatch.setattr(moe_wide, "prepare_layer", partial(moe_wide.prepare_layer, body="gpu"))
    outcome = judge_here("sycl:moe.layer:bf16", wide_case("moe.layer", ODD, tokens=4, padding=0.3))
    assert isinstance(outcome, Exact), outcome


def _cut_off(right: Any) -> Any:
    """Rounded towards zero."""

    def gemm(a: Any, offsets: Any, w: Any, bias: Any, out: Any) -> None:
        import torch

        right(a, offsets, w, bias, out)
        wide = torch.empty(out.shape, dtype=torch.float32)
        for e in range(len(offsets) - 1):
            part = slice(int(offsets[e]), int(offsets[e + 1]))
            wide[part] = a[part].float() @ w[e].float()
        out[: int(offsets[-1])] = (wide.view(torch.int32) & -65536).view(torch.float32)[: int(offsets[-1])].bfloat16()

    return gemm


def _summed_in_bf16(right: Any) -> Any:
    """Each partial sum through bf16."""

    def gemm(a: Any, offsets: Any, w: Any, bias: Any, out: Any) -> None:
        for e in range(len(offsets) - 1):
            part = slice(int(offsets[e]), int(offsets[e + 1]))
            total = out[part] * 0
            for k in range(a.shape[1]):
                total = total + a[part, k, None] * w[e][k]
            out[part] = total

    return gemm


def _next_expert(right: Any) -> Any:
    """Another expert's weights."""
    return lambda a, offsets, w, bias, out: right(a, offsets, w.roll(1, 0), bias, out)


@pytest.mark.parametrize("stage", ["moe.gemm1", "moe.layer"])
@pytest.mark.parametrize("fault", [_summed_in_bf16, _next_expert])
def test_a_planted_fault_is_red(stage: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a budget must not hide."""
    geometry = Geometry.parse("qwen36:tp4:hidden=256,experts=8,top_k=3,inter=32")
    monkeypatch.setattr(eager_wide, "grouped_gemm", fault(eager_wide.grouped_gemm))
    outcome = judge_here(f"eager:{stage}:bf16", wide_case(stage, geometry, tokens=4))
    assert isinstance(outcome, Inexact), outcome


def test_rounding_towards_zero_is_red_where_there_is_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of bf16 in half of the columns: too many flips."""
    geometry = Geometry.parse("qwen36:tp4:hidden=256,experts=8,top_k=3,inter=64")
    monkeypatch.setattr(eager_wide, "grouped_gemm", _cut_off(eager_wide.grouped_gemm))
    outcome = judge_here("eager:moe.gemm1:bf16", wide_case("moe.gemm1", geometry, tokens=4))
    assert isinstance(outcome, Inexact), outcome
    assert "budget f32_sums: 1, 4 flips" in outcome.detail


@pytest.mark.parametrize("stage", sorted(STAGES_OF))
def test_kernels_of_int8_rows_are_not_asked(stage: str) -> None:
    """They are unavailable in the mode, and those of bf16 rows without it."""
    problems = wide_case(stage, ODD).problem, make_case(stage, ODD).problem
    for kernel in (k for k in registered().values() if k.stage == stage and "cpu" in k.devices):
        found = [unavailable(kernel, problem, "cpu") is None for problem in problems]
        assert found == [kernel.id.endswith(":bf16"), not kernel.id.endswith(":bf16")], kernel.id


@pytest.mark.parametrize(
    ("modes", "told"),
    [
        ({"quant": "bf16"}, "expected both bf16, or neither"),
        ({"epilogue": "bf16"}, "expected both bf16, or neither"),
        ({**WIDE, "shared": "on"}, "expected off where nothing is quantised"),
    ],
)
def test_half_a_mode_is_refused(modes: dict[str, str], told: str) -> None:
    """A layer quantises everywhere or nowhere."""
    with pytest.raises(InputError, match=told):
        make_case("moe.layer", ODD, **modes)
