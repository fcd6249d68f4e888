"""What ran: versions, command line, seeds, and the sha256 of sources, libraries and captures.

First form. Whatever cannot be read is ``unknown``, never left out.
"""

import hashlib
import importlib.util
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import replay
from replay.captures.manifest import file_sha256
from replay.data import path as data_path
from replay.devices import cpu_model
from replay.model import Kernel

PACKAGES = ("torch", "numpy", "scipy", "msgspec", "intel-sycl-rt", "intel-opencl-rt", "dpctl", "triton")


def package_version(package: str) -> str:
    """The installed version of a distribution, or ``absent``."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _tree_sha256(files: Iterable[Path], root: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(root)}\0{file_sha256(file)}\n".encode())
    return digest.hexdigest()


def _libraries() -> dict[str, str]:
    """The native libraries that kernels run through: name → sha256."""
    from replay.kernels.registry import missing
    from replay.kernels.sycl import NEEDS

    if any(missing(need) for need in NEEDS):
        return {}
    from replay.kernels.sycl.runtime import prefix

    root = prefix() / "lib"
    names = ("libsycl.so.9", "libsycl-jit.so", "libintelocl.so")
    return {n: file_sha256((root / n).resolve()) if (root / n).exists() else "unknown" for n in names}


def _outside(kernels: Iterable[Kernel]) -> list[Path]:
    """Source files of kernels that are not ours: those of ``--load``, and the modules that entry points name."""
    found: dict[Path, None] = {}
    for kernel in kernels:
        if kernel.file:
            found[Path(kernel.file)] = None
        for reference in filter(None, (kernel.prepare, kernel.prepack)):
            module = reference.partition(":")[0]
            if module and module.split(".")[0] != "replay":
                spec = importlib.util.find_spec(module)
                if spec and spec.origin:
                    found[Path(spec.origin)] = None
    return [path for path in found if path.is_file()]


def collect(*, argv: Sequence[str], kernels: Iterable[Kernel], seed: int, capture_sha256: str) -> dict[str, Any]:
    """The identity of a run, as plain JSON values. Reading it starts no device."""
    from replay.kernels.sycl import isa
    from replay.kernels.sycl.runtime import GPU_NUMERIC_FLAGS, NUMERIC_FLAGS

    package = Path(replay.__file__).parent
    return {
        "b70_replay": replay.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "argv": list(argv),
        "seed": seed,
        "sources": {
            "replay": _tree_sha256(package.rglob("*.py"), package),
            "sycl": _tree_sha256(data_path("sycl").glob("*.?pp"), data_path("sycl")),
            **{str(path): file_sha256(path) for path in _outside(kernels)},
        },
        "libraries": _libraries(),
        "device": cpu_model(),
        "isa_bmg_g31": isa.table() or "unknown",
        "capture": capture_sha256,
        "numeric_flags": {"sycl": list(NUMERIC_FLAGS), "sycl_gpu": list(GPU_NUMERIC_FLAGS)},
    }


# What a resumed run must share with the one that began it; the command line may differ.
BINDING = ("b70_replay", "python", "packages", "sources", "libraries", "device", "capture", "numeric_flags")


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The binding fields that differ, each with both values in short."""
    found = []
    for name in BINDING:
        a, b = before.get(name), now.get(name)
        if a == b:
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            found += [f"{name}.{k}: {a.get(k)} → {b.get(k)}" for k in sorted({*a, *b}) if a.get(k) != b.get(k)]
        else:
            found.append(f"{name}: {a} → {b}")
    return found
