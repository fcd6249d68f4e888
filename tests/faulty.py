"""Kernels with one planted fault each, for every stage: ``faulty:STAGE:FAULT``. Each wraps the eager kernel.

flip      one bit of one output element is inverted
swap      two rows of an output are exchanged
drop      the first row of an output is never written
scribble  a byte behind an output is written
mutate    an input is changed
dense     inputs are read as if their rows lay side by side
"""

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from replay.kernels import eager, eager_gdn, eager_topk
from replay.model import Kernel, Problem
from replay.stages import STAGES

_EAGER = {k.stage: k for k in (*eager.KERNELS, *eager_gdn.KERNELS, *eager_topk.KERNELS) if "cpu" in k.devices}
OUTPUT = {
    "moe.quantize": "q",
    "moe.route": "unpermuted_to_permuted",
    "moe.remap": "a",
    "moe.gemm1": "gate_up",
    "moe.act_quant": "h",
    "moe.gemm2": "y",
    "moe.combine": "out",
    "moe.shared": "out",
    "moe.middle": "y",
    "moe.layer": "out",
    "gdn.conv": "qkv",
    "gdn.recurrent": "core_attn_out",
    "gdn.step": "core_attn_out",
    "topk.greedy": "token",
    "topk.rows": "indices",
    "topk.router": "topk_weights",
}


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.view(torch.uint8)


def flip(t: Mapping[str, Any], output: str) -> None:
    """Invert the lowest bit of the last element."""
    _bytes(t[output]).view(-1)[-t[output].element_size()] ^= 1


def swap(t: Mapping[str, Any], output: str) -> None:
    """Exchange the first two rows."""
    t[output][[0, 1]] = t[output][[1, 0]]


def drop(t: Mapping[str, Any], output: str) -> None:
    """Row 0 is what it was before the call; ``_prepare`` keeps it."""


def scribble(t: Mapping[str, Any], output: str) -> None:
    """Write one element past the end."""
    tensor = t[output]
    beyond = tensor.as_strided((tensor.numel() + 1,), (1,))
    beyond[-1] = 1


def mutate(t: Mapping[str, Any], output: str) -> None:
    """Change the first input."""
    first = next(iter(t.values()))
    _bytes(first.reshape(-1))[0] ^= 1


def dense(t: Mapping[str, Any], output: str) -> None:
    """Strides are not looked at; ``_prepare`` hands the kernel such views."""


FAULTS = (flip, swap, drop, scribble, mutate, dense)


def _dense(tensor: Any) -> Any:
    steps = [1]
    for extent in reversed(tensor.shape[1:]):
        steps.append(steps[-1] * extent)
    return tensor.as_strided(tensor.shape, tuple(reversed(steps)))


def _prepare(stage: str, fault: Callable[[Mapping[str, Any], str], None]) -> Callable[..., Any]:
    def prepare(problem: Problem, weights: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], None]:
        module, _, name = _EAGER[stage].prepare.partition(":")
        right = getattr(importlib.import_module(module), name)(problem, weights)

        def run(t: Mapping[str, Any]) -> None:
            before = t[OUTPUT[stage]][0].clone()
            right({n: tensor if n.endswith("_state") else _dense(tensor) for n, tensor in t.items()} if fault is dense else t)
            fault(t, OUTPUT[stage])
            if fault is drop:
                t[OUTPUT[stage]][0] = before

        return run

    return prepare


def _prepare_mode(stage: str, mode: str, value: str) -> Callable[..., Any]:
    def prepare(problem: Problem, weights: Mapping[str, Any]) -> Any:
        module, _, name = _EAGER[stage].prepare.partition(":")
        return getattr(importlib.import_module(module), name)(problem.with_mode(mode, value), weights)

    return prepare


def _kernels() -> list[Kernel]:
    found = []
    for stage in OUTPUT:
        variants = {f.__name__: _prepare(stage, f) for f in FAULTS}
        for mode, values in STAGES[stage].modes.items():
            plain = [
                v for v in values if v.replace("_", "").isalnum() and v != "bf16" and mode not in ("bias", "shared", "padding")
            ]
            variants |= {f"{mode}-{v}": _prepare_mode(stage, mode, v) for v in plain}
        for variant, prepare in variants.items():
            name = re.sub(r"\W", "_", f"prepare_{stage}_{variant}")
            globals()[name] = prepare
            found.append(Kernel(id=f"faulty:{stage}:{variant}", prepare=f":{name}"))
            if variant == "dense":
                declared = Kernel(id=f"faulty:{stage}:dense-declared", prepare=f":{name}", layouts=("contiguous",))
                found.append(declared)
    return found


KERNELS = _kernels()
