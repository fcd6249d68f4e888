"""Logit captures: safetensors files with what a sampler saw.

A *row* is the logits of one request at one step, over the whole vocabulary::

    logits [R, vocab]   f32 or bf16         step, request  int32 [R]

The metadata's ``layer`` says what made them (``lm_head``). An infinity is an ordinary logit, a mask for one; a NaN is refused.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay.captures.manifest import Capture
from replay.captures.select import Select
from replay.captures.tensors import (
    FORMS,
    TensorFile,
    check_layers,
    check_window,
    file_of,
    open_tensors,
    windows,
)
from replay.errors import InputError
from replay.model import Case, CaseId, Geometry, Logits, Source

FORM = FORMS["logits"]
_INDEX = ("step", "request")


def open_logits(path: Path) -> TensorFile:
    """Map a file and read its header; InputError for anything that is not a logit file."""
    file = open_tensors(path, FORM, _INDEX, TensorFile)
    shape = file.tensor("logits").shape
    if len(shape) != 2 or not all(shape):
        raise InputError(str(path), "logits", "shape (rows, vocab), one row or more", str(shape))
    return file


def check_logits(file: TensorFile, geometry: Geometry) -> None:
    """Shapes and dtypes, and no NaN; InputError names the tensor and the row."""
    rows = len(file.tensor("step"))
    file.check_shape("logits", (rows, geometry.vocab), f" (geometry {geometry})")
    file.check_dtype("logits", ("f32", "bf16"))
    file.check_numbers("logits", infinite=True)
    for name in _INDEX:
        file.check_shape(name, (rows,))
        file.check_dtype(name, ("i32",))
    seen: dict[tuple[int, int], int] = {}
    for row, key in enumerate(zip(file.tensor("step").tolist(), file.tensor("request").tolist(), strict=True)):
        if (first := seen.setdefault(key, row)) != row:
            expected = f"one row a request at step {key[0]}"
            raise InputError(str(file.path), f"request[{row}]", expected, f"{key[1]}, as in row {first}")


def check_capture(capture: Capture, geometry: Geometry) -> None:
    """Every file of a capture checked, each of a layer of its own."""
    check_layers(capture, map(open_logits, capture.files), lambda file: check_logits(file, geometry))


def cases(capture: Capture, select: Select, geometry: Geometry, problem_for: Any, seed: int) -> Iterator[Case]:
    """Cases of W consecutive rows of one file."""
    files = map(open_logits, capture.files)
    for file, source in windows(capture, select, files, lambda file: len(file.tensor("step")), "rows"):
        yield Case(CaseId(problem_for(geometry, source.rows), source, seed), _rows_at(file, source))


def _rows_at(file: TensorFile, source: Source) -> Logits:
    return Logits(str(file.path.resolve()), tuple(range(source.start, source.start + source.rows)))


def find(capture: Capture, wanted: CaseId) -> Case:
    """The case that an id names; InputError where the capture has no such layer or rows."""
    file = file_of(wanted.source.layer, map(open_logits, capture.files))
    check_window(wanted.source, len(file.tensor("step")))
    return Case(wanted, _rows_at(file, wanted.source))
