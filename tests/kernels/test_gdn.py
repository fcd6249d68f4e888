"""GDN kernels: the oracle's bits in every mode, size, dtype and layout, on batches that hold every edge."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from replay.kernels.sycl import gdn as launches
from replay.model import Exact, Geometry
from replay.stages import STAGES
from tests.conftest import judge_here
from tests.gdn import EDGES, SMALL, state_case, state_file

KERNELS = {
    "gdn.conv": ("eager:gdn.conv", "sycl:gdn.conv:channels"),
    "gdn.recurrent": ("eager:gdn.recurrent", "sycl:gdn.recurrent:heads"),
    "gdn.step": ("eager:gdn.step", "sycl:gdn.step:staged", "sycl:gdn.step:fused"),
}
ALL = [(stage, kernel) for stage, kernels in KERNELS.items() for kernel in kernels]
SYCL = [(stage, kernel) for stage, kernel in ALL if kernel.startswith("sycl")]
MODES = [
    {"reorder_input": "interleaved"}, {"conv_bias": "bias_last"}, {"conv_bias": "bias_first"}, {"padding_z": "untouched"},
    {"l2norm": "rsqrt_eps_in"}, {"l2norm": "eps_out"}, {"softplus": "softplus_log1p"}, {"dt_bias": "bf16"},
    {"state_layout": "k_v"}, {"ssm_state": "bf16"}, {"ssm_state": "f16"}, {"ssm_state": "f16", "state_layout": "k_v"},
    {"conv_slot_stride": "1999"}, {"ssm_slot_stride": "20011"},
]  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small state file."""
    return state_file(tmp_path_factory.mktemp("states"))


def bitwise(kernel: str, *args: object, **modes: str) -> None:
    """The kernel gives the oracle's bits on the case and its twins."""
    outcome = judge_here(kernel, state_case(kernel.split(":")[1], *args, **modes))  # type: ignore[arg-type]  # forwarded
    assert isinstance(outcome, Exact), outcome
    assert outcome.grade == "BITWISE", outcome


@pytest.mark.parametrize(("stage", "kernel"), ALL)
def test_a_batch_with_every_edge(stage: str, kernel: str, file: Path) -> None:
    """Padding, sequences without a token and of several: right rows, right slots, and nobody else's touched."""
    bitwise(kernel, file, SMALL, EDGES)


@pytest.mark.parametrize("modes", MODES, ids=lambda m: ",".join(f"{k}={v}" for k, v in m.items()))
def test_every_mode(modes: dict[str, str], file: Path) -> None:
    """Each named mode, on the batch of edges, in every kernel of the stages that have it."""
    for stage, kernel in ALL:
        if set(modes) <= set(STAGES[stage].modes):
            bitwise(kernel, file, SMALL, EDGES, **modes)


@pytest.mark.parametrize("ratio", range(1, 9))
def test_head_ratios(ratio: int, tmp_path: Path) -> None:
    """One to eight v-heads to a k-head, three k-heads, in either order of the projection."""
    geometry = Geometry.parse(f"qwen36:tp4:head_dim=64,k_heads=3,v_heads={3 * ratio}")
    file = state_file(tmp_path, geometry, sequences=2, steps=1)
    for order in ("contiguous", "interleaved"):
        for kernel in ("sycl:gdn.step:fused", "sycl:gdn.step:staged"):
            bitwise(kernel, file, geometry, 2, reorder_input=order)


@pytest.mark.parametrize(("head_dim", "width"), [(64, 2), (64, 3), (64, 5), (64, 7), (128, 4), (256, 4), (256, 5)])
def test_head_dims_and_taps(head_dim: int, width: int, tmp_path: Path) -> None:
    """Head dims of 64, 128 and 256, convs of two to seven taps."""
    geometry = Geometry.parse(f"qwen36:tp4:head_dim={head_dim},k_heads=1,v_heads=2,conv_width={width}")
    file = state_file(tmp_path, geometry, sequences=2, steps=1)
    for kernel in ("sycl:gdn.step:fused", "sycl:gdn.conv:channels"):
        bitwise(kernel, file, geometry, 2)


@pytest.mark.parametrize("modes", [{}, *MODES], ids=lambda m: ",".join(f"{k}={v}" for k, v in m.items()) or "default")
def test_the_gpu_body_on_a_cpu_device(modes: dict[str, str], file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a card will run gives the same bits here: shuffles, registers and all."""
    for name in ("prepare_conv", "prepare_recurrent", "prepare_step_staged", "prepare_step_fused"):
        monkeypatch.setattr(launches, name, partial(getattr(launches, name), body="gpu"))
    for stage, kernel in SYCL:
        if set(modes) <= set(STAGES[stage].modes):
            bitwise(kernel, file, SMALL, EDGES, **modes)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_the_gpu_body_of_wide_heads(head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other two head dims."""
    monkeypatch.setattr(launches, "prepare_step_fused", partial(launches.prepare_step_fused, body="gpu"))
    geometry = Geometry.parse(f"qwen36:tp4:head_dim={head_dim},k_heads=1,v_heads=3")
    bitwise("sycl:gdn.step:fused", state_file(tmp_path, geometry, sequences=2, steps=1), geometry, 2)


def test_a_state_that_overflows_f16_is_infinite_alike(tmp_path: Path) -> None:
    """Past 65,504 an f16 state is infinite, in kernels as in the oracle, and stays so without a NaN that was not there."""
    file = state_file(tmp_path, sequences=2, steps=1, ssm_state=np.full((2, 4, 64, 64), 65_400, np.float32))
    for kernel in KERNELS["gdn.step"]:
        bitwise(kernel, file, SMALL, 2, ssm_state="f16")


def test_a_layout_is_turned_and_not_read_otherwise(file: Path) -> None:
    """The same captured states in either layout give the same outputs and, turned, the same states."""
    stage = STAGES["gdn.step"]
    cases = [state_case("gdn.step", file, SMALL, EDGES, state_layout=layout) for layout in ("v_k", "k_v")]
    one, other = (stage.expected(c.problem, stage.inputs(c)) for c in cases)
    assert np.array_equal(one["core_attn_out"], other["core_attn_out"])
    slot = int(np.asarray(stage.inputs(cases[0])["slots"])[0])
    assert np.array_equal(one["ssm_state"][slot], other["ssm_state"][slot].swapaxes(1, 2))


def test_a_head_dim_that_no_kernel_has(file: Path, tmp_path: Path) -> None:
    """It says which there are."""
    geometry = Geometry.parse("qwen36:tp4:head_dim=32,k_heads=1,v_heads=1")
    with pytest.raises(ValueError, match=r"expected one of \(64, 128, 256\)"):
        launches.sizes_of(state_case("gdn.step", file, geometry, 2).problem, {})
