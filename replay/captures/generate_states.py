"""Make a state capture from a seed: GDN states and inputs as a trained model's first layer has them.

Distributions: projected q, k, v, z, b and a in bf16, q|k|v and z N(0, 1), b 0.65 + N(0, 1), a −1.7 + 1.7·N(0, 1); SSM entries
N(0, 1) times a v-head's scale, from 0.3 to 3, so that some reach ±15; conv states N(0, 1); conv weights N(0, 1)/√W; A_log
log(u), u uniform in [1, 16); dt_bias the inverse softplus of a step that is log-uniform in [0.001, 0.1]. numpy's Philox, so
that a seed gives the same capture everywhere; the manifest's sha256 says so. A layer's file holds the states of its first step
alone: those of the later ones follow from it.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.captures.manifest import MANIFEST, FileEntry, Manifest, file_sha256
from replay.captures.states import FORM, LAYER
from replay.errors import InputError
from replay.model import Geometry, preset

FUNCTION = "replay.captures.generate_states:generate"
_NAMES = {"float32": "F32", "float16": "F16", "int32": "I32", "uint16": "BF16"}


class StateModel(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the generator: layers, sequences that decode together, and steps of input that each of them has."""

    seed: int = 20260615
    layers: tuple[int, ...] = (0, 21)
    sequences: int = 32
    steps: int = 8


def draw_layer(model: StateModel, layer: int, g: Geometry) -> dict[str, NDArray[Any]]:
    """The tensors of one layer's file; bf16 as uint16 bit patterns. Rows are step by step, the sequences of a step in order."""
    rng = np.random.Generator(np.random.Philox(key=[model.seed, layer]))
    n, rows = model.sequences, model.sequences * model.steps

    def normal(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape, np.float32)

    scale = np.geomspace(0.3, 3, g.v_heads).astype(np.float32)[:, None, None]
    step = np.exp(rng.uniform(np.log(0.001), np.log(0.1), g.v_heads))
    row = np.arange(rows, dtype=np.int32)
    return {
        "ssm_state": normal(n, g.v_heads, g.head_dim, g.head_dim) * scale,
        "conv_state": bf16(normal(n, g.conv_width - 1, g.conv_dim)),
        **draw_projections(rng, rows, g),
        "conv_weights": bf16(normal(g.conv_dim, g.conv_width) / np.float32(g.conv_width**0.5)),
        "A_log": np.log(rng.uniform(1, 16, g.v_heads)).astype(np.float32),
        "dt_bias": (step + np.log(-np.expm1(-step))).astype(np.float32),
        "step": row // n, "sequence": row % n, "slot": row % n, "state_row": np.where(row < n, row, -1).astype(np.int32),
    }  # fmt: skip


def draw_projections(rng: np.random.Generator, rows: int, g: Geometry) -> dict[str, NDArray[np.uint16]]:
    """``qkvz`` and ``ba`` of so many rows, in contiguous order."""

    def normal(width: int) -> NDArray[np.float32]:
        return rng.standard_normal((rows, width), np.float32)

    qkvz = bf16(normal(g.conv_dim + g.v_heads * g.head_dim))
    b, a = np.float32(0.65) + normal(g.v_heads), np.float32(-1.7) + np.float32(1.7) * normal(g.v_heads)
    return {"qkvz": qkvz, "ba": bf16(np.concatenate([b, a], axis=1))}


def bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """f32 → bf16 bits, round to nearest even, of finite numbers. (The oracle's own is of another room.)"""
    u = np.ascontiguousarray(x).view(np.uint32)
    return ((u + (0x7FFF + ((u >> 16) & 1))) >> 16).astype(np.uint16)


def save(path: Path, layer: int, tensors: dict[str, NDArray[Any]], modes: dict[str, str]) -> None:
    """Write one layer's state file in safetensors' form; uint16 is taken as bf16."""
    caches = {name: _whole(tensors[name]) for name in ("conv_state", "ssm_state")}
    meta = {
        "form": FORM, "layer": LAYER.format(layer), "modes": msgspec.json.encode(modes).decode(),
        "caches": msgspec.json.encode(caches).decode(),
    }  # fmt: skip
    entries: dict[str, Any] = {"__metadata__": meta}
    at = 0
    for name, array in tensors.items():
        entries[name] = {"dtype": _NAMES[array.dtype.name], "shape": array.shape, "data_offsets": (at, at + array.nbytes)}
        at += array.nbytes
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for array in tensors.values():
            stream.write(np.ascontiguousarray(array).tobytes())
    temporary.replace(path)  # another process may be making the same


def _whole(array: NDArray[Any]) -> dict[str, Any]:
    strides = [s // array.itemsize for s in np.ascontiguousarray(array).strides]
    return {"shape": array.shape, "stride": strides, "storage_offset": 0}


def generate(folder: Path, geometry: Geometry, model: StateModel) -> list[FileEntry]:
    """Write a file for every layer; the same arguments give the same bytes."""
    entries = []
    for layer in model.layers:
        path = folder / f"layer-{layer}.safetensors"
        save(path, layer, draw_layer(model, layer, geometry), {})
        entries.append(FileEntry(path.name, "states", file_sha256(path), path.stat().st_size))
    return entries


def again(folder: Path, manifest: Manifest) -> None:
    """Make the files that a manifest describes; check_files says whether they are the same."""
    parameters = {name: value for name, value in (manifest.generator or {}).items() if name != "function"}
    try:
        model = msgspec.convert(parameters, StateModel)
    except msgspec.ValidationError as error:
        raise InputError(manifest.name, "generator", "the fields of a StateModel", str(error)) from None
    generate(folder, manifest.geometry, model)


def describe(folder: Path, name: str, geometry: Geometry, model: StateModel) -> Manifest:
    """Write the manifest alone: its files are made when the capture is first opened."""
    with tempfile.TemporaryDirectory() as made:
        files = generate(Path(made), geometry, model)
    manifest = Manifest(
        form="b70-capture/1", name=name, origin="generated", made_by="make captures", geometry=geometry, modes={}, files=files,
        generator={"function": FUNCTION, **msgspec.to_builtins(model)},
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    return manifest


if __name__ == "__main__":
    describe(Path(sys.argv[1]), "qwen36-states-generated", preset("qwen36", 4), StateModel())
