"""Faults that people reported of MoE kernels, each as a kind: routing, grouped GEMM, quantisation.

The report is named where a test begins; what is right is said in its docstring.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from replay.devices import Device
from replay.exactness import Got, compare
from replay.exactness.judge import judge
from replay.kernels.registry import registered, resolve
from replay.model import Case, Exact, Geometry, Kernel, Routes
from replay.oracle.arith import bf16_to_f32, rn_bf16
from replay.session.arms import Arms
from replay.session.child import judged_calls
from replay.stages import STAGES
from tests.conftest import QWEN36, SMALL, judge_here, make_case, takes_defaults
from tests.fuzz.strata import WANTED, check, draw, kernels_of

T = TypeVar("T")
ARMS = Arms(Device("cpu"))
MOE = [name for name in STAGES if name.startswith("moe.")]
KERNELS = {k.id: k for k in registered().values() if k.stage in MOE and "cpu" in k.devices and takes_defaults(k)}
ROUTES = [k for k in KERNELS.values() if k.stage == "moe.route"]
LAYERS = [k for k in KERNELS.values() if k.stage == "moe.layer"]
WEIGHTED = [k for k in KERNELS.values() if k.stage in ("moe.gemm1", "moe.gemm2", "moe.middle", "moe.layer")]
SPOILED = {"moe.gemm1": "a_scale", "moe.gemm2": "h_scale", "moe.act_quant": "gate_up"}
SEEN: Counter[str] = Counter()


def some(examples: int) -> settings:
    """So many examples beside the reported ones, the same in every run."""
    return settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def exact(kernel: Kernel, case: Case) -> None:
    """BITWISE, or the reason."""
    outcome = judge_here(kernel.id, case)
    assert isinstance(outcome, Exact), outcome


class Shrinking:
    """Choices of hypothesis, which makes a failing case smaller before it shows it."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data

    def pick(self, values: Sequence[T]) -> T:
        """The first values are the simpler ones."""
        return self.data.draw(st.sampled_from(values))

    def integer(self, low: int, high: int) -> int:
        """Any, with the ends among them."""
        return self.data.draw(st.integers(low, high))

    def chance(self, share: float) -> bool:
        """Either."""
        return self.data.draw(st.booleans())


@some(80)
@given(st.data())
def test_any_case_of_any_stage(data: st.DataObject) -> None:
    """k 1 to 16, up to 1024 experts, −1 ids, zero-row groups, odd sizes, zero rows, denormals, huge values."""
    stage = data.draw(st.sampled_from(MOE))
    drawn = draw(Shrinking(data), stage)
    SEEN.update(drawn.strata)
    for kernel in kernels_of(stage):
        outcome = check(ARMS, kernel, drawn)
        assert isinstance(outcome, Exact), (kernel.id, drawn, outcome)


def test_every_stratum_was_met() -> None:
    """The test above has covered what it says; a run of it alone is not enough."""
    if not SEEN:
        pytest.skip("the test that fills the strata was not selected")
    assert [name for name in WANTED if not SEEN[name]] == []


# vllm-xpu-kernels 578: −1 together with an expert map
@some(40)
@example(4, 0, 0.3, 9, 7).via("the report")
@given(st.sampled_from([2, 4, 8, 16]), st.integers(0, 15), st.floats(0, 1), st.integers(1, 40), st.integers(0, 1 << 30))
def test_padding_under_an_expert_map(size: int, rank: int, padding: float, tokens: int, seed: int) -> None:
    """Padding and another rank's experts map to −1 and are counted nowhere, the same on every run."""
    case = make_case("moe.route", SMALL, tokens=tokens, seed=seed, padding=padding, expert_map=f"ep{size}:{rank % size}")
    for kernel in ROUTES:
        exact(kernel, case)


# vllm-xpu-kernels 273: a top-k of 10
@pytest.mark.parametrize("top_k", range(1, 17))
def test_any_top_k(top_k: int) -> None:
    """k from 1 to 16 is exact in every layer kernel."""
    geometry = msgspec.structs.replace(SMALL, experts=40, top_k=top_k)
    for kernel in LAYERS:
        exact(kernel, make_case("moe.layer", geometry, tokens=3, seed=top_k))


