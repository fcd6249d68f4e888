"""The hook points, on modules that stand in vLLM's place: what is looked up, what is refused by name, and that it is done once."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import replay.engine
from replay.captures import recording
from replay.captures.close import close
from replay.engine import hooks, record
from replay.engine.attach import attach, geometry_of, refusals
from replay.engine.config import Engine, Record, check, check_folder, read
from replay.errors import InputError
from tests.engine.synthetic import EVERYTHING, GEOMETRY


class Runner:
    """A model runner with vLLM's methods, whose forward asks one router."""

    def __init__(self, vllm_config: Any, device: Any) -> None:
        self.router = sys.modules[_ROUTER].BaseRouter()  # type: ignore[attr-defined]  # made below
        sys.modules[_MOE].MoERunner("model.layers.3.mlp.experts", self.router)  # type: ignore[attr-defined]
        self.input_batch = SimpleNamespace(
            req_ids=["r"], num_computed_tokens_cpu=torch.tensor([4]).numpy(), num_prompt_tokens=torch.tensor([2]).numpy(),
            num_tokens_no_spec=torch.tensor([5]).numpy(),
        )  # fmt: skip

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> None:
        self.router._select_experts(torch.rand(1, 256), torch.rand(1, 16), None, input_ids=None)

    def sample_tokens(self, grammar_output: Any) -> str:
        return self._sample(torch.rand(1, 512), None)

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> str:
        return "sampled"

    def shutdown(self) -> str:
        return "down"


class BaseRouter:
    """A router that takes the first four."""

    def _select_experts(
        self, hidden_states: Any, router_logits: Any, topk_indices_dtype: Any = None, *, input_ids: Any = None
    ) -> Any:
        weights, ids = router_logits.softmax(1).topk(4)
        return weights, ids.int()


class MoERunner:
    """What knows a router's layer."""

    def __init__(self, layer_name: str, router: Any) -> None:
        self.router = router


def core(layer: Any, attn_metadata_i: Any, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any) -> None:
    """A GDN layer's core."""


class Attention:
    """A GDN layer."""

    def _output_projection(self, core_attn_out: Any, z: Any) -> Any:
        return core_attn_out


class Worker:
    """What builds a runner."""

    def __init__(self, vllm_config: Any, rank: int = 0) -> None:
        self.rank = rank


_WORKER = "vllm.v1.worker.gpu_worker"
_RUNNER = "vllm.v1.worker.gpu_model_runner"
_MOE = "vllm.model_executor.layers.fused_moe.runner.moe_runner"
_ROUTER = "vllm.model_executor.layers.fused_moe.router.base_router"
_GDN = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
_QWEN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Modules with the names and parameters of vLLM's; classes are fresh, so that no hook outlives its test."""

    def fresh(cls: type) -> type:
        return type(cls.__name__, (), {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")})

    held: dict[str, dict[str, Any]] = {
        _RUNNER: {"GPUModelRunner": fresh(Runner)}, _MOE: {"MoERunner": fresh(MoERunner)}, _ROUTER: {"BaseRouter": fresh(BaseRouter)},
        _WORKER: {"Worker": fresh(Worker)}, _GDN: {"_cpu_gdn_attention_nonspec": core}, _QWEN: {"QwenGatedDeltaNetAttention": fresh(Attention)},
        "vllm.distributed": {"get_tensor_model_parallel_rank": lambda: 0, "get_tensor_model_parallel_world_size": lambda: 1},
    }  # fmt: skip
    for name, what in held.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
        vars(sys.modules[name]).update(what)
    sys.modules["vllm"].__version__ = "0.32.0"  # type: ignore[attr-defined]  # as vLLM has it
    monkeypatch.setattr(record, "ACTIVE", None)
    monkeypatch.setattr(replay.engine, "_DONE", False)
    monkeypatch.setenv("VLLM_CACHE_ROOT", "cache")
    yield sys.modules["vllm"]
    if record.ACTIVE is not None:
        record.ACTIVE.close()


def config(**changed: Any) -> Any:
    """A server's configuration under which everything can be recorded."""
    text = SimpleNamespace(
        hidden_size=256, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=64, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=64, linear_conv_kernel_dim=4, vocab_size=512, num_hidden_layers=4,
        num_attention_heads=4,
    )  # fmt: skip
    parallel = {"pipeline_parallel_size": 1, "data_parallel_size": 1, "enable_eplb": False, "enable_dbo": False}
    return SimpleNamespace(
        speculative_config=changed.get("speculative_config"),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name=changed.get("cudagraph_mode", "NONE"))),
        device_config=SimpleNamespace(device_type=changed.get("device", "cpu")),
        parallel_config=SimpleNamespace(**{**parallel, **{k: v for k, v in changed.items() if k in parallel}}),
        model_config=SimpleNamespace(model="tiny", hf_text_config=text), use_v2_model_runner=changed.get("v2", False),
    )  # fmt: skip


