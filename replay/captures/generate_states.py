"""Make a state capture from a seed: GDN states and inputs as a trained model's first layer has them.

Distributions: projected q, k, v, z, b and a in bf16, q|k|v and z N(0, 1), b 0.65 + N(0, 1), a −1.7 + 1.7·N(0, 1); SSM entries
N(0, 1) times a v-head's scale, from 0.3 to 3, so that some reach ±15; conv states N(0, 1); conv weights N(0, 1)/√W; A_log
log(u), u uniform in [1, 16); dt_bias the inverse softplus of a step that is log-uniform in [0.001, 0.1]. numpy's Philox, so
that a seed gives the same capture everywhere; the manifest's sha256 says so. A layer's file holds the states of its first step
alone: those of the later ones follow from it.
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.captures.manifest import FileEntry, file_sha256
from replay.captures.states import FORM, LAYER
from replay.captures.tensors import bf16, save_tensors
from replay.model import Geometry


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


def save(path: Path, layer: int, tensors: dict[str, NDArray[Any]], modes: dict[str, str]) -> None:
    """Write one layer's state file; uint16 is taken as bf16."""
    caches = {name: _whole(tensors[name]) for name in ("conv_state", "ssm_state")}
    meta = {
        "form": FORM, "layer": LAYER.format(layer), "modes": msgspec.json.encode(modes).decode(),
        "caches": msgspec.json.encode(caches).decode(),
    }  # fmt: skip
    save_tensors(path, meta, tensors)


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
