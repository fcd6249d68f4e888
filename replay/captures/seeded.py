"""Captures that are a seed: their files are megabytes that a generator gives as well, so the manifest alone is kept and the files
are made in the cache when the capture is first opened.

``python -m replay.captures.seeded FOLDER`` writes the manifests that ship.
"""

import hashlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from replay import cache
from replay.captures import generate_logits, generate_states
from replay.captures.manifest import MANIFEST, FileEntry, Manifest
from replay.errors import InputError
from replay.model import Geometry, preset

STATES, LOGITS = "replay.captures.generate_states:generate", "replay.captures.generate_logits:generate"
# The generator that a manifest names → what makes the files, and the parameters that it takes.
GENERATORS: Mapping[str, tuple[Callable[[Path, Geometry, Any], list[FileEntry]], type[Any]]] = {
    STATES: (generate_states.generate, generate_states.StateModel),
    LOGITS: (generate_logits.generate, generate_logits.LogitModel),
}
SHIPPED: Mapping[str, tuple[str, Geometry, Any]] = {
    "qwen36-states-generated": (STATES, preset("qwen36", 4), generate_states.StateModel()),
    "qwen36-tp1-states-generated": (STATES, preset("qwen36", 1), generate_states.StateModel(layers=(0,), steps=2)),
    "qwen36-logits-generated": (LOGITS, preset("qwen36", 1), generate_logits.LogitModel()),
    "qwen3-next-logits-generated": (LOGITS, preset("qwen3-next", 1), generate_logits.LogitModel()),
}


def folder_of(folder: Path, manifest: Manifest) -> Path:
    """The folder with a capture's files: its own, or where they are to be generated the one in the cache, made when it is not
    there."""
    function = str((manifest.generator or {}).get("function"))
    if function not in GENERATORS or all((folder / e.path).exists() for e in manifest.files):
        return folder
    key = hashlib.sha256(msgspec.json.encode([manifest.files, manifest.generator])).hexdigest()[:16]
    cached = cache.folder() / "captures" / f"{manifest.name}-{key}"
    if not all((cached / e.path).is_file() for e in manifest.files):
        _make(cached, manifest, function)
    return cached


def _make(folder: Path, manifest: Manifest, function: str) -> None:
    """Make the files that a manifest describes; check_files says whether they are the same."""
    generate, kind = GENERATORS[function]
    parameters = {name: value for name, value in (manifest.generator or {}).items() if name != "function"}
    try:
        model = msgspec.convert(parameters, kind)
    except msgspec.ValidationError as error:
        raise InputError(manifest.name, "generator", f"the fields of a {kind.__name__}", str(error)) from None
    generate(folder, manifest.geometry, model)


def describe(folder: Path, name: str, function: str, geometry: Geometry, model: Any) -> Manifest:
    """Write the manifest alone."""
    with tempfile.TemporaryDirectory() as made:
        files = GENERATORS[function][0](Path(made), geometry, model)
    manifest = Manifest(
        form="b70-capture/1", name=name, origin="generated", made_by="make captures", geometry=geometry, modes={}, files=files,
        generator={"function": function, **msgspec.to_builtins(model)},
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    return manifest


if __name__ == "__main__":
    for shipped, what in SHIPPED.items():
        describe(Path(sys.argv[1]) / shipped, shipped, *what)
