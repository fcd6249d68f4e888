"""Where the plugin reaches into vLLM: a table of hook points per version, and what is put around each.

A point is looked up by name and by the names of its parameters before anything is changed. One that is missing, or of another
shape, is named and refused, together with what needs it; the server goes on as it would have without the plugin.
"""

import functools
import importlib
import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from replay.engine import log, record
from replay.engine.config import Record
from replay.errors import InputError

_OP = "b70_replay::tap"


@dataclass(frozen=True)
class Point:
    """A function of vLLM: ``module:qualified.name``, its parameters in order, and for which stage of a recording it is needed."""

    where: str
    parameters: tuple[str, ...]
    stage: str = ""


_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_CPU_GDN = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
V0_32: Mapping[str, Point] = {
    "worker": Point("vllm.v1.worker.gpu_worker:Worker.__init__", ("self", "vllm_config")),
    "runner": Point(f"{_RUNNER}.__init__", ("self", "vllm_config", "device")),
    "step": Point(f"{_RUNNER}.execute_model", ("self", "scheduler_output", "intermediate_tensors")),
    "sampled": Point(f"{_RUNNER}.sample_tokens", ("self", "grammar_output")),
    "shutdown": Point(f"{_RUNNER}.shutdown", ("self",)),
    "logits": Point(f"{_RUNNER}._sample", ("self", "logits", "spec_decode_metadata"), "lm_head"),
    "moe": Point("vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner.__init__", ("self", "layer_name"), "router"),
    "router": Point(
        "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter._select_experts",
        ("self", "hidden_states", "router_logits", "topk_indices_dtype", "input_ids"), "router",
    ),
    "gdn": Point(
        f"{_CPU_GDN}:_cpu_gdn_attention_nonspec", ("layer", "attn_metadata_i", "mixed_qkv", "b", "a", "core_attn_out"), "gdn"
    ),
    "gdn_z": Point(
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention._output_projection",
        ("self", "core_attn_out", "z"), "gdn",
    ),
}  # fmt: skip
# vLLM's version up to its minor → its points.
POINTS: Mapping[str, Mapping[str, Point]] = {"0.32": V0_32}


def points(version: str) -> Mapping[str, Point]:
    """The table for a version; of one that has none the newest is tried, with a warning."""
    minor = ".".join(version.split(".")[:2])
    if minor not in POINTS:
        newest = max(POINTS, key=lambda text: [int(part) for part in text.split(".")])
        log.error("vLLM %s has no table of hook points; those of %s are tried, each by its name and parameters", version, newest)
        return POINTS[newest]
    return POINTS[minor]


def found(point: Point) -> tuple[Any, str, Callable[..., Any]]:
    """(what holds a point, its name there, the function). InputError where vLLM has it not, or with other parameters."""
    module, _, path = point.where.partition(":")
    try:
        holder: Any = importlib.import_module(module)
        *outer, name = path.split(".")
        for part in outer:
            holder = getattr(holder, part)
        function = getattr(holder, name)
    except (ImportError, AttributeError) as error:
        raise InputError("vllm", point.where, "a function to hook", str(error)) from None
    got = tuple(inspect.signature(function).parameters)
    if got[: len(point.parameters)] != point.parameters:
        raise InputError("vllm", point.where, f"parameters {', '.join(point.parameters)}", ", ".join(got))
    return holder, name, function


def install(asked: Record, version: str) -> None:
    """Put the hooks of a recording in place, all or none of them; InputError names the first that is missing. Once a process."""
    needed = {n: p for n, p in points(version).items() if not p.stage or asked.wants(p.stage)}
    places = {name: found(point) for name, point in needed.items()}
    for name, (holder, attribute, function) in places.items():
        if not hasattr(function, "b70_replay"):
            hook = functools.wraps(function)(_HOOKS[name](function, asked))
            hook.b70_replay = name  # type: ignore[attr-defined]  # the mark of a hook that is in place
            setattr(holder, attribute, hook)
    if asked.wants("router") or asked.wants("gdn"):
        _define_tap()


# ---------------------------------------------------------------- worker and runner


def _worker(original: Callable[..., Any], asked: Record) -> Callable[..., Any]:
    from replay.engine.attach import refuse

    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # stands for the worker's own
        original(self, vllm_config, *args, **kwargs)
        # Another runner would be built, whose methods nobody hooks.
        if getattr(vllm_config, "use_v2_model_runner", False):
            refuse(asked, "VLLM_USE_V2_MODEL_RUNNER: expected 0, since the hooks are of the first model runner, got 1")

    return __init__


def _runner(original: Callable[..., Any], asked: Record) -> Callable[..., Any]:
    from replay.engine.attach import attach

    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # stands for the runner's own
        original(self, vllm_config, *args, **kwargs)
        attach(asked, vllm_config)

    return __init__


def _step(original: Callable[..., Any], asked: Record) -> Callable[..., Any]:
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = record.ACTIVE
        if recorder is None or not scheduler_output.total_num_scheduled_tokens:
            return original(self, scheduler_output, *args, **kwargs)
        recorder.begin(self)
        result = original(self, scheduler_output, *args, **kwargs)
        recorder.whose(self, scheduler_output.num_scheduled_tokens)
        if result is not None:  # nothing is sampled, so nothing else ends the step
            recorder.end()
        return result

    return execute_model


def _sampled(original: Callable[..., Any], asked: Record) -> Callable[..., Any]:
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if record.ACTIVE is not None:
            record.ACTIVE.end()
        return result

    return sample_tokens