def engine_file(tmp_path: Path, text: str) -> Path:
    """An engine file."""
    path = tmp_path / "engine.toml"
    path.write_text(text)
    return path


def test_inert_without_an_engine_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read and nothing is put in place."""
    monkeypatch.delenv("B70_ENGINE", raising=False)
    monkeypatch.setattr(replay.engine, "_DONE", False)
    replay.engine.register()
    assert not replay.engine._DONE


def test_a_server_is_recorded(vllm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the entry point to a capture; registering twice hooks once; a compiled graph gets a cache of its own."""
    import os

    file = engine_file(tmp_path, f"[record]\nfolder = '{tmp_path / 'rec'}'\n")
    monkeypatch.setenv("B70_ENGINE", str(file))
    replay.engine.register()
    runner_class = vars(sys.modules[_RUNNER])["GPUModelRunner"]
    once = runner_class.execute_model
    monkeypatch.setattr(replay.engine, "_DONE", False)
    replay.engine.register()
    assert runner_class.execute_model is once
    assert "b70-record-" in os.environ["VLLM_CACHE_ROOT"]
    assert os.environ["VLLM_CACHE_ROOT"].count("b70-record") == 1
    runner = runner_class(config(), "cpu")
    output = SimpleNamespace(total_num_scheduled_tokens=1, num_scheduled_tokens={"r": 1})
    runner.router._select_experts(torch.rand(1, 256), torch.rand(1, 16))  # a warm-up: no step is open
    runner.execute_model(output)
    assert runner.sample_tokens(None) == "sampled"
    assert runner.shutdown() == "down"
    assert record.ACTIVE is not None
    record.ACTIVE.writer.lock.release()
    manifest = close(tmp_path / "rec")
    assert manifest.geometry == GEOMETRY
    assert manifest.recorded is not None
    assert (manifest.recorded.steps, manifest.recorded.rows) == (1, 1)
    assert manifest.recorded.versions["vllm"] == "0.32.0"


