"""GDN captures: one safetensors file a layer, with what its kernels saw at each step.

A *row* is one token of one sequence at one step: its ``qkvz`` and ``ba``, and where they were kept the states before it. Tensors
of a file, R rows of them N with states::

    qkvz [R, conv_dim + Hv·V]   ba [R, 2·Hv]            as projected; or mixed_qkv [R, conv_dim], z [R, Hv, V], a and b [R, Hv]
    conv_state [N, W−1, conv_dim], row 0 the oldest     ssm_state [N, Hv, V, K], or [N, Hv, K, V] under state_layout=k_v
    conv_weights [conv_dim, W]  conv_bias [conv_dim]    A_log [Hv] f32   dt_bias [Hv]
    step, sequence, slot, state_row  int32 [R]          slot −1: a padding row; state_row −1: no states were kept

The metadata also holds ``caches`` (shape, stride and storage offset of the tables that the states were rows of, as JSON).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.captures.manifest import Capture
from replay.captures.select import Select
from replay.captures.tensors import (
    FORMS,
    TensorFile,
    check_layers,
    check_window,
    decoded,
    file_of,
    open_tensors,
    windows,
)
from replay.errors import InputError
from replay.model import Case, CaseId, Geometry, Sequence, States

FORM = FORMS["states"]
LAYER = "model.layers.{}.linear_attn"
_INDEX = ("step", "sequence", "slot", "state_row")


class Cache(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table that captured states were rows of; in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int


@dataclass(frozen=True)
class StateFile(TensorFile):
    """One opened state file."""

    @cached_property
    def caches(self) -> dict[str, Cache]:
        """The tables that states were rows of."""
        found: dict[str, Cache] = decoded(self.path, self.meta, "caches", dict[str, Cache])
        return found

    @cached_property
    def index(self) -> dict[str, NDArray[np.int32]]:
        """step, sequence, slot and state_row of every row."""
        return {name: self.tensor(name) for name in _INDEX}


def open_states(path: Path) -> StateFile:
    """Map a file and read its header; InputError for anything that is not a state file."""
    file = open_tensors(path, FORM, _INDEX, StateFile)
    _ = file.caches  # refused now, if it is to be
    return file


# ---------------------------------------------------------------- checks


def check_states(file: StateFile, geometry: Geometry) -> None:
    """Shapes, finite values and slots; InputError names the tensor and the row."""
    g, rows = geometry, len(file.tensor("step"))
    states = len(file.tensor("ssm_state"))
    want: dict[str, tuple[int, ...]] = {
        **({"qkvz": (rows, g.conv_dim + g.v_heads * g.head_dim)} if file.has("qkvz") else
           {"mixed_qkv": (rows, g.conv_dim), "z": (rows, g.v_heads, g.head_dim)}),
        **({"ba": (rows, 2 * g.v_heads)} if file.has("ba") else {"a": (rows, g.v_heads), "b": (rows, g.v_heads)}),
        "conv_state": (states, g.conv_width - 1, g.conv_dim), "ssm_state": (states, g.v_heads, g.head_dim, g.head_dim),
        "conv_weights": (g.conv_dim, g.conv_width), "A_log": (g.v_heads,), "dt_bias": (g.v_heads,),
        **dict.fromkeys(_INDEX, (rows,)),
    }  # fmt: skip
    declared = file.modes.get("conv_bias", "off")
    if file.has("conv_bias") != (declared != "off"):
        got = "a tensor" if file.has("conv_bias") else "none"
        raise InputError(str(file.path), "conv_bias", f"what mode conv_bias={declared} says", got)
    if file.has("conv_bias"):
        want["conv_bias"] = (g.conv_dim,)
    for name, shape in want.items():
        file.check_shape(name, shape, f" (geometry {geometry})")
        file.check_dtype(name, _dtype_of(name, file.modes), _declared(name, file.modes))
        file.check_numbers(name)
    _check_slots(file, states)


def _dtype_of(name: str, modes: dict[str, str]) -> tuple[str, ...]:
    if name in _INDEX:
        return ("i32",)
    declared = {"dt_bias": modes.get("dt_bias", "f32"), "ssm_state": modes.get("ssm_state", "f32"), "A_log": "f32"}
    return (declared.get(name, "bf16"),)


def _declared(name: str, modes: dict[str, str]) -> str:
    return f" (mode {name}={_dtype_of(name, modes)[0]})" if name in ("dt_bias", "ssm_state") else ""


def _check_slots(file: StateFile, states: int) -> None:
    index = file.index
    bad = np.flatnonzero((index["state_row"] < -1) | (index["state_row"] >= states))
    if len(bad):
        got = str(index["state_row"][bad[0]])
        raise InputError(str(file.path), f"state_row[{bad[0]}]", f"−1 ≤ row < {states}", got)
    if len(low := np.flatnonzero(index["slot"] < -1)):
        raise InputError(str(file.path), f"slot[{low[0]}]", "−1 or more", str(index["slot"][low[0]]))
    seen: dict[tuple[int, int], tuple[int, int]] = {}
    for row, (step, slot, sequence) in enumerate(zip(index["step"], index["slot"], index["sequence"], strict=True)):
        if slot < 0:
            continue
        other, first = seen.setdefault((int(step), int(slot)), (int(sequence), row))
        if first != row:
            raise InputError(
                str(file.path), f"slot[{row}]", f"a slot of its own at step {step}",
                f"{slot}, which row {first} has" + ("" if other == sequence else f" (sequences {other} and {sequence})"),
            )  # fmt: skip


def check_capture(capture: Capture, geometry: Geometry) -> None:
    """Every file of a capture checked, each of a layer of its own."""
    check_layers(capture, map(open_states, capture.files), lambda file: check_states(file, geometry))


# ---------------------------------------------------------------- cases


def cases(capture: Capture, select: Select, geometry: Geometry, problem_for: Any, seed: int) -> Iterator[Case]:
    """Cases of W consecutive rows that have states, or are padding, of one layer: W sequences of one token each."""
    files = map(open_states, capture.files)
    for file, source in windows(capture, select, files, lambda file: len(replayable(file)), "rows with states"):
        held = states_at(file, replayable(file), source.start, source.rows)
        yield Case(CaseId(problem_for(geometry, source.rows), source, seed), held)


def replayable(file: StateFile) -> NDArray[np.int64]:
    """The rows that can be replayed by themselves: their states were kept, or they are padding."""
    return np.flatnonzero((file.index["state_row"] >= 0) | (file.index["slot"] < 0))


def states_at(file: StateFile, usable: NDArray[np.int64], start: int, rows: int) -> States:
    """``rows`` sequences of one token each, from the ``start``-th usable row on."""
    chosen = usable[start : start + rows].tolist()
    index = file.index
    found = tuple(Sequence(int(index["state_row"][r]) if index["slot"][r] >= 0 else -1, (r,)) for r in chosen)
    return States(str(file.path.resolve()), found)


def find(capture: Capture, wanted: CaseId) -> Case:
    """The case that an id names; InputError where the capture has no such layer or rows."""
    if (batch := dict(wanted.problem.modes).get("batch", "decode")) != "decode":
        raise InputError("--case", "batch", "decode: a capture's cases have one token a sequence", batch)
    file = file_of(wanted.source.layer, map(open_states, capture.files))
    usable = replayable(file)
    check_window(wanted.source, len(usable))
    return Case(wanted, states_at(file, usable, wanted.source.start, wanted.source.rows))