def _shutdown(original: Callable[..., Any], asked: Record) -> Callable[..., Any]:
    def shutdown(self: Any) -> Any:
        if record.ACTIVE is not None:
            record.ACTIVE.close()
        return original(self)

    return shutdown


def _logits(original: Callable[..., Any], asked: Record) -> Callable[..., Any]:
    def _sample(self: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        if record.ACTIVE is not None:
            record.ACTIVE.logits(logits)
        return original(self, logits, *args, **kwargs)

    return _sample


# ---------------------------------------------------------------- layers


def _moe(original: Callable[..., Any], asked: Record) -> Callable[..., Any]:
    def __init__(self: Any, layer_name: str, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # stands for the runner's own
        original(self, layer_name, *args, **kwargs)
        self.router.b70_layer = layer_name

    return __init__


def _router(original: Callable[..., Any], asked: Record) -> Callable[..., Any]:
    import torch

    hidden_too = "hidden" in asked.what

    def _select_experts(self: Any, hidden_states: Any, router_logits: Any, *args: Any, **kwargs: Any) -> Any:
        layer = getattr(self, "b70_layer", "")
        if torch.compiler.is_compiling():
            # What the op gives is what goes on, so no compiler can drop it.
            if hidden_too:
                hidden_states, router_logits = torch.ops.b70_replay.tap(hidden_states, router_logits, "gate", layer)
            weights, ids = original(self, hidden_states, router_logits, *args, **kwargs)
            return torch.ops.b70_replay.tap(weights, ids, "router", layer)
        weights, ids = original(self, hidden_states, router_logits, *args, **kwargs)
        recorder = record.ACTIVE
        if recorder is not None:
            if hidden_too:
                recorder.gate(layer, hidden_states, router_logits)
            recorder.route(layer, weights, ids)
        return weights, ids

    return _select_experts


def _gdn(original: Callable[..., Any], asked: Record) -> Callable[..., Any]:
    def _cpu_gdn_attention_nonspec(layer: Any, attn_metadata_i: Any, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any) -> None:
        recorder, held = record.ACTIVE, None
        if recorder is not None:
            held = recorder.gdn_begins(layer, attn_metadata_i, mixed_qkv=mixed_qkv, a=a, b=b)
        original(layer, attn_metadata_i, mixed_qkv, b, a, core_attn_out)
        if recorder is not None and held is not None:
            recorder.gdn_weights(layer, _gdn_weights, _gdn_modes)
            recorder.gdn_ends(layer, held, core_attn_out)

    return _cpu_gdn_attention_nonspec


def _gdn_weights(layer: Any) -> dict[str, Any]:
    """conv_weights [channels, taps] as they were before a CPU packed them, and the gates' parameters."""
    conv = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", layer.conv1d.weight)
    weights = {"conv_weights": conv.reshape(conv.shape[0], conv.shape[-1]), "A_log": layer.A_log, "dt_bias": layer.dt_bias}
    return weights if layer.conv1d.bias is None else weights | {"conv_bias": layer.conv1d.bias}


def _gdn_modes(layer: Any) -> dict[str, str]:
    """The CPU's kernels see a state as [K, V], whatever the table says."""
    names = {"torch.float32": "f32", "torch.bfloat16": "bf16", "torch.float16": "f16"}
    modes = {"state_layout": "k_v", "dt_bias": names[str(layer.dt_bias.dtype)], "ssm_state": names[str(layer.kv_cache[1].dtype)]}
    return modes if layer.conv1d.bias is None else modes | {"conv_bias": "bias_last"}


def _gdn_z(original: Callable[..., Any], asked: Record) -> Callable[..., Any]:
    import torch

    def _output_projection(self: Any, core_attn_out: Any, z: Any) -> Any:
        if torch.compiler.is_compiling():
            core_attn_out, z = torch.ops.b70_replay.tap(core_attn_out, z, "gdn_z", self.prefix)
        elif record.ACTIVE is not None:
            record.ACTIVE.gdn_z(self.prefix, z)
        return original(self, core_attn_out, z)

    return _output_projection


_HOOKS: Mapping[str, Callable[[Callable[..., Any], Record], Callable[..., Any]]] = {
    "worker": _worker, "runner": _runner, "step": _step, "sampled": _sampled, "shutdown": _shutdown, "logits": _logits,
    "moe": _moe, "router": _router, "gdn": _gdn, "gdn_z": _gdn_z,
}  # fmt: skip


# ---------------------------------------------------------------- an operation that outlives compilation


def _tap(first: Any, second: Any, what: str, layer: str) -> tuple[Any, Any]:
    recorder = record.ACTIVE
    if recorder is None:
        return first.clone(), second.clone()
    if what == "router":
        recorder.route(layer, first, second)
    elif what == "gate":
        recorder.gate(layer, first, second)
    else:
        recorder.gdn_z(layer, second)
    begin = time.perf_counter_ns()
    passed_on = first.clone(), second.clone()
    recorder.hook_ns += time.perf_counter_ns() - begin
    return passed_on


_LIBRARY: Any = None


def _define_tap() -> None:
    """``b70_replay::tap(first, second, what, layer)`` gives copies of both: opaque to Dynamo and Inductor. Once a process."""
    global _LIBRARY
    if _LIBRARY is not None:
        return
    import torch

    _LIBRARY = torch.library.Library("b70_replay", "DEF")  # type: ignore[no-untyped-call]  # torch has no annotations there
    _LIBRARY.define("tap(Tensor first, Tensor second, str what, str layer) -> (Tensor, Tensor)")
    _LIBRARY.impl("tap", _tap, "CompositeExplicitAutograd")
    torch.library.register_fake(_OP, lambda first, second, what, layer: (torch.empty_like(first), torch.empty_like(second)))
