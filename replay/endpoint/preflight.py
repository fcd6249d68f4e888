"""What a generated launcher checks before it starts anything: ``python -m replay.endpoint.preflight DIR ROLE SHA256``, the
last being that of DIR/identity.json.

Runs in the endpoint's own Python, under the variables that the server will have. Every difference is told, a line each;
exit code 5 when there is one.
"""

import hashlib
import importlib.util
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import msgspec

import replay
from replay import identity
from replay.captures.manifest import file_sha256
from replay.devices import Device, cpu_facts
from replay.endpoint.launcher import Promotion, placed_at, render
from replay.endpoint.spec import CACHES, read
from replay.engine.config import SECTIONS
from replay.errors import EnvironmentRefused

GIB = 1 << 30
PLUGINS, PLUGIN = "vllm.general_plugins", "b70_replay"


def differences(folder: Path, role: str, sha256: str) -> Iterator[str]:
    """All that is not as it was promoted, as ``what: expected …, got …``."""
    path = folder / "identity.json"
    changed = list(_changed({str(path): sha256}))
    yield from changed
    if changed:
        return  # an identity that was edited says nothing
    try:
        promotion = msgspec.json.decode(path.read_bytes(), type=Promotion)
    except msgspec.ValidationError as error:
        yield f"{path}: expected the form of b70-replay {replay.__version__}, got {error}"
        return
    yield from _rendered(folder, promotion)
    yield from _changed(_in_place(folder, promotion))
    yield from _versions(promotion)
    yield from _engine(role)
    yield from _variables(promotion, os.environ)
    yield from _devices(promotion)
    yield from _orphans()
    yield from _port(promotion)


def _rendered(folder: Path, promotion: Promotion) -> Iterator[str]:
    """The folder's files, rendered again from identity and endpoint file."""
    changed = list(_changed({str(folder / "endpoint.toml"): promotion.endpoint_sha256}))
    yield from changed
    if changed:
        return  # what an edited endpoint file would render says nothing
    files = render(promotion, (folder / "identity.json").read_bytes(), *read(folder / "endpoint.toml"))
    yield from _changed({str(folder / name): hashlib.sha256(data).hexdigest() for name, data in files.items()})


def _in_place(folder: Path, promotion: Promotion) -> dict[str, str]:
    """path → sha256 of what was loaded; compiled binaries are looked at where the server will find them."""
    return {
        str(placed_at(folder, path)) if path in promotion.binaries else path: sha256 for path, sha256 in promotion.files.items()
    }


def _changed(files: Mapping[str, str]) -> Iterator[str]:
    for path, wanted in files.items():
        try:
            got = file_sha256(Path(path))
        except OSError as error:
            got = (error.strerror or str(error)).lower()
        if got != wanted:
            yield f"{path}: expected sha256 {wanted}, got {got}"


def _versions(promotion: Promotion) -> Iterator[str]:
    """The measured identity against this Python and this machine: sources, versions, device, flags."""
    before = promotion.identity
    outside = [name for name in before["sources"] if name not in ("replay", "sycl")]
    try:
        facts = cpu_facts() if promotion.device == "cpu" else Device(promotion.device).facts()
    except (EnvironmentRefused, RuntimeError) as error:  # torch raises RuntimeError for a lost device
        facts = {"name": str(error).splitlines()[0]}
    now = identity.collect(argv=(), sources=outside, seed=0, capture_sha256=before["capture"], device=facts)
    measured: dict[str, Any] = {**before, "environment": {}}
    # A package that was not there when the kernel was measured had no part in it: the endpoint file pins such ones.
    measured["packages"] = {n: now["packages"].get(n) if v == "absent" else v for n, v in before["packages"].items()}
    for text in identity.differences(measured, {**now, "environment": {}}):
        name, _, values = text.partition(": ")
        expected, _, got = values.partition(" → ")
        yield f"{name}: expected {expected}, got {got}"
    for package, wanted in promotion.packages.items():
        if (version := identity.package_version(package)) != wanted:
            yield f"packages.{package}: expected {wanted}, got {version}"


def _engine(role: str) -> Iterator[str]:
    """A server to start and, for the launcher, the plugin that puts the kernel in its place: without it the server would
    come up and serve the native op."""
    if importlib.util.find_spec("vllm") is None:
        yield "vllm: expected a package that can be imported, got none"
    found = entry_points(group=PLUGINS, name=PLUGIN)
    if role == "launch" and not found:
        yield f"plugin: expected the entry point {PLUGIN} in {PLUGINS}, got none"
    elif role == "launch" and all(entry.module == "replay.engine" for entry in found) and "swap" not in SECTIONS:
        yield f"plugin: expected one that acts on [swap], got one that acts on [{', '.join(SECTIONS)}]"


def _variables(promotion: Promotion, environment: Mapping[str, str]) -> Iterator[str]:
    """Watched variables as the server would have them; those of the caches are the launcher's own."""
    now = {name: value for name, value in identity.watched(environment).items() if name not in CACHES}
    wanted = identity.watched(promotion.environment)
    for name in sorted({*now, *wanted}):
        if now.get(name) != wanted.get(name):
            yield f"{name}: expected {wanted.get(name, 'unset')!r}, got {now.get(name, 'unset')!r}"


def _devices(promotion: Promotion) -> Iterator[str]:
    """Each device there, computing, and with memory to spare."""
    kind = promotion.device.partition(":")[0]
    for name in [kind] if kind == "cpu" else [f"{kind}:{i}" for i in range(promotion.devices)]:
        try:
            device = Device(name)
            if not device.healthy():
                yield f"{name}: expected a right sum, got a wrong one"
            free = device.free_bytes() / GIB
        except (EnvironmentRefused, RuntimeError) as error:  # torch raises RuntimeError for a lost device
            yield f"{name}: expected a device that computes, got {str(error).splitlines()[0]}"
            continue
        if free < promotion.min_free_gib:
            yield f"{name}: free memory: expected {promotion.min_free_gib:g} GiB or more, got {free:.1f}"


def _orphans() -> Iterator[str]:
    """vLLM workers whose server is gone: they hold memory, and sometimes a card."""
    import psutil

    found = {p.pid: p.info for p in psutil.process_iter(["ppid", "name", "cmdline"])}
    yield from orphans({pid: (i["ppid"], [i["name"] or "", *(i["cmdline"] or [])]) for pid, i in found.items()})


def orphans(processes: Mapping[int, tuple[int, Sequence[str]]]) -> Iterator[str]:
    """Of processes (pid → parent, words), those named as engine cores or workers whose parent is no part of vLLM."""

    def of_vllm(pid: int) -> bool:
        return any("vllm" in word.lower() for word in processes.get(pid, (0, ()))[1])

    for pid, (parent, words) in processes.items():
        named = next((word for word in words if word.startswith("VLLM::")), None)
        if named and not of_vllm(parent):
            yield f"workers: expected none left behind, got process {pid} ({named})"


def _port(promotion: Promotion) -> Iterator[str]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", promotion.port))
        except OSError as error:
            yield f"port {promotion.port}: expected a free one, got {(error.strerror or str(error)).lower()}"


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 where the server may start, 5 where something differs."""
    folder, role, sha256 = arguments
    found = list(differences(Path(folder), role, sha256))
    for text in found:
        print(f"{role}.sh: {text}", file=sys.stderr)
    return EnvironmentRefused.exit_code if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