# vllm-xpu-kernels 524, 457: a counter whose reset races
@pytest.mark.parametrize("kernel", [k for k in KERNELS.values() if k.id.startswith("sycl:")], ids=lambda k: k.id)
def test_a_thousand_replays_are_one_result(kernel: Kernel) -> None:
    """1000 calls on poisoned outputs, batch above 1: every row is written each time, all calls agree."""
    case = make_case(kernel.stage, SMALL, tokens=5, padding=0.2)
    stage = STAGES[kernel.stage]
    inputs = ARMS.begin(case)
    weights = ARMS.weights(kernel, inputs)
    run = resolve(kernel, kernel.prepare)(case.problem, weights)
    want = stage.expected(case.problem, inputs)
    binding = ARMS.binding(inputs, weights)
    for call in range(1000):
        binding.poison_outputs((0xFF, 0x7B)[call % 2])
        run(binding.tensors)
        if call % 50 == 0 or call == 999:
            got = stage.canonical(case.problem, inputs, binding.outputs())
            assert compare(stage.specs(case.problem), want, Got(got, binding.poison)) is None, call
    assert binding.trespasses() == []


# pytorch 172439, 154557: groups of zero rows, between others, leading, trailing, all rows in one expert, none at all
@some(10)
@example([0, 5, 0, 0, 3, 0])
@example([0, 0, 0, 0, 4, 4])
@example([4, 4, 0, 0, 0, 0])
@example([0, 0, 8, 0, 0, 0])
@example([0, 0, 0, 0, 0, 0])
@given(st.lists(st.sampled_from([0, 0, 1, 2, 3, 7, 8, 9, 17]), min_size=1, max_size=9))
def test_groups_without_rows(groups: list[int]) -> None:
    """Exact wherever the empty groups are; rows past the sum keep their poison."""
    geometry = msgspec.structs.replace(SMALL, experts=len(groups), top_k=1)
    ids = [e for e, count in enumerate(groups) for _ in range(count)]
    ids += [-1] * max(8 - len(ids), 1)
    for kernel in WEIGHTED:
        case = make_case(kernel.stage, geometry, tokens=len(ids))
        exact(kernel, msgspec.structs.replace(case, held=Routes(tuple((e,) for e in ids))))


# flashinfer 3650: NaN in padding rows, or in another expert's rows of the same tile
@some(15)
@example({0, 3, 7}, float("nan"))
@given(st.sets(st.integers(0, 18), min_size=1, max_size=4), st.sampled_from([float("nan"), float("inf"), -3e38]))
def test_what_is_wrong_with_a_row_stays_in_its_row(rows: set[int], value: float) -> None:
    """Some rows' scale (or gate) is NaN, inf or huge: every other row's outputs are what they were, to the bit."""
    for kernel in (k for k in KERNELS.values() if k.stage in SPOILED):
        case = make_case(kernel.stage, SMALL, tokens=6, padding=0.2)
        stage = STAGES[kernel.stage]
        inputs = dict(ARMS.begin(case))
        spoiled = np.array(inputs[SPOILED[kernel.stage]])
        spoiled[sorted(rows)] = value if spoiled.dtype == np.float32 else rn_bf16(np.array([value], np.float32))[0]
        given_ = inputs | {SPOILED[kernel.stage]: spoiled}
        ran = judged_calls(ARMS, kernel, case, 0, [given_, given_])
        want = stage.expected(case.problem, given_)
        assert isinstance(judge(stage, case, given_, want, ran.repeats, ran.trespasses), Exact)
        for name, unspoiled in stage.expected(case.problem, inputs).items():
            others = sorted(set(range(len(unspoiled))) - rows)
            assert (want[name][others] == unspoiled[others]).all()


# pytorch/ao 4713, flashinfer 4287: an all-zero token
@some(15)
@example({1})
@given(st.sets(st.integers(0, 3), max_size=4))
def test_an_all_zero_token_gives_zero(zero: set[int]) -> None:
    """q = 0, a finite positive scale, and an output of exactly zero, for whichever tokens."""
    case = make_case("moe.layer", SMALL, tokens=4)
    inputs = dict(ARMS.begin(case))
    inputs["x"] = np.array(inputs["x"])
    inputs["x"][sorted(zero)] = 0
    want = STAGES["moe.layer"].oracle(case.problem, inputs)
    assert (want["out"][sorted(zero)] == 0).all()
    for kernel in LAYERS:
        ARMS.begin(case)
        ran = judged_calls(ARMS, kernel, case, 0, [inputs, inputs])
        assert isinstance(judge(STAGES["moe.layer"], case, inputs, want, ran.repeats, ran.trespasses), Exact)


