"""Make a logit capture from a seed: logits as a trained model's head has them, and rows that differ in their low bits alone.

``lm_head``: 2.65·N(0, 1), and in 35 rows of a hundred one token lifted by 6 above the others' largest, as where a model is sure;
in bf16. So of 151,936 logits the largest ties in about 3 % of rows, and the twentieth with the twenty-first in about 54 %.
``narrow``: f32 between 1 and 1.00012, the upper 22 bits alike: what a selection by leading digits cannot tell apart.
numpy's Philox, so that a seed gives the same capture everywhere; the manifest's sha256 says so.
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.captures.logits import FORM
from replay.captures.manifest import FileEntry, file_sha256
from replay.captures.tensors import bf16, save_tensors
from replay.model import Geometry

SPREAD, SURE, LIFT = 2.65, 0.35, 6
_ONE, _LOW_BITS = 0x3F800000, 1 << 10


class LogitModel(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the generator: requests that decode together, steps of each, and rows of narrow range."""

    seed: int = 20260615
    requests: int = 16
    steps: int = 4
    narrow: int = 16


def draw_rows(rng: np.random.Generator, rows: int, vocab: int) -> NDArray[np.uint16]:
    """bf16 bits [rows, vocab], with ties as a trained model's logits have them."""
    drawn = rng.standard_normal((rows, vocab), np.float32) * np.float32(SPREAD)
    sure = np.flatnonzero(rng.random(rows) < SURE)
    drawn[sure, rng.integers(0, vocab, len(sure))] = drawn[sure].max(1) + np.float32(LIFT)
    return bf16(drawn)


def draw_narrow(rng: np.random.Generator, rows: int, vocab: int) -> NDArray[np.float32]:
    """f32 [rows, vocab] that differ in the low ten bits alone."""
    return (rng.integers(0, _LOW_BITS, (rows, vocab), np.uint32) + np.uint32(_ONE)).view(np.float32)


def save(path: Path, layer: str, logits: NDArray[Any], requests: int) -> None:
    """Write one logit file, ``requests`` rows a step; uint16 is taken as bf16."""
    row = np.arange(len(logits), dtype=np.int32)
    index = {"step": row // np.int32(requests), "request": row % np.int32(requests)}
    save_tensors(path, {"form": FORM, "layer": layer, "modes": "{}"}, {"logits": logits, **index})


def generate(folder: Path, geometry: Geometry, model: LogitModel) -> list[FileEntry]:
    """Write both files; the same arguments give the same bytes."""
    rng = np.random.Generator(np.random.Philox(key=[model.seed, geometry.vocab]))
    drawn: dict[str, NDArray[Any]] = {
        "lm_head": draw_rows(rng, model.requests * model.steps, geometry.vocab),
        "narrow": draw_narrow(rng, model.narrow, geometry.vocab),
    }
    entries = []
    for layer, logits in drawn.items():
        path = folder / f"{layer}.safetensors"
        save(path, layer, logits, model.requests)
        entries.append(FileEntry(path.name, "logits", file_sha256(path), path.stat().st_size))
    return entries
