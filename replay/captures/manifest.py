"""A capture folder's manifest: what its files are, what made them, and the sha256 of each."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from replay.data import path as data_path
from replay.errors import InputError
from replay.model import Geometry, preset

MANIFEST = "manifest.json"
TENSOR_SUFFIX = ".safetensors"


Holds = Literal["routes", "states", "logits", "gates"]


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of the capture; ``path`` is relative to the manifest."""

    path: str
    holds: Holds
    sha256: str
    bytes: int


class Recorded(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a recording went: what served, what was asked for (``record``), ranks that agree, steps and rows; steps that were
    ``dropped``, or ``lost`` with a process or behind a fault; why it ended, and ``faults`` where something broke it off."""

    versions: dict[str, str]
    record: dict[str, Any]
    ranks: int
    steps: int
    rows: int
    dropped: int
    lost: int
    ended: str
    faults: list[str] = []


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """``origin`` says whether a router or a generator chose the routes; ``made_by`` is the command that did."""

    form: Literal["b70-capture/1"]
    name: str
    origin: Literal["recorded", "generated"]
    made_by: str
    geometry: Geometry
    modes: dict[str, str]
    files: list[FileEntry]
    generator: dict[str, Any] | None = None
    recorded: Recorded | None = None


def default_geometry(holds: Holds, model: str | None = None, tp: int | None = None) -> Geometry:
    """The sizes of a capture without a manifest, where nothing else is asked for: Qwen3.6 at TP4, and whole what a sampler sees.
    ValueError as ``preset`` has it."""
    return preset("qwen36" if model is None else model, (1 if holds == "logits" else 4) if tp is None else tp)


@dataclass(frozen=True)
class Capture:
    """An opened capture: its name in case ids, its files, and its manifest where it has one.

    ``modes`` are those that it was made with. ``sha256`` is that of its one file, or of its files' in a row.
    """

    name: str
    holds: Holds
    files: tuple[Path, ...]
    sha256: str
    manifest: Manifest | None
    modes: Mapping[str, str]

    @property
    def routes(self) -> Path:
        """The route file; InputError where the capture holds states."""
        if self.holds != "routes":
            raise InputError(self.name, "holds", "routes", self.holds)
        return self.files[0]


def file_sha256(path: Path) -> str:
    """sha256 of a file, as hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_manifest(path: Path) -> Manifest:
    """Read and check one manifest; its files are not touched."""
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(str(path), "manifest", "form b70-capture/1", str(error)) from None
    try:
        manifest.geometry.checked()
    except ValueError as error:
        field, _, rest = str(error).partition(": expected ")
        expected, _, got = rest.partition(", got ")
        raise InputError(str(path), f"geometry: {field}", expected, got) from None
    if "/" in manifest.name or not manifest.name:
        raise InputError(str(path), "name", "a name without a slash", repr(manifest.name))
    return manifest


def check_files(folder: Path, manifest: Manifest) -> None:
    """Every file there, of the size and sha256 that the manifest states, and none outside the folder."""
    for entry in manifest.files:
        path = folder / entry.path
        if not path.resolve().is_relative_to(folder.resolve()):
            raise InputError(str(folder / MANIFEST), f"files[{entry.path}]", "a path inside the folder", entry.path)
        if not path.is_file():
            raise InputError(str(folder / MANIFEST), f"files[{entry.path}]", "a file", "no such file")
        if path.stat().st_size != entry.bytes:
            raise InputError(str(path), "bytes", str(entry.bytes), str(path.stat().st_size))
        if (got := file_sha256(path)) != entry.sha256:
            raise InputError(str(path), "sha256", entry.sha256, got)


def locate(name: str) -> Path:
    """A path, or the name of a capture that travels with the package."""
    path, own = Path(name), data_path("captures", name)
    return own if not path.exists() and "/" not in name and own.is_dir() else path


def open_capture(path: Path, holds: Holds | None = None) -> Capture:
    """Open a capture folder, or one route, state or logit file (a manifest beside it that names it is used).

    A folder that holds several kinds is opened as what is asked for, or as the first of them. Raises InputError for a missing
    path, a folder without a manifest, a recording that was not closed, or a file that its manifest does not describe.
    """
    if not path.exists():
        raise InputError(str(path), "path", "a capture", "no such file or folder")
    folder = path if path.is_dir() else path.parent
    if path.is_dir() and not (path / MANIFEST).is_file():
        if any(path.glob("rank*.journal")):
            close = f"b70-replay capture close {path}"
            raise InputError(str(path), "path", f"a capture (`{close}` makes one)", "a recording that was not closed")
        raise InputError(str(path), "path", f"a route file, or a folder with {MANIFEST}", "a directory without one")
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(folder / MANIFEST)
        entries = [e for e in manifest.files if path in (folder, folder / e.path)]
        if entries:
            return _described(folder, manifest, entries, holds)
        if path.is_dir():
            raise InputError(str(folder / MANIFEST), "files", "a file that holds routes, states or logits", "none")
    if not path.is_file():
        raise InputError(str(path), "path", "a regular file", "something else")
    sha256 = file_sha256(path)
    if path.suffix == TENSOR_SUFFIX:
        from replay.captures.tensors import holds_of

        return Capture(sha256[:8], holds_of(path), (path,), sha256, None, _modes_of([path]))
    return Capture(sha256[:8], "routes", (path,), sha256, None, {})


def kinds(path: Path) -> tuple[Holds, ...]:
    """What a capture holds, in its manifest's order; InputError as ``open_capture`` has it."""
    folder = path if path.is_dir() else path.parent
    if (folder / MANIFEST).is_file():
        entries = read_manifest(folder / MANIFEST).files
        if found := tuple(dict.fromkeys(e.holds for e in entries if path in (folder, folder / e.path))):
            return found
    return (open_capture(path).holds,)


def _described(folder: Path, manifest: Manifest, entries: list[FileEntry], asked: Holds | None) -> Capture:
    """A capture as its manifest describes it; of several route files the first is read."""
    from replay.captures.seeded import folder_of

    folder = folder_of(folder, manifest)
    check_files(folder, manifest)
    holds = asked if any(e.holds == asked for e in entries) and asked else entries[0].holds
    chosen = [e for e in entries if e.holds == holds][: 1 if holds == "routes" else None]
    files = tuple(folder / e.path for e in chosen)
    sha256 = chosen[0].sha256 if len(chosen) == 1 else hashlib.sha256("".join(e.sha256 for e in chosen).encode()).hexdigest()
    modes = dict(manifest.modes) if holds == "routes" else {**_modes_of(files), **manifest.modes}
    return Capture(manifest.name, holds, files, sha256, manifest, modes)


def _modes_of(files: Iterable[Path]) -> dict[str, str]:
    """The modes that tensor files were captured with; InputError where two differ."""
    from replay.captures.tensors import modes_of

    modes: dict[str, str] = {}
    for file in files:
        for name, value in modes_of(file).items():
            if modes.setdefault(name, value) != value:
                raise InputError(str(file), f"mode {name}", f"{modes[name]}, as in the files before it", value)
    return modes
