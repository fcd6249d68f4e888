"""Faults of GDN kernels from the field that need no speculation, each in small, with the right value."""

from pathlib import Path

import numpy as np
import pytest
import torch

from replay.kernels.registry import registered
from replay.kernels.sycl import gdn as launches
from replay.model import Exact, Geometry, Sequence
from replay.oracle import gdn as oracle
from replay.stages import STAGES
from tests.conftest import judge_here
from tests.gdn import SMALL, state_case, state_file

STEPS = [k.id for k in registered().values() if k.stage == "gdn.step" and "cpu" in k.devices]
CONVS = [k.id for k in registered().values() if k.stage == "gdn.conv" and "cpu" in k.devices]


def exact(kernel: str, *args: object, **modes: str) -> None:
    """The kernel is BITWISE on the case."""
    outcome = judge_here(kernel, state_case(kernel.split(":")[1], *args, **modes))  # type: ignore[arg-type]  # forwarded
    assert isinstance(outcome, Exact), outcome
    assert outcome.grade == "BITWISE"


@pytest.mark.parametrize("kernel", STEPS)
@pytest.mark.parametrize(("k_heads", "v_heads"), [(16, 48), (4, 12), (1, 3), (4, 4), (12, 12)])
def test_v_heads_three_to_one(kernel: str, k_heads: int, v_heads: int, tmp_path: Path) -> None:
    """vllm-xpu-kernels 438, 435: 48 v-heads, ratio 3, and 4 or 12 heads a rank; guard bands stay whole."""
    geometry = Geometry.parse(f"qwen36:tp4:head_dim=64,k_heads={k_heads},v_heads={v_heads}")
    exact(kernel, state_file(tmp_path, geometry, sequences=2, steps=1), geometry, 2)


@pytest.mark.parametrize("kernel", CONVS)
@pytest.mark.parametrize("order", ["contiguous", "interleaved"])
def test_z_is_a_copy_of_its_slice(kernel: str, order: str, tmp_path: Path) -> None:
    """vllm-xpu-kernels 399: a z slice of 384 a k-head, nine tokens: bitwise."""
    geometry = Geometry.parse("qwen36:tp4:head_dim=128,k_heads=1,v_heads=3")
    exact(kernel, state_file(tmp_path, geometry, sequences=9, steps=1), geometry, 9, reorder_input=order)


@pytest.mark.parametrize("kernel", STEPS)
def test_a_batch_of_padding_touches_nothing(kernel: str, tmp_path: Path) -> None:
    """vllm 33326: slot −1 alone: no state moves, and nothing before slot 0 is written."""
    exact(kernel, state_file(tmp_path), SMALL, tuple(Sequence(-1, (n,)) for n in range(3)), padding_z="untouched")


@pytest.mark.parametrize("kernel", STEPS)
def test_fifty_repeats_are_one_result(kernel: str, tmp_path: Path) -> None:
    """vllm-xpu-kernels 411: a sequence of sixteen tokens, fifty times: the same bits, and finite ones."""
    file = state_file(tmp_path, sequences=1, steps=16)
    case = state_case("gdn.step", file, SMALL, (Sequence(0, tuple(range(16))),))
    outcome = judge_here(kernel, case, repeats=50)
    assert isinstance(outcome, Exact), outcome
    want = STAGES["gdn.step"].expected(case.problem, STAGES["gdn.step"].inputs(case))
    assert np.isfinite(want["ssm_state"]).all()


@pytest.mark.parametrize(("slots", "slot"), [(3067, 3066), (3701, 3700)])
def test_the_strided_cache_of_the_report(slots: int, slot: int, tmp_path: Path) -> None:
    """vllm-xpu-kernels 545: a conv cache of six rows of 6144 a slot, 589,824 elements apart: six rows change, and every other
    byte of the storage keeps its zero; from slot 3641 on slot · stride is past 2^31."""
    geometry = Geometry.parse("qwen36:tp4:head_dim=128,k_heads=8,v_heads=32,conv_width=7")
    case = state_case("gdn.conv", state_file(tmp_path, geometry, sequences=1, steps=1), geometry, 1)
    inputs = STAGES["gdn.conv"].inputs(case)
    rows = 6 * 6144
    # numpy's zero pages cost nothing until they are written to; torch writes its own.
    zeros = torch.from_numpy(np.zeros((slots - 1) * 589_824 + rows, np.uint16)).view(torch.bfloat16)
    cache = zeros.as_strided((slots, 6, 6144), (589_824, 6144, 1))
    tensors = {n: torch.from_numpy(np.array(a)) for n, a in inputs.items()}
    history = tensors["conv_state"][int(inputs["slots"][0])].view(torch.bfloat16)
    cache[slot] = history
    tensors |= {"conv_state": cache, "slots": torch.tensor([slot], dtype=torch.int32)}
    launches.prepare_conv(case.problem, {})(tensors)
    want = oracle.conv(
        np.asarray(inputs["qkvz"])[:, :6144], np.asarray(inputs["conv_weights"]), None, history.view(torch.uint16).numpy()[None].copy(),
        np.zeros(1, np.int32), np.array([0, 1], np.int32), np.asarray(inputs["qkv"]),
    )  # fmt: skip
    assert np.array_equal(tensors["qkv"].numpy(), want[0])
    assert np.array_equal(cache[slot].view(torch.uint16).numpy(), want[1][0])
    cache[slot] = 0
    storage = cache.untyped_storage()
    words = torch.empty(0, dtype=torch.int64).set_(storage, 0, (storage.nbytes() // 8,))
    assert not any(bool(part.any()) for part in words.split(1 << 26))
