"""The kernels by id: our providers, installed entry points, and files brought by ``--load``."""

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from replay.errors import InputError
from replay.model import SELFTESTS, Kernel, Problem

ENTRY_POINTS = "b70_replay.kernels"

Run = Callable[[Mapping[str, Any]], None]
Prepare = Callable[[Problem, Mapping[str, Any]], Run]
Read = Callable[[str], tuple[Kernel, ...]]
Prepack = Callable[[Problem, Mapping[str, Any]], dict[str, Any]]


def registered(load: Iterable[str] = (), read: Read | None = None) -> dict[str, Kernel]:
    """Every kernel by id, in the order of registration. InputError for a file that fails, or an id used twice.

    ``read`` gives the kernels of a user's file; by itself it is imported here, which can be done with one build of a library
    and not with two.
    """
    from importlib.metadata import entry_points

    from replay.kernels import eager, eager_gdn, eager_topk, eager_wide, sycl, triton, xpu_kernels

    found: dict[str, Kernel] = {}
    ours = (eager.KERNELS, eager_wide.KERNELS, eager_gdn.KERNELS, eager_topk.KERNELS, sycl.KERNELS, triton.kernels())
    for provider in (*ours, xpu_kernels.KERNELS):
        _add(found, provider, "b70-replay")
    for point in entry_points(group=ENTRY_POINTS):
        where = f"entry point {point.name}"
        try:
            kernels = point.load()
        except (Exception, SystemExit) as error:  # another package's code
            raise InputError(where, point.value, "a list of kernels that imports", _one_line(error)) from None
        _add(found, kernels, where)
    for file in map(xpu_kernels.file_of, load):
        _add(found, (read or checked_file)(file), file)
    return found


def _add(found: dict[str, Kernel], kernels: Iterable[Kernel], where: str) -> None:
    for kernel in kernels:
        _check(kernel, where)
        if kernel.id in found:
            raise InputError(where, kernel.id, "an id not registered before", "a second kernel of that id")
        found[kernel.id] = kernel


def _check(kernel: Any, where: str) -> None:
    """A Kernel whose fields have their types (structs do not check them when made) and whose strings have their forms."""
    import msgspec

    if not isinstance(kernel, Kernel):
        raise InputError(where, "KERNELS", "replay.model.Kernel values", type(kernel).__name__)
    try:
        msgspec.convert(msgspec.to_builtins(kernel), Kernel)
    except (msgspec.ValidationError, TypeError) as error:
        raise InputError(where, f"KERNELS: {kernel.id!r}", "the fields of a Kernel", str(error)) from None
    if not re.fullmatch(r"[\w.@-]+:\w+\.\w+(:[\w.=-]+)?", kernel.id):
        raise InputError(where, "KERNELS", "an id provider:stage[:variant]", repr(kernel.id))
    if not re.fullmatch(r"[\w.]*:\w+", kernel.prepare) or (kernel.prepare.startswith(":") and kernel.file is None):
        raise InputError(where, kernel.id, "prepare as module:function", repr(kernel.prepare))
    if unknown := set(kernel.rests_on) - set(SELFTESTS):
        raise InputError(where, kernel.id, f"rests_on of {', '.join(SELFTESTS)}", ", ".join(sorted(unknown)))
    if "contiguous" not in kernel.layouts:
        raise InputError(where, kernel.id, "layouts that hold 'contiguous'", repr(kernel.layouts))


def checked_file(file: str) -> tuple[Kernel, ...]:
    """The kernels of a user's file, whose fields have their types and forms; InputError otherwise."""
    kernels = load_file(file)
    for kernel in kernels:
        _check(kernel, file)
    return kernels


def load_file(file: str) -> tuple[Kernel, ...]:
    """The ``KERNELS`` of a user's Python file; a prepare without a module, ``:function``, is one of that file."""
    import msgspec

    kernels = getattr(import_file(file), "KERNELS", None)
    if not isinstance(kernels, list | tuple):
        raise InputError(file, "KERNELS", "a list of replay.model.Kernel", type(kernels).__name__)
    path = str(Path(file).resolve())
    return tuple(
        msgspec.structs.replace(k, file=path) if isinstance(k, Kernel) else k  # _check says what is wrong with others
        for k in kernels
    )


