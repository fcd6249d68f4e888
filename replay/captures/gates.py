"""Gate captures: safetensors files with what a router saw and chose.

A *row* is one token at one step: ``hidden [R, H]``, ``router_logits [R, E]``, and where they were kept ``topk_ids`` int32 and
``topk_weights`` f32 [R, k]; ``step``, ``request`` and ``position`` int32 [R]. No stage replays them yet: they are what the oracle
of a router is held against (``replay.studies.agreement``).
"""

from pathlib import Path

from replay.captures.manifest import Capture
from replay.captures.tensors import FORMS, TensorFile, check_layers, open_tensors
from replay.errors import InputError
from replay.model import Geometry

FORM = FORMS["gates"]
_INDEX = ("step", "request", "position")


def open_gates(path: Path) -> TensorFile:
    """Map a file and read its header; InputError for anything that is not a gate file."""
    return open_tensors(path, FORM, _INDEX, TensorFile)


def check_gates(file: TensorFile, geometry: Geometry) -> None:
    """Shapes, dtypes, finite rows and ids in range; InputError names the tensor and the row."""
    rows = len(file.tensor("step"))
    wanted: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        "hidden": ((rows, geometry.hidden), ("bf16", "f16", "f32")), "router_logits": ((rows, geometry.experts), ("bf16", "f32")),
        **dict.fromkeys(_INDEX, ((rows,), ("i32",))),
    }  # fmt: skip
    for name, dtype in (("topk_ids", "i32"), ("topk_weights", "f32")):
        if file.has(name):
            wanted[name] = ((rows, geometry.top_k), (dtype,))
    for name, (shape, dtypes) in wanted.items():
        file.check_shape(name, shape, f" (geometry {geometry})")
        file.check_dtype(name, dtypes)
        file.check_numbers(name)
    if file.has("topk_ids"):
        ids = file.tensor("topk_ids")
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < geometry.experts:
            raise InputError(str(file.path), "topk_ids", f"0 ≤ id < {geometry.experts}", f"{ids.min()} to {ids.max()}")


def check_capture(capture: Capture, geometry: Geometry) -> None:
    """Every file of a capture checked, each of a layer of its own."""
    check_layers(capture, map(open_gates, capture.files), lambda file: check_gates(file, geometry))