@pytest.mark.parametrize("stage", ["gdn", "router", "lm_head", ""])
def test_a_missing_point_is_refused_by_name(
    vllm: ModuleType, stage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With what is recorded of it; all or none of the hooks are put in place."""
    point = next(p for p in hooks.V0_32.values() if p.stage == stage)
    module, _, path = point.where.partition(":")
    holder: Any = sys.modules[module]
    *outer, name = path.split(".")
    for part in outer:
        holder = getattr(holder, part)
    if name == "__init__":
        holder.__init__ = lambda self, other: None
    else:
        delattr(holder, name)
    asked = Record(folder=str(tmp_path / "rec"), what=EVERYTHING)
    with pytest.raises(InputError, match=name):
        hooks.install(asked, "0.32.0")
    assert not hasattr(vars(sys.modules[_RUNNER])["GPUModelRunner"].execute_model, "b70_replay")
    replay.engine._record(asked, "engine.toml")
    assert "the server goes on" in caplog.text
    assert name in caplog.text
    if stage == "gdn":
        hooks.install(Record(folder="x"), "0.32.0")


def test_another_version_is_tried_with_a_warning(vllm: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    """The newest table, point by point."""
    hooks.install(Record(folder="x"), "0.47.1")
    assert "vLLM 0.47.1 has no table of hook points; those of 0.32 are tried" in caplog.text


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"speculative_config": SimpleNamespace(method="ngram")}, "--speculative-config"),
        ({"cudagraph_mode": "PIECEWISE", "device": "xpu"}, "--enforce-eager"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"), ({"data_parallel_size": 2}, "--data-parallel-size"),
        ({"enable_eplb": True}, "--enable-eplb"), ({"enable_dbo": True}, "--enable-dbo"),
        ({"device": "xpu"}, "GDN states"),
    ],
)  # fmt: skip
def test_what_cannot_be_recorded_truly_is_refused(changed: dict[str, Any], said: str, vllm: ModuleType, tmp_path: Path) -> None:
    """By name and with what to set; nothing is written but why."""
    asked = Record(folder=str(tmp_path), what=EVERYTHING)
    reasons = list(refusals(asked, config(**changed)))
    attach(asked, config(**changed))
    assert record.ACTIVE is None
    assert not recording.journals(tmp_path)
    assert said in str(recording.refusal(tmp_path))
    assert all(got in str(recording.refusal(tmp_path)) for _, _, got in reasons)


def test_sizes_of_other_models() -> None:
    """A model without GDN, whose names are others, on two ranks."""
    text = SimpleNamespace(
        hidden_size=2048, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, num_key_value_heads=4,
        num_attention_heads=32, head_dim=128, vocab_size=151_936, num_hidden_layers=48,
    )  # fmt: skip
    assert str(geometry_of(text, 2)) == "qwen3-30b:tp2:vocab=151936"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[record]\nfolder = 'x'\nevery = 0\n", "record.every: expected 1 or more, got 0"),
        ("[record]\nfolder = 'x'\nlayers = '('\n", "record.layers: expected a regular expression"),
        ("[record]\nfolder = 'x'\nwhat = ['outputs']\n", "expected something of router, gdn, lm_head"),
        ("[record]\nfolder = 'x'\nwhat = ['routes', 'outputs']\n", "gdn and states"),
        ("[record]\nfolder = 'x'\nfuel = 1\n", "unknown field `fuel`"), ("[record\n", "expected TOML"),
        ("[record]\nfolder = ''\n", "record.folder: expected a folder"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_done(text: str, said: str, tmp_path: Path) -> None:
    """One clear line each."""
    with pytest.raises(InputError, match=re.escape(said)):
        _asked(engine_file(tmp_path, text))


def _asked(file: Path) -> None:
    asked = read(file).record
    assert asked is not None
    check(asked, str(file))
    check_folder(asked, str(file))


def test_a_swap_is_refused_and_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was to serve a kernel must not come up and serve the native one."""
    file = engine_file(tmp_path, "[swap]\nmode = 'serve'\n")
    monkeypatch.setenv("B70_ENGINE", str(file))
    monkeypatch.setattr(replay.engine, "_DONE", False)
    with pytest.raises(InputError, match="swap"):
        replay.engine.register()
    assert read(engine_file(tmp_path, "")) == Engine()


def test_the_tap_gives_copies(vllm: ModuleType) -> None:
    """The operation that stands in a compiled graph: values as they were, memory of its own, also under a fake."""
    hooks._define_tap()
    hooks._define_tap()
    first, second = torch.rand(2, 3), torch.arange(4)
    a, b = torch.ops.b70_replay.tap(first, second, "router", "x")
    assert torch.equal(a, first)
    assert torch.equal(b, second)
    assert a.data_ptr() != first.data_ptr()
    compiled = torch.compile(lambda x, y: torch.ops.b70_replay.tap(x, y, "router", "x")[0] + 1, backend="eager", fullgraph=True)
    assert torch.equal(compiled(first, second), first + 1)


def test_the_second_model_runner_is_refused(vllm: ModuleType, tmp_path: Path) -> None:
    """Where a worker will build it: no hook would ever be called."""
    hooks.install(Record(folder=str(tmp_path)), "0.32.0")
    (tmp_path / "x").mkdir()
    vars(sys.modules[_WORKER])["Worker"](config(v2=True))
    assert "VLLM_USE_V2_MODEL_RUNNER" in str(recording.refusal(tmp_path))


def test_ranks_that_there_are_not(vllm: ModuleType, tmp_path: Path) -> None:
    """Told, instead of nothing being recorded in silence."""
    attach(Record(folder=str(tmp_path), ranks=(3,)), config())
    assert "ranks: expected ranks below 1, got 3" in str(recording.refusal(tmp_path))


def test_a_router_of_no_layer_ends_the_recording_alone(
    vllm: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that did not come through the hooked runner still routes."""
    hooks.install(Record(folder=str(tmp_path / "rec")), "0.32.0")
    runner = vars(sys.modules[_RUNNER])["GPUModelRunner"](config(), "cpu")
    del runner.router.b70_layer
    runner.execute_model(SimpleNamespace(total_num_scheduled_tokens=1, num_scheduled_tokens={"r": 1}))
    assert runner.sample_tokens(None) == "sampled"
    assert record.ACTIVE is not None
    record.ACTIVE.writer.thread.join(10)
    assert "a router of no layer" in caplog.text


def test_the_compile_cache_is_of_the_taps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings that trace other taps do not share compiled graphs."""
    import os

    seen = set()
    for stages in ("", "gdn", "router"):
        monkeypatch.setenv("VLLM_CACHE_ROOT", "cache")
        replay.engine._own_compiled_code(Record(what=("routes", "gdn", "states"), stages=stages))
        seen.add(os.environ["VLLM_CACHE_ROOT"])
    assert len(seen) == 3
