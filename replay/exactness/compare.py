"""Compare a kernel's outputs with the oracle's, to the bit, row by row.

A NaN equals a NaN of whatever payload and nothing else. Rows are judged one by one and the worst is named: a rule over
the whole tensor can pass with rows of zeros in it.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.exactness.ulp import scaled_ulp
from replay.model import Spec
from replay.stages.stage import Budget

# Moduli of lanes, sub-groups and tiles.
RESIDUES = (2, 4, 8, 16, 32, 64, 128)

Arrays = Mapping[str, NDArray[Any]]

_NAN_ABOVE = {"bf16": 0x7F80, "f16": 0x7C00, "f32": 0x7F800000}


@dataclass(frozen=True)
class Got:
    """One call's outputs, and the byte that every output held before it."""

    outputs: dict[str, NDArray[Any]]
    poison: int


@dataclass(frozen=True)
class Allowance:
    """What one output may differ by: its stage's budget, and the scale of its rows, which broadcasts to them."""

    budget: Budget
    scale: NDArray[Any] | float = 0.0

    def scaled(self, spec: Spec, want: NDArray[Any], got: NDArray[Any]) -> NDArray[Any]:
        """Scaled ulp, a row for each of the output's."""
        return _by_row(scaled_ulp(want, got, spec.dtype, self.scale))

    def covers(self, scaled: NDArray[Any], wrong: NDArray[Any]) -> NDArray[Any]:
        """The rows that are within it, of their scaled ulp and of the elements that are not bit-equal."""
        within: NDArray[Any] = (scaled.max(1, initial=0) <= self.budget.ulp) & (wrong.sum(1) <= self.budget.flips)
        return within

    def passed(self, scaled: NDArray[Any]) -> str:
        """By how much rows with these largest distances passed it."""
        b = self.budget
        return f", {scaled.max(initial=0):.3g} scaled ulp (budget {b.name}: {b.ulp:g}, {b.flips} flips)"


Allowances = Mapping[str, Allowance]


@dataclass(frozen=True)
class Mismatch:
    """The worst row of the first output that differs. ``ulp`` is a distance in units of the integer for int dtypes;
    ``beyond`` says by how much a budget was passed."""

    output: str
    row: int
    column: int
    flips: int
    ulp: int
    wrong_rows: int
    rows: int
    want: str
    got: str
    past_end: bool = False
    pattern: str = ""
    beyond: str = ""
    of_indices: bool = False

    def _distance(self) -> str:
        return "" if self.of_indices else f", {self.ulp} ulp{self.beyond}"

    def text(self, label: str) -> str:
        """``row 5 (token 0, slot 5, expert 161) of gate_up: 3 flips, 1 ulp …``."""
        if self.past_end:
            return (
                f"row {self.row} of {self.output} is past the valid rows and must stay untouched, "
                f"got {self.got} at column {self.column}"
            )
        return (
            f"row {self.row} ({label}) of {self.output}: {self.flips} flips{self._distance()}, worst at column "
            f"{self.column} (want {self.want}, got {self.got}); {self.wrong_rows} of {self.rows} rows wrong{self.pattern}"
        )


def _by_row(array: NDArray[Any]) -> NDArray[Any]:
    """[rows, elements of a row], for no row as well."""
    return array.reshape(len(array), math.prod(array.shape[1:]))


