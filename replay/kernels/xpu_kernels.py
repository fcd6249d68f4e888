"""Provider ``xpu_kernels``: what runs on the card today, vllm-xpu-kernels as released and the lab's fork, bound by
``adapters``.

An operation is there where its schema is the one that its binding was written for; of the fork's only the names of the
arguments are known, and only they are held. What differs is UNAVAILABLE, with operation and difference; nothing else is run in
its place.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from replay.kernels.adapters import BINDINGS, Binding, arguments_of
from replay.model import Kernel, Problem

if TYPE_CHECKING:
    import torch

    from replay.kernels.registry import Run

    Tensors = Mapping[str, torch.Tensor]

LIBRARY = "vllm_xpu_kernels"
# The library's own switch to a slow reference in torch.
REFERENCE_SWITCH = "VLLM_XPU_FUSED_MOE_USE_REF"


def _function(name: str) -> str:
    return "prepare_" + name.replace(".", "_").replace(":", "_")


_BY_FUNCTION = {_function(name): binding for name, binding in BINDINGS.items()}

KERNELS = tuple(
    Kernel(
        id=f"xpu_kernels:{name}", prepare=f"{__name__}:{_function(name)}", devices=("xpu",), modes=binding.modes,
        needs=("python:torch", f"off:{REFERENCE_SWITCH}", f"op:{name}"), layouts=("contiguous",), budgeted=True,
        summary=f"{'the fork' if binding.named else 'released'}: {binding.op}",
    )
    for name, binding in BINDINGS.items()
)  # fmt: skip


def __getattr__(name: str) -> Any:
    """``prepare_STAGE_VARIANT`` of each binding."""
    if name in _BY_FUNCTION:
        return partial(_prepare, _BY_FUNCTION[name])
    raise AttributeError(f"module {__name__} has no attribute {name}")


def _prepare(binding: Binding, problem: Problem, weights: "Tensors") -> "Run":
    operation = find(binding.op)
    if operation is None:
        raise RuntimeError(f"no op {binding.op}")
    kept: dict[str, torch.Tensor] = {}

    def run(tensors: "Tensors") -> None:
        for given in binding.calls(problem, tensors):
            arguments = arguments_of(binding, problem, given, kept)
            binding.finish(problem, given, arguments, operation(**arguments))

    return run


def find(op: str) -> Any:
    """The operation ``space::name``, the library imported where it is; None where it has none of that name."""
    import torch

    space, _, name = op.partition("::")
    if not hasattr(getattr(torch.ops, space), name) and importlib.util.find_spec(LIBRARY):
        importlib.import_module(f"{LIBRARY}.{space}")
    return getattr(getattr(torch.ops, space), name, None)


def lacking_op(name: str) -> str | None:
    """Why the operation behind a binding cannot be called as its adapter calls it, or None. Imports the library where it is."""
    binding = BINDINGS[name]
    if "torch" not in sys.modules and not importlib.util.find_spec(LIBRARY):
        return f"no op {binding.op} (no Python module {LIBRARY})"
    try:
        operation = find(binding.op)
    except (ImportError, OSError) as error:
        return f"no op {binding.op} ({LIBRARY} does not load: {(str(error) or type(error).__name__).splitlines()[0]})"
    if operation is None or not hasattr(operation, "default"):
        why = "" if importlib.util.find_spec(LIBRARY) else f" (no Python module {LIBRARY})"
        return f"no op {binding.op}{why}"
    return difference(binding, operation.default._schema)


def difference(binding: Binding, found: Any) -> str | None:
    """The first argument, or the result, in which an operation's schema is not what its binding was written for."""
    import torch

    wanted = torch._C.parse_schema(f"{binding.op}{binding.schema}")
    for place, want in enumerate(wanted.arguments):
        if place == len(found.arguments):
            return f"op {binding.op}: argument {place}: expected {want.name!r}, got no more"
        got = found.arguments[place]
        if got.name != want.name:
            return f"op {binding.op}: argument {place}: expected {want.name!r}, got {got.name!r}"
        if not binding.named and str(got.type) != str(want.type):
            return f"op {binding.op}: argument {want.name!r}: expected {want.type}, got {got.type}"
        if not binding.named and _written(got) != _written(want):
            return f"op {binding.op}: argument {want.name!r}: expected {_kind(want)}, got {_kind(got)}"
    extra = [a for a in found.arguments[len(wanted.arguments) :] if not a.has_default_value()]
    if extra:
        return f"op {binding.op}: argument {len(wanted.arguments)}: expected no more, got {extra[0].name!r}"
    given, results = ([str(r.type) for r in schema.returns] for schema in (found, wanted))
    if not binding.named and given != results:
        return f"op {binding.op}: result: expected ({', '.join(results)}), got ({', '.join(given)})"
    return None


def _written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _kind(argument: Any) -> str:
    return f"{argument.type} that is {'written' if _written(argument) else 'read'}"


def switched_on(switch: str) -> str | None:
    """Why no time of the library would be its own, where the switch to its reference is set."""
    on = os.environ.get(switch, "") not in ("", "0")
    return f"{switch} is set: the library would run its own reference" if on else None
