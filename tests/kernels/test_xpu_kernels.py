"""The incumbents on the card: each adapter is judged green through a fake of its operation, and a fake refuses every perturbed argument."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from replay.errors import InputError
from replay.kernels import xpu_kernels
from replay.kernels.adapters import BINDINGS, Binding, Is
from replay.kernels.registry import lacking, registered
from replay.model import Case, Exact, Geometry
from replay.stages import STAGES
from tests import fakes
from tests.conftest import judge_here, make_case
from tests.gdn import state_case, state_file

MOE = Geometry.parse("qwen36:tp4:hidden=64,experts=8,top_k=3,inter=24")
GDN = Geometry.parse("qwen36:tp4:head_dim=64,k_heads=2,v_heads=4")
NAMES = list(BINDINGS)


@pytest.fixture
def calls() -> Iterator[list[dict[str, Any]]]:
    """The library, as fakes; the arguments of its calls."""
    with fakes.library() as made:
        yield made


def case_of(binding: Binding, folder: Path, **modes: str) -> Case:
    """A case without padding of the binding's stage, in the modes that its fake computes."""
    asked = {name: values[0] for name, values in binding.modes if name in STAGES[binding.stage].modes}
    modes = asked | modes
    if binding.stage.startswith("gdn."):
        return state_case(binding.stage, state_file(folder, GDN, sequences=2, steps=1), GDN, 2, **modes)
    return make_case(binding.stage, MOE, tokens=2, **modes)


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_gives_the_oracles_bits(name: str, calls: list[dict[str, Any]], tmp_path: Path) -> None:
    """Every operation, called as its binding says, is BITWISE, and was called."""
    outcome = judge_here(f"xpu_kernels:{name}", case_of(BINDINGS[name], tmp_path))
    assert isinstance(outcome, Exact), outcome
    assert outcome.grade == "BITWISE"
    assert calls


@pytest.mark.parametrize(
    ("name", "modes"),
    [
        ("moe.gemm2:cutlass_grouped_16bit", {"bias": "on"}),
        ("moe.route:remap_hidden_states", {"expert_map": "ep4:1"}), ("moe.gemm1:cutlass_grouped_offsets", {"bias": "on"}),
        ("gdn.conv:causal_conv1d_non_spec", {"conv_bias": "bias_last", "reorder_input": "interleaved"}),
        ("gdn.step:gdn_attention", {"ssm_state": "bf16", "dt_bias": "bf16", "conv_slot_stride": "1999"}),
        ("topk.rows:top_k_per_row_decode", {"k": "7", "next_n": "2"}),
        ("topk.router:topk_softmax", {"bias": "on", "padding": "on", "renormalize": "off", "logits": "bf16"}),
    ],
)  # fmt: skip
def test_an_adapter_in_other_modes(name: str, modes: dict[str, str], calls: list[dict[str, Any]], tmp_path: Path) -> None:
    """What is optional is handed over where a mode asks for it."""
    outcome = judge_here(f"xpu_kernels:{name}", case_of(BINDINGS[name], tmp_path, **modes))
    assert isinstance(outcome, Exact), outcome