def _bits(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Integers that are equal exactly when the values are: NaNs folded into one."""
    flat = np.ascontiguousarray(array)
    if dtype in ("f32", "f16"):
        flat = flat.view(np.uint32 if dtype == "f32" else np.uint16)
    if dtype in _NAN_ABOVE:
        magnitude = flat & flat.dtype.type((1 << (8 * flat.dtype.itemsize - 1)) - 1)
        return np.where(magnitude > _NAN_ABOVE[dtype], flat.dtype.type(_NAN_ABOVE[dtype] + 1), flat)
    return flat


def _ordered(bits: NDArray[Any], dtype: str) -> NDArray[np.int64]:
    """Integers in the order of the values, so that a difference counts representable steps."""
    wide = bits.astype(np.int64)
    if dtype not in _NAN_ABOVE:
        return wide
    sign = np.int64(1) << (8 * bits.dtype.itemsize - 1)
    return np.where(wide & sign, -(wide & (sign - 1)), wide)


def compare(specs: tuple[Spec, ...], want: Arrays, got: Got, allowed: Allowances | None = None) -> Mismatch | None:
    """The worst row of the first output that is not the oracle's, nor ``allowed`` to differ as it does; or None.

    An oracle output with fewer rows than its spec defines only those; the rest must still hold the poison.
    """
    for spec in specs:
        if spec.role in ("out", "inout"):
            found = _compare_one(spec, want[spec.name], got, (allowed or {}).get(spec.name))
            if found:
                return found
    return None


def _compare_one(spec: Spec, want: NDArray[Any], got: Got, allowed: Allowance | None) -> Mismatch | None:
    array = got.outputs[spec.name]
    if array.shape != spec.shape:
        shapes = str(spec.shape), str(array.shape)
        return Mismatch(spec.name, 0, 0, 0, 0, len(want), len(want), *shapes)
    valid = len(want)
    a, b = _bits(want, spec.dtype), _bits(array[:valid], spec.dtype)
    wrong, beyond, scaled = _by_row(a != b), "", None
    if wrong.any() and allowed:
        scaled = allowed.scaled(spec, want, array[:valid])
        wrong = wrong & ~allowed.covers(scaled, wrong)[:, None]
        beyond = allowed.passed(scaled[wrong.any(1)])
    if wrong.any():
        distance = _by_row(np.abs(_ordered(a, spec.dtype) - _ordered(b, spec.dtype)))
        flips, weight = wrong.sum(1), (distance if scaled is None else scaled) * wrong
        row = int(np.lexsort((-flips, -weight.max(1)))[0])
        column = int(weight[row].argmax()) if weight[row].any() else int(wrong[row].argmax())
        return Mismatch(
            spec.name, row, column, int(flips[row]), int(distance[row, column]), int(np.count_nonzero(flips)), valid,
            _show(want.reshape(valid, -1)[row, column], spec.dtype),
            _show(array[:valid].reshape(valid, -1)[row, column], spec.dtype),
            pattern=_pattern("rows", flips > 0) + _pattern("columns", np.asarray(wrong.any(0))), beyond=beyond,
            of_indices=spec.dtype in ("i32", "i64"),
        )  # fmt: skip
    tail = np.ascontiguousarray(array[valid:])
    touched = _by_row(tail.view(np.uint8) != got.poison) if tail.size else np.empty((0, 1), bool)
    if touched.any():
        row = int(touched.any(1).argmax())
        column = int(touched[row].argmax()) // tail.dtype.itemsize
        shown = _show(tail.reshape(len(tail), -1)[row, column], spec.dtype)
        return Mismatch(spec.name, valid + row, column, 0, 0, int(touched.any(1).sum()), len(array), "", shown, True)
    return None


def flips_a_row(spec: Spec, want: NDArray[Any], got: NDArray[Any]) -> NDArray[Any]:
    """How many elements of each row are not bit-equal."""
    return np.asarray(_by_row(_bits(want, spec.dtype) != _bits(got, spec.dtype)).sum(1))


def digest(specs: tuple[Spec, ...], want: Arrays, got: Got) -> str:
    """sha256 of a call's outputs, equal for two calls under one poison exactly when ``compare`` finds no difference.

    ``want`` says how many rows of each output are defined; behind them every byte counts.
    """
    h = hashlib.sha256(bytes([got.poison]))
    for spec in specs:
        if spec.role in ("out", "inout"):
            array, valid = got.outputs[spec.name], len(want[spec.name])
            h.update(f"{spec.name} {array.shape} {valid}\n".encode())
            h.update(np.ascontiguousarray(_bits(array[:valid], spec.dtype)).tobytes())
            h.update(np.ascontiguousarray(array[valid:]).tobytes())
    return h.hexdigest()


def padded(specs: tuple[Spec, ...], want: Arrays, poison: int) -> Got:
    """The oracle's outputs as a call would leave them in buffers that held ``poison``."""
    full = {}
    for spec in specs:
        if spec.role in ("out", "inout"):
            rows = want[spec.name]
            buffer = np.full(math.prod(spec.shape) * rows.dtype.itemsize, poison, np.uint8).view(rows.dtype)
            full[spec.name] = buffer.reshape(spec.shape)
            full[spec.name][: len(rows)] = rows
    return Got(full, poison)


def _pattern(what: str, wrong: NDArray[np.bool_]) -> str:
    """``: rows % 64 == 5`` where the wrong indices are all of one residue, every one of that residue is wrong, and others
    are right; "" otherwise. The largest such modulus names the lane or the tile that a fault sits in."""
    at = np.flatnonzero(wrong)
    for modulus in reversed(RESIDUES):
        same = np.arange(int(at[0]) % modulus, len(wrong), modulus)
        if len(at) > 1 and np.array_equal(at, same):
            return f": {what} % {modulus} == {at[0] % modulus}"
    return ""


def _show(value: Any, dtype: str) -> str:
    if dtype == "bf16":
        return f"{np.array(int(value) << 16, np.uint32).view(np.float32):.6g}"
    return f"{value:.9g}" if dtype == "f32" else str(value)


def same_bits(specs: tuple[Spec, ...], first: Arrays, second: Arrays) -> tuple[str, list[int]] | None:
    """(output, rows) where two calls differ, or None; for outputs already in canonical form."""
    for spec in specs:
        if spec.role not in ("out", "inout"):
            continue
        a, b = _bits(first[spec.name], spec.dtype), _bits(second[spec.name], spec.dtype)
        rows = _by_row(a != b).any(1)
        if rows.any():
            return spec.name, np.flatnonzero(rows).tolist()
    return None
