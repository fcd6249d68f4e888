"""Provider ``xpu_kernels``: what runs on the card today, vllm-xpu-kernels as released and the lab's fork, bound by
``adapters``.

An operation is there where its schema is the one that its binding was written for; of the fork's only the names of the
arguments are known, and only they are held. What differs is UNAVAILABLE, with operation and difference; nothing else is run in
its place.
"""

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay import cache
from replay.errors import InputError
from replay.kernels.adapters import BINDINGS, Binding, arguments_of
from replay.model import Kernel, Problem

if TYPE_CHECKING:
    import torch

    from replay.kernels.registry import Run

    Tensors = Mapping[str, torch.Tensor]

LIBRARY, BUILD = "vllm_xpu_kernels", "xpu_kernels@"
_SPACES = ("_C", "_moe_C", "_xpu_C")
# The library's own switch to a slow reference in torch.
REFERENCE_SWITCH = "VLLM_XPU_FUSED_MOE_USE_REF"


def _function(name: str) -> str:
    return "prepare_" + name.replace(".", "_").replace(":", "_")


_BY_FUNCTION = {_function(name): binding for name, binding in BINDINGS.items()}


def _kernel(provider: str, name: str, binding: Binding, need: str) -> Kernel:
    return Kernel(
        id=f"{provider}:{name}", prepare=f"{__name__}:{_function(name)}", devices=("xpu",), modes=binding.modes,
        needs=("python:torch", f"off:{REFERENCE_SWITCH}", need), layouts=("contiguous",), budgeted=True,
        summary=f"{'the fork' if binding.named else 'released'}: {binding.op}",
    )  # fmt: skip


KERNELS = tuple(_kernel("xpu_kernels", name, binding, f"op:{name}") for name, binding in BINDINGS.items())


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


# ---------------------------------------------------------------- one build of the library, by its folder


def file_of(build_: str) -> str:
    """The file of kernels that ``xpu_kernels@FOLDER`` stands for, written to the cache; others stay what they are.

    So a build is a file like any other that is brought by ``--load``: two of them never share a process, and the libraries that
    each maps are hashed into the run. InputError where the folder holds no build.
    """
    if not build_.startswith(BUILD):
        return build_
    folder = Path(build_.removeprefix(BUILD)).resolve()
    if not _libraries(folder):
        found = f"none in {folder}" if folder.is_dir() else f"no folder {folder}"
        raise InputError(build_, "--load", f"a build of {LIBRARY}: {', '.join(f'{s}*.so' for s in _SPACES)}", found)
    name = f"{folder.name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:6]}"
    file = cache.folder() / "builds" / f"{name}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    text = (
        f'"""The build of vllm-xpu-kernels in {folder}."""\n\nfrom replay.kernels.xpu_kernels import build\n\n'
        f"KERNELS = build({str(folder)!r}, {BUILD + name!r})\n"
    )
    cache.write(file, text.encode())
    return str(file)


def build(folder: str, provider: str) -> tuple[Kernel, ...]:
    """Load the libraries of a folder into this process; the kernels of what they register, and why others are not there."""
    import torch

    for library in _libraries(Path(folder)):
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return tuple(_kernel(provider, name, b, f"lacks:{lacking_op(name) or ''}") for name, b in BINDINGS.items())


def _libraries(folder: Path) -> list[Path]:
    return [library for space in _SPACES for library in sorted(folder.glob(f"{space}*.so"))]


# ---------------------------------------------------------------- schemas


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