def perturbed(arguments: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The arguments with one tensor of another dtype or stride, one number off, or two arguments swapped."""
    tensors = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
    for name in tensors:
        value = arguments[name]
        yield f"{name} as f64", arguments | {name: value.double()}
        spread = torch.stack([value, value], -1)[..., 0]
        if not spread.is_contiguous():
            yield f"{name} strided", arguments | {name: spread}
    for name, value in arguments.items():
        if isinstance(value, int) and not isinstance(value, bool):
            yield f"{name} + 1", arguments | {name: value + 1}
        elif isinstance(value, bool):
            yield f"{name} negated", arguments | {name: not value}
        elif isinstance(value, str):
            yield f"{name} gelu", arguments | {name: "gelu"}
    for one, other in itertools.combinations(arguments, 2):
        a, b = arguments[one], arguments[other]
        same = a is b or (not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) and a == b)
        if not same and (type(a) is type(b) or a is None or b is None):
            yield f"{one} for {other}", arguments | {one: b, other: a}


def alike(description: str, arguments: dict[str, Any]) -> bool:
    """Whether only what is computed can tell: a flag, or two swapped arguments of one dtype, shape and stride."""
    one, found, other = description.partition(" for ")
    if not found:
        return description.endswith(" negated")
    a, b = arguments[one], arguments[other]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    return False


@pytest.mark.parametrize("name", NAMES)
def test_every_perturbed_argument_is_refused(name: str, calls: list[dict[str, Any]], tmp_path: Path) -> None:
    """One argument at a time: the fake refuses it, or, where two of a kind are swapped, writes something else."""
    binding = BINDINGS[name]
    case = case_of(binding, tmp_path, **({"k": "7"} if binding.stage == "topk.rows" else {}))
    judge_here(f"xpu_kernels:{name}", case, repeats=1)
    given = calls[0]
    for argument, what in binding.arguments.items():
        if isinstance(what, Is) and what.zeroed:
            given[argument].zero_()
    right, seen = written(binding, given, given), 0
    for description, wrong in perturbed(given):
        seen += 1
        try:
            left = written(binding, given, wrong)
        except fakes.Refused:
            continue
        assert alike(description, given), description
        assert left != right, description
    assert seen > 2 * len(binding.arguments)


def written(binding: Binding, given: dict[str, Any], asked: dict[str, Any]) -> list[bytes]:
    """What a call with some arguments leaves in the tensors that the right call writes, and what it returns; on copies."""
    copies = {id(v): v.clone() if v.is_contiguous() else v for v in asked.values() if isinstance(v, torch.Tensor)}
    returned = fakes.FAKES[binding.op]({n: copies.get(id(v), v) for n, v in asked.items()})
    made = [copies[id(given[name])] for name in binding.writes] + (returned if isinstance(returned, list) else [])
    return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in made]


def test_counters_that_nobody_zeroed_are_refused(calls: list[dict[str, Any]], tmp_path: Path) -> None:
    """The released prologue adds to what it finds."""
    name = "moe.route:remap_hidden_states"
    judge_here(f"xpu_kernels:{name}", case_of(BINDINGS[name], tmp_path), repeats=1)
    with pytest.raises(fakes.Refused, match="rows_per_expert: expected zeros"):
        fakes.moe.remap_hidden_states(calls[-1])


def test_what_is_written_is_told_whether_a_schema_declares_it_or_not() -> None:
    """``writes`` holds every argument that a schema marks, and those that it should have marked."""
    for binding in BINDINGS.values():
        schema = torch._C.parse_schema(f"{binding.op}{binding.schema}")
        marked = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        assert set(binding.writes) == marked | set(binding.undeclared), binding.name
        assert not marked & set(binding.undeclared)
        assert [a.name for a in schema.arguments] == list(binding.arguments), binding.name


def test_without_the_library_every_operation_is_unavailable() -> None:
    """Named, with what is missing; nothing stands in."""
    for name, binding in BINDINGS.items():
        why = next(lacking(registered()[f"xpu_kernels:{name}"].needs))
        assert why == f"no op {binding.op} (no Python module vllm_xpu_kernels)"


@pytest.mark.parametrize(
    ("op", "schema", "told"),
    [
        (
            "_moe_C::moe_gather", "(Tensor! output, Tensor moe_output, Tensor weights, Tensor unpermuted_row_to_permuted_row, int num_experts) -> ()",
            "op _moe_C::moe_gather: argument 2: expected 'topk_weights', got 'weights'",
        ),
        (
            "_moe_C::moe_gather", "(Tensor! output, Tensor moe_output, Tensor topk_weights) -> ()",
            "op _moe_C::moe_gather: argument 3: expected 'unpermuted_row_to_permuted_row', got no more",
        ),
        (
            "_C::top_k_per_row_decode",
            "(Tensor logits, int next_n, Tensor seq_lens, Tensor! indices, int numRows, int stride0, int stride1, Tensor topK) -> ()",
            "op _C::top_k_per_row_decode: argument 'topK': expected int, got Tensor",
        ),
        (
            "_xpu_C::per_token_quant_int8_xpu_out", "(Tensor x, Tensor! q, Tensor! scales, float eps) -> ()",
            "op _xpu_C::per_token_quant_int8_xpu_out: argument 3: expected no more, got 'eps'",
        ),
        ("_xpu_C::per_token_quant_int8_xpu_out", "(Tensor x, Tensor! q, Tensor! scales, float eps=1e-10) -> ()", None),
        (
            "_moe_C::moe_gather",
            "(Tensor output, Tensor moe_output, Tensor topk_weights, Tensor unpermuted_row_to_permuted_row, int num_experts) -> ()",
            "op _moe_C::moe_gather: argument 'output': expected Tensor that is written, got Tensor that is read",
        ),
        (
            "_moe_C::moe_gather",
            "(Tensor! output, Tensor moe_output, Tensor topk_weights, Tensor unpermuted_row_to_permuted_row, int num_experts) -> Tensor",
            "op _moe_C::moe_gather: result: expected (), got (Tensor)",
        ),
    ],
)  # fmt: skip
def test_another_schema_is_unavailable_with_its_difference(op: str, schema: str, told: str | None) -> None:
    """The first argument that is not what the adapter was written for; a new one with a default does no harm."""
    name = next(n for n, b in BINDINGS.items() if b.op == op)
    with fakes.library({op: schema}):
        assert next(lacking(registered()[f"xpu_kernels:{name}"].needs), None) == told


def test_a_build_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its libraries are loaded, its kernels named after the folder, judged like any other, and what it has not got is told."""
    monkeypatch.setenv("B70_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "build-a"
    folder.mkdir()
    for name in ("_moe_C.abi3.so", "_xpu_C.abi3.so"):
        (folder / name).touch()
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    with fakes.library({"_moe_C::topk_softmax": "(Tensor other) -> ()"}):
        kernels = {k.id: k for k in registered([f"xpu_kernels@{folder}"]).values() if k.id.startswith("xpu_kernels@build-a-")}
        assert [Path(p).name for p in loaded] == ["_moe_C.abi3.so", "_xpu_C.abi3.so"]
        assert len(kernels) == len(BINDINGS)
        name = next(k for k in kernels if k.endswith(":moe.combine:moe_gather"))
        assert next(lacking(kernels[name].needs), None) is None
        outcome = judge_here(name, case_of(BINDINGS["moe.combine:moe_gather"], tmp_path), kernels[name].file)
        assert isinstance(outcome, Exact), outcome
    softmax = next(k for k in kernels.values() if k.stage == "topk.router")
    assert next(lacking(softmax.needs)) == "op _moe_C::topk_softmax: argument 0: expected 'topk_weights', got 'other'"


@pytest.mark.parametrize(("folder", "told"), [("missing", "got no folder"), ("empty", "got none in")])
def test_a_folder_without_a_build_is_refused(folder: str, told: str, tmp_path: Path) -> None:
    """One line, before anything is written."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=told):
        registered([f"xpu_kernels@{tmp_path / folder}"])


def test_a_library_that_does_not_load_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the loader says, in one line."""
    monkeypatch.setenv("B70_CACHE", str(tmp_path / "cache"))
    (tmp_path / "_moe_C.so").write_text("no library")
    with pytest.raises(InputError, match=r"expected a file that imports, got OSError: .*_moe_C\.so"):
        registered([f"xpu_kernels@{tmp_path}"])


def test_the_switch_to_the_librarys_own_reference_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that runs its own slow reference is no incumbent."""
    monkeypatch.setenv(xpu_kernels.REFERENCE_SWITCH, "1")
    with fakes.library():
        why = next(lacking(registered()["xpu_kernels:moe.combine:moe_gather"].needs))
    assert why == "VLLM_XPU_FUSED_MOE_USE_REF is set: the library would run its own reference"
