"""Our MoE kernels are BITWISE on ordinary, odd and edge cases."""

import msgspec
import pytest

from replay.kernels.registry import missing, registered
from replay.kernels.sycl import NEEDS
from replay.model import Case, Exact, Geometry, Kernel, Problem, Routes
from replay.stages import STAGES
from tests.conftest import QWEN36, SMALL, judge_here, make_case, takes_defaults

# What is made of torch's operations alone runs here, wherever it is meant for; at small sizes, where it copies weights a row.
KERNELS = {
    k.id: k
    for k in registered().values()
    if k.stage.startswith("moe.") and ("cpu" in k.devices or k.id.startswith("eager:")) and takes_defaults(k)
}
LARGE = [k for k in KERNELS.values() if "cpu" in k.devices]
ODD = Geometry.parse("qwen36:tp4:hidden=96,experts=5,top_k=3,inter=20")


def exact(kernel: Kernel, case: Case) -> None:
    """The kernel is BITWISE on the case, or says why not."""
    outcome = judge_here(kernel.id, case)
    assert isinstance(outcome, Exact), outcome


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda k: k.id)
@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_exact_on_odd_sizes_with_padding(kernel: Kernel, tokens: int) -> None:
    """Sizes that are no power of two, some ids −1."""
    exact(kernel, make_case(kernel.stage, ODD, tokens=tokens, seed=tokens, padding=0.3))


@pytest.mark.parametrize("kernel", LARGE, ids=lambda k: k.id)
def test_exact_at_the_models_own_size(kernel: Kernel) -> None:
    """Qwen3.6 at TP4, four tokens."""
    exact(kernel, make_case(kernel.stage, QWEN36, tokens=4))


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda k: k.id)
def test_exact_when_every_id_is_padding(kernel: Kernel) -> None:
    """No valid row: outputs of the valid rows are empty, and the rest stays untouched."""
    case = make_case(kernel.stage)
    nobody = Routes(tuple((-1,) * SMALL.top_k for _ in case.routes.topk_ids))
    exact(kernel, msgspec.structs.replace(case, held=nobody))


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda k: k.id)
def test_exact_when_all_tokens_choose_alike(kernel: Kernel) -> None:
    """All rows in the same few experts, at the end of the range."""
    case = make_case(kernel.stage, tokens=9)
    last = tuple(range(SMALL.experts - SMALL.top_k, SMALL.experts))
    exact(kernel, msgspec.structs.replace(case, held=Routes((last,) * 9)))


@pytest.mark.parametrize("kernel", [k for k in LARGE if "epilogue" in STAGES[k.stage].modes], ids=lambda k: k.id)
def test_exact_in_the_other_epilogue(kernel: Kernel) -> None:
    """scales_first as well as row_then_col."""
    exact(kernel, make_case(kernel.stage, QWEN36, tokens=8, epilogue="scales_first"))


@pytest.mark.parametrize("kernel", [k for k in KERNELS.values() if "bias" in STAGES[k.stage].modes], ids=lambda k: k.id)
def test_exact_with_a_bias(kernel: Kernel) -> None:
    """The bias is added in f32, before the one rounding."""
    exact(kernel, make_case(kernel.stage, tokens=5, bias="on"))


def test_group_quantisation_exists_for_quantize_alone() -> None:
    """moe.quantize has group_trunc:G; composites refuse it."""
    exact(KERNELS["eager:moe.quantize"], make_case("moe.quantize", quant="group_trunc:16"))
    from replay.errors import InputError

    with pytest.raises(InputError, match=r"quant of moe\.layer"):
        make_case("moe.layer", quant="group_trunc:16")
    with pytest.raises(InputError, match="a group that divides hidden 64"):
        make_case("moe.quantize", quant="group_trunc:7")


def test_sycl_is_available_here() -> None:
    """The tests above ran SYCL for real: nothing it needs is missing on a test machine."""
    assert [missing(need) for need in NEEDS] == [None] * len(NEEDS)


def test_problem_hides_the_source() -> None:
    """A kernel is given shapes and modes, never which captured row it has."""
    assert set(Problem.__struct_fields__) == {"stage", "geometry", "rows", "modes", "layout"}