# vllm-xpu-kernels 464, 387: inner sizes that are no power of two
@some(6)
@example(5120, 320, 8)
@example(7168, 64, 1)
@example(640, 1408, 17)
@example(256, 2816, 32)
@example(128, 5632, 1)
@given(st.integers(1, 400), st.integers(1, 200), st.sampled_from([1, 8, 17, 32]))
def test_sizes_of_real_models(hidden: int, inter: int, tokens: int) -> None:
    """Bit-equal whatever the size, for every layer kernel and the shared expert."""
    geometry = Geometry.parse(f"qwen36:tp4:hidden={hidden},experts=4,top_k=2,inter={inter}")
    for kernel in (k for k in LAYERS if k.id.startswith("sycl:")):
        exact(kernel, make_case("moe.layer", geometry, tokens=tokens, shared="on"))


# the lab: a fused op that rounds once where the accepted path rounds twice
@pytest.mark.parametrize("kernel", [k for k in KERNELS.values() if k.stage == "moe.act_quant"], ids=lambda k: k.id)
@pytest.mark.parametrize("act", ["silu_round_twice", "silu_round_once", "silu_f32"])
def test_every_gate_value(kernel: Kernel, act: str) -> None:
    """All 65,536 bf16 gates, finite or not, with ups from tiny to huge: bitwise."""
    geometry = msgspec.structs.replace(SMALL, inter=256, top_k=4)
    case = make_case("moe.act_quant", geometry, tokens=64, act=act)
    stage = STAGES["moe.act_quant"]
    inputs = dict(ARMS.begin(case))
    gates = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    for up in (1.0, -0.3, 1e-30, 3e30):
        ups = np.full((256, 256), rn_bf16(np.array([up], np.float32))[0])
        given_ = inputs | {"gate_up": np.concatenate([gates, ups], axis=1)}
        ran = judged_calls(ARMS, kernel, case, 0, [given_, given_])
        outcome = judge(stage, case, given_, stage.oracle(case.problem, given_), ran.repeats, ran.trespasses)
        assert isinstance(outcome, Exact), outcome


@pytest.mark.parametrize("kernel", ROUTES, ids=lambda k: k.id)
@pytest.mark.parametrize(("tokens", "experts"), [(256, 256), (2048, 256), (64, 1024), (2048, 1024)])
def test_prologue_of_prefill_sizes(kernel: Kernel, tokens: int, experts: int) -> None:
    """256 and 2048 tokens, up to 1024 experts."""
    geometry = msgspec.structs.replace(SMALL, experts=experts, top_k=8)
    exact(kernel, make_case("moe.route", geometry, tokens=tokens, padding=0.05))


@pytest.mark.parametrize("kernel", [k for k in KERNELS.values() if k.id.startswith("sycl:moe.layer")], ids=lambda k: k.id)
@pytest.mark.parametrize("window", [2, 4, 8, 16, 64])
def test_verifier_windows(kernel: Kernel, window: int) -> None:
    """Windows of a speculative verifier at the model's own size."""
    exact(kernel, make_case("moe.layer", QWEN36, tokens=window))


@pytest.mark.parametrize("kernel", [k for k in KERNELS.values() if k.stage == "moe.quantize"], ids=lambda k: k.id)
@pytest.mark.parametrize("mode", ["recip_half_away", "group_trunc:1", "group_trunc:16", "group_trunc:64"])
def test_huge_inputs_stay_within_their_row(kernel: Kernel, mode: str) -> None:
    """−3e38 in one row: its scale takes it, the next row is untouched, in every kernel."""
    case = make_case("moe.quantize", SMALL, tokens=2, quant=mode)
    inputs = dict(ARMS.begin(case))
    x = np.array(inputs["x"])
    x[0] = 0xFF7F
    stage, given_ = STAGES["moe.quantize"], inputs | {"x": x}
    out = stage.oracle(case.problem, given_)
    ran = judged_calls(ARMS, kernel, case, 0, [given_, given_])
    assert isinstance(judge(stage, case, given_, out, ran.repeats, ran.trespasses), Exact)
    assert (out["q"][0] == -127).all()
    assert np.isfinite(out["q_scale"]).all()
    assert np.abs(bf16_to_f32(x[1])).max() < 100
