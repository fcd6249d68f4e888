"""Captured tensors: a safetensors file whose metadata says what form it has, mapped and not read.

The metadata holds ``form``, ``layer`` and ``modes`` (the named modes, as JSON). bf16 comes as uint16 bit patterns: numpy has
none, for which safetensors' own reader wants torch or a copy of all bytes.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.captures.manifest import Capture, Holds
from replay.captures.select import Select, chosen_starts, compiled, layer_label
from replay.errors import InputError
from replay.model import Source

_DTYPES = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "I32": "<i4"}
NAMES = {"BF16": "bf16", "F16": "f16", "F32": "f32", "I32": "i32"}
_WRITTEN = {"float32": "F32", "float16": "F16", "int32": "I32", "uint16": "BF16"}
_HEADER_LIMIT = 100 << 20
# What a capture of tensors holds → the form that its files say they have.
FORMS: Mapping[Holds, str] = {"states": "b70-state/1", "logits": "b70-logits/1", "gates": "b70-gate/1"}


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class TensorFile:
    """One opened file; tensors are views of the mapped bytes."""

    path: Path
    meta: dict[str, str]
    layer: str
    modes: dict[str, str]
    entries: dict[str, _Tensor]
    data: NDArray[np.uint8]

    def has(self, name: str) -> bool:
        """Whether the file has a tensor of that name."""
        return name in self.entries

    def dtype(self, name: str) -> str:
        """``bf16``, ``f16``, ``f32`` or ``i32``."""
        return NAMES[self.entries[name].dtype]

    def tensor(self, name: str) -> NDArray[Any]:
        """One tensor; InputError where the file has none."""
        if name not in self.entries:
            raise InputError(str(self.path), name, "a tensor of that name", "none")
        entry = self.entries[name]
        begin, end = entry.data_offsets
        return self.data[begin:end].view(_DTYPES[entry.dtype]).reshape(entry.shape)

    def check_shape(self, name: str, shape: tuple[int, ...], why: str = "") -> None:
        """InputError where a tensor has another shape."""
        if self.tensor(name).shape != shape:
            raise InputError(str(self.path), name, f"shape {shape}{why}", str(self.tensor(name).shape))

    def check_dtype(self, name: str, wanted: Iterable[str], why: str = "") -> None:
        """InputError where a tensor has none of these dtypes."""
        wanted = tuple(wanted)
        if self.dtype(name) not in wanted:
            raise InputError(str(self.path), name, " or ".join(wanted) + why, self.dtype(name))

    def check_numbers(self, name: str, *, infinite: bool = False) -> None:
        """InputError for a NaN, or where they are not welcome an infinity, by its place."""
        array = self.tensor(name)
        for first, part in enumerate(array):  # row by row: a captured tensor may be gigabytes
            bad = _strange(np.asarray(part), self.dtype(name), infinite)
            if bad.any():
                at = [first, *np.argwhere(bad)[0].tolist()]
                told = ("a number", "NaN") if infinite else ("a finite number", "NaN or inf")
                raise InputError(str(self.path), f"{name}{at}", *told)


def _strange(array: NDArray[Any], dtype: str, infinite: bool) -> NDArray[np.bool_]:
    if dtype == "i32":
        return np.zeros(array.shape, bool)
    if dtype == "bf16":
        magnitude = array & 0x7FFF
        return np.asarray(magnitude > 0x7F80 if infinite else magnitude >= 0x7F80)
    return np.asarray(np.isnan(array) if infinite else ~np.isfinite(array))


F = TypeVar("F", bound=TensorFile)


def holds_of(path: Path) -> Holds:
    """What a file says it holds; InputError for one that says nothing of the kind."""
    form = _header(path)[0].get("form", "")
    for holds, known in FORMS.items():
        if form == known:
            return holds
    raise InputError(str(path), "form", " or ".join(FORMS.values()), form or "none")


def modes_of(path: Path) -> dict[str, str]:
    """The named modes that a file was captured with."""
    modes: dict[str, str] = decoded(path, _header(path)[0], "modes", dict[str, str])
    return modes


def _header(path: Path) -> tuple[dict[str, str], dict[str, _Tensor], NDArray[np.uint8]]:
    """(metadata, tensors by name, the bytes behind the header) of a mapped file."""

    def refused(field: str, expected: str, got: object) -> InputError:
        return InputError(str(path), field, expected, str(got))

    if path.stat().st_size < 8:
        raise refused("header", "a safetensors file", f"{path.stat().st_size} bytes")
    data = np.memmap(path, np.uint8, "r")
    length = int(data[:8].view("<u8")[0])
    if length > min(len(data) - 8, _HEADER_LIMIT):
        raise refused("header", "a safetensors file", f"a header of {length} bytes in a file of {len(data)}")
    try:
        header = msgspec.json.decode(bytes(data[8 : 8 + length]), type=dict[str, msgspec.Raw])
        meta = msgspec.json.decode(header.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        entries = {name: msgspec.json.decode(raw, type=_Tensor) for name, raw in header.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refused("header", "a safetensors header", error) from None
    return meta, entries, data[8 + length :]


def decoded(path: Path, meta: Mapping[str, str], field: str, kind: Any) -> Any:
    """A field of the metadata that holds JSON, an empty object where there is none; InputError otherwise."""
    try:
        return msgspec.json.decode(meta.get(field, "{}"), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(str(path), "header", "a safetensors header", str(error)) from None


def open_tensors(path: Path, form: str, vectors: Iterable[str], kind: type[F]) -> F:
    """Map a file and read its header; InputError for anything that is not a file of that form. ``vectors``: the tensors that
    have one dimension."""

    def refused(field: str, expected: str, got: object) -> InputError:
        return InputError(str(path), field, expected, str(got))

    meta, entries, body = _header(path)
    modes = decoded(path, meta, "modes", dict[str, str])
    if meta.get("form") != form:
        raise refused("form", form, meta.get("form"))
    if not meta.get("layer"):
        raise refused("layer", "what the tensors are of", "none")
    ends = [0, *sorted(end for entry in entries.values() for end in entry.data_offsets), len(body)]
    if ends[::2] != ends[1::2]:  # each tensor ends where the next begins
        raise refused("data_offsets", "tensors one behind the other, to the end of the file", "a gap or an overlap")
    vectors = tuple(vectors)
    for name, entry in entries.items():
        if not all(0 <= extent < 1 << 40 for extent in entry.shape) or (name in vectors and len(entry.shape) != 1):
            raise refused(f"{name}: shape", "sizes of 0 or more, one of them for an index", list(entry.shape))
        if entry.dtype not in _DTYPES:
            raise refused(f"{name}: dtype", f"one of {', '.join(_DTYPES)}", entry.dtype)
        begin, end = entry.data_offsets
        if not 0 <= begin <= end <= len(body) or end - begin != math.prod(entry.shape) * np.dtype(_DTYPES[entry.dtype]).itemsize:
            raise refused(f"{name}: data_offsets", f"{entry.shape} of {entry.dtype} inside the file", entry.data_offsets)
    return kind(path, meta, meta["layer"], modes, entries, body)


def save_tensors(path: Path, meta: Mapping[str, str], tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write a file in safetensors' form; uint16 is taken as bf16."""
    entries: dict[str, Any] = {"__metadata__": meta}
    at = 0
    for name, array in tensors.items():
        entries[name] = {"dtype": _WRITTEN[array.dtype.name], "shape": array.shape, "data_offsets": (at, at + array.nbytes)}
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


def bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """f32 → bf16 bits, round to nearest even, of numbers. (The oracle's own is of another room.)"""
    u = np.ascontiguousarray(x).view(np.uint32)
    return ((u + (0x7FFF + ((u >> 16) & 1))) >> 16).astype(np.uint16)


# ---------------------------------------------------------------- which files and rows


def check_layers(capture: Capture, files: Iterable[TensorFile], check: Callable[[Any], None]) -> None:
    """Every file of a capture checked, each of a layer of its own."""
    seen: dict[str, TensorFile] = {}
    for file in files:
        check(file)
        if (other := seen.setdefault(layer_label(file.layer), file)) is not file:
            raise InputError(str(file.path), "layer", f"another than {other.path.name} has", file.layer)


def file_of(layer: str, files: Iterable[F]) -> F:
    """The file of a layer that a case id names; InputError where there is none."""
    found = {layer_label(file.layer): file for file in files}
    if layer not in found:
        raise InputError("--case", "layer", f"one of {', '.join(found)}", layer)
    return found[layer]


def check_window(wanted: Source, rows: int) -> None:
    """InputError where a case id's rows are more than there are."""
    if wanted.start + wanted.rows > rows:
        raise InputError("--case", "rows", f"start + rows ≤ {rows}", f"{wanted.start} + {wanted.rows}")


def windows(
    capture: Capture, select: Select, files: Iterable[F], rows_of: Callable[[F], int], what: str
) -> Iterator[tuple[F, Source]]:
    """Each file whose layer matches, with each window of its rows that was asked for; ``what`` they are. InputError where no
    layer matches, or a window does not fit."""
    layer_re = compiled("--route-layer-regex", select.layer_regex)
    chosen = [file for file in files if layer_re.search(file.layer)]
    if not chosen:
        expected = f"one that matches a layer of {capture.name}"
        raise InputError("--route-layer-regex", "pattern", expected, repr(select.layer_regex))
    for window in select.windows:
        for file in chosen:
            rows = rows_of(file)
            starts = chosen_starts(select, rows, window)
            if bad := [s for s in starts if s + window > rows]:
                expected = f"start + window ≤ the {rows} {what} of {file.layer}"
                raise InputError("--route-start-indices", "index", expected, f"{bad[0]} + {window}")
            for start in starts[: select.max_cases]:
                yield file, Source(capture.name, layer_label(file.layer), start, window)