def import_file(file: str) -> Any:
    """Import a Python file under a name of its own; InputError in one line when it does not import."""
    path = Path(file)
    if not path.is_file():
        raise InputError(file, "--load", "a Python file", "no such file")
    name = "b70_replay_load_" + "".join(c if c.isalnum() else "_" for c in str(path.resolve()))
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(file, "--load", "a Python file", "a file of another kind")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's file raises is his to read, in one line
        del sys.modules[name]
        raise InputError(file, "--load", "a file that imports", _one_line(error)) from None
    return module


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def resolve(kernel: Kernel, reference: str) -> Any:
    """The function behind ``module:function``, or ``:function`` of the kernel's own file."""
    module, _, name = reference.partition(":")
    holder = importlib.import_module(module) if module else import_file(kernel.file or "")
    return getattr(holder, name)


def select(kernels: Mapping[str, Kernel], globs: Iterable[str], stages: Iterable[str]) -> tuple[list[Kernel], list[str]]:
    """(kernels of those stages whose id matches a glob, ids that were named exactly). InputError for an unknown name."""
    wanted = set(stages)
    globs = list(globs)
    for glob in globs:
        hits = [k for k in kernels.values() if fnmatchcase(k.id, glob)]
        if not hits:
            raise InputError("--kernel", "id", "a registered kernel (see --list)", repr(glob))
        if not any(k.stage in wanted for k in hits):
            raise InputError("--kernel", glob, f"a kernel of the stages {', '.join(sorted(wanted))}", hits[0].stage)
    chosen = [k for k in kernels.values() if k.stage in wanted and any(fnmatchcase(k.id, g) for g in globs)]
    return chosen, [g for g in globs if g in kernels]


def unavailable(kernel: Kernel, problem: Problem, device: str, launch: str = "calls") -> str | None:
    """Why this kernel cannot run that problem here in that way, or None. Probes only what ``needs`` names."""
    kind = device.partition(":")[0]
    if kind not in kernel.devices:
        return f"runs on {', '.join(kernel.devices)}, not on {kind}"
    if launch == "graph" and not kernel.graph_safe:
        return "not graph-safe: a graph of it cannot be captured"
    return lacking_mode(kernel, dict(problem.modes)) or next(lacking(kernel.needs), None)


def lacking_mode(kernel: Kernel, modes: Mapping[str, str]) -> str | None:
    """The first of these modes that the kernel does not have, or None."""
    for name, values in kernel.modes:
        asked = modes.get(name)
        if asked is not None and asked not in values:
            return f"mode {name}={asked} is not implemented (has {', '.join(values)})"
    return None


def lacking(needs: Iterable[str]) -> Iterator[str]:
    """Why each probe string that is not met here is not; asked one after the other, as far as the caller reads."""
    return (why for need in needs if (why := missing(need)))


def missing(need: str) -> str | None:
    """Why the probe string is not met here, or None; nothing is imported but for ``op:``, which asks torch and the library."""
    kind, _, what = need.partition(":")
    if kind == "python":
        return None if importlib.util.find_spec(what) else f"no Python module {what}"
    if kind == "dist":
        from importlib.metadata import PackageNotFoundError, version

        try:
            version(what)
        except PackageNotFoundError:
            return f"no distribution {what}"
        return None
    if kind == "command":
        import shutil

        return None if shutil.which(what) else f"no command {what}"
    if kind == "variable":
        return None if os.environ.get(what) else f"{what} is not set"
    if kind == "lacks":  # what was found where the kernel's libraries are loaded
        return what or None
    if kind in ("op", "off"):
        from replay.kernels import xpu_kernels

        return xpu_kernels.lacking_op(what) if kind == "op" else xpu_kernels.switched_on(what)
    if need == "aspect:matrix":
        from replay.kernels.sycl.runtime import has_matrix_engine

        return None if has_matrix_engine() else "the device has no matrix engine"
    return f"unknown probe {need}"
