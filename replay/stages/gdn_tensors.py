"""The tensors of the GDN stages: what each is called, its shape and dtype, and how a case's captured rows fill it.

States are whole tables with two slots more than there are sequences, in an order of their own; whatever a kernel writes to a
slot that is nobody's shows. Outputs that a padding row may leave as they are come filled with what another call left there.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.captures.states import StateFile, open_states
from replay.errors import InputError
from replay.model import Case, Problem, Spec
from replay.oracle import gdn as oracle
from replay.oracle.gdn import Heads
from replay.stages.draw import generator
from replay.stages.stage import GAP, Tensors, laid_out


def heads_of(problem: Problem) -> Heads:
    """The head counts and dims of a problem's rank."""
    g = problem.geometry
    return Heads(g.k_heads, g.v_heads, g.head_dim, g.head_dim)


def batch_of(problem: Problem) -> int:
    """How many sequences there are."""
    value = problem.mode("batch")
    return problem.rows if value == "decode" else int(value)


_DTYPE = {"A_log": "f32", "slots": "i32", "query_start_loc": "i32"}


def shape_of(problem: Problem, name: str) -> tuple[int, ...]:
    """A tensor's shape in a problem."""
    g, h, t, slots = problem.geometry, heads_of(problem), problem.rows, batch_of(problem) + 2
    v_k = dict(problem.modes).get("state_layout", "v_k") == "v_k"
    return {
        "qkvz": (t, h.conv_dim + h.v_heads * h.v_dim), "ba": (t, 2 * h.v_heads), "conv_weights": (h.conv_dim, g.conv_width),
        "conv_bias": (h.conv_dim,), "A_log": (h.v_heads,), "dt_bias": (h.v_heads,), "slots": (batch_of(problem),),
        "query_start_loc": (batch_of(problem) + 1,), "qkv": (t, h.conv_dim), "z": (t, h.v_heads, h.v_dim),
        "a": (t, h.v_heads), "b": (t, h.v_heads), "conv_state": (slots, g.conv_width - 1, h.conv_dim),
        "ssm_state": (slots, h.v_heads, *((h.v_dim, h.k_dim) if v_k else (h.k_dim, h.v_dim))),
        "core_attn_out": (t, h.v_heads, h.v_dim),
    }[name]  # fmt: skip


def spec_of(problem: Problem, name: str, role: Any) -> Spec:
    """A tensor's spec in a problem, its strides included where slots lie apart."""
    modes = dict(problem.modes)
    dtype = _DTYPE.get(name) or modes.get(name if name in ("dt_bias", "ssm_state") else "", "bf16")
    spec = Spec(name, role, shape_of(problem, name), dtype)
    if not name.endswith("_state"):
        return laid_out(spec, problem.layout)
    apart = modes.get(f"{name.partition('_')[0]}_slot_stride", "packed")
    if apart == "packed" and problem.layout == "contiguous":
        return spec
    return _slots_apart(spec, int(np.prod(spec.shape[1:])) + GAP if apart == "packed" else int(apart))


def _slots_apart(spec: Spec, apart: int) -> Spec:
    inner = [1]
    for extent in reversed(spec.shape[2:]):
        inner.append(inner[-1] * extent)
    return Spec(spec.name, spec.role, spec.shape, spec.dtype, (apart, *reversed(inner)))


def specs_of(ins: str, inout: str) -> Callable[[Problem], tuple[Spec, ...]]:
    """The specs of a stage with these tensors."""

    def specs(problem: Problem) -> tuple[Spec, ...]:
        return (
            *(spec_of(problem, n, "in") for n in ins.split() if n != "conv_bias" or biased(problem)),
            *(spec_of(problem, n, "inout") for n in inout.split()),
        )

    return specs


# ---------------------------------------------------------------- inputs


class Drawn:
    """The tensors of a case: captured rows, placed into tables with slots of their own; read where they are asked for.

    The ``second`` twin has every value moved one place along its row, and the slots in another order. ``projections``: qkvz and
    ba that take the captured ones' place, in the file's order.
    """

    def __init__(self, case: Case, projections: Mapping[str, NDArray[Any]] | None = None) -> None:
        self.case, self.problem, self.projections = case, case.problem, projections or {}
        self.heads, self.second = heads_of(case.problem), bool(case.bytes_of)
        self.file: StateFile = open_states_once(case.states.path)
        self.sequences = case.states.sequences
        self.tokens = [t for s in self.sequences for t in s.tokens]
        count = len(self.sequences)
        order = generator(case.id, "slots", count).permutation(count + 2)[:count]
        order = np.roll(order, 1) if self.second else order
        states = np.array([s.state for s in self.sequences], np.int64)
        self.slots = np.where(states >= 0, order, -1).astype(np.int32)
        self.starts = np.cumsum([0, *(len(s.tokens) for s in self.sequences)]).astype(np.int32)

    def _other(self, array: NDArray[Any]) -> NDArray[Any]:
        return np.roll(array, 1, axis=-1) if self.second else array

    def rows(self, name: str) -> NDArray[Any]:
        """A tensor of the case's tokens."""
        return self._other(self.file.tensor(name)[self.tokens])

    def qkvz(self) -> NDArray[Any]:
        """[T, conv_dim + Hv·V], put together where q|k|v and z were captured apart."""
        if "qkvz" in self.projections:
            return self.projections["qkvz"]
        if self.file.has("qkvz"):
            return self.rows("qkvz")
        return np.concatenate([self.rows("mixed_qkv"), self.rows("z").reshape(len(self.tokens), -1)], axis=1)

    def ba(self) -> NDArray[Any]:
        """[T, 2·Hv]."""
        if "ba" in self.projections:
            return self.projections["ba"]
        return self.rows("ba") if self.file.has("ba") else np.concatenate([self.rows("b"), self.rows("a")], axis=1)

    def table(self, name: str) -> NDArray[Any]:
        """A state table [slots, …]: captured states at their slots, and in the others states that are nobody's."""
        captured = self.file.tensor(name)
        if name == "ssm_state" and self.file.modes.get("state_layout", "v_k") != self.problem.mode("state_layout"):
            captured = captured.swapaxes(2, 3)
        spec = spec_of(self.problem, name, "inout")
        if captured.shape[1:] != spec.shape[1:]:
            raise InputError(str(self.file.path), name, f"shape [N, {', '.join(map(str, spec.shape[1:]))}]", str(captured.shape))
        strangers = generator(self.case.id, name).integers(0, len(captured), spec.shape[0])
        owners = {int(slot): s.state for slot, s in zip(self.slots, self.sequences, strict=True) if slot >= 0}
        table = np.empty((spec.shape[0], *captured.shape[1:]), captured.dtype)
        for slot, stranger in enumerate(strangers):
            mine = owners.get(slot)
            table[slot] = self._other(captured[stranger])[..., ::-1] if mine is None else self._other(captured[mine])
        return as_stored(table, self.file.dtype(name), spec.dtype)

    def left(self, name: str) -> NDArray[Any]:
        """What another call left in an output: bf16 bits of numbers that no right output holds by chance."""
        spec = spec_of(self.problem, name, "inout")
        bits = generator(self.case.id, name, self.second).integers(0x4A00, 0x4B00, spec.shape)
        return bits.astype(np.uint16)

    def projected(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        """(q|k|v, z, b, a) as the conv would hand them on, apart from the conv itself."""
        order = self.file.modes.get("reorder_input", "contiguous")
        return (*oracle.split_qkvz(self.qkvz(), self.heads, order), *oracle.split_ba(self.ba(), self.heads, order))

    def get(self, name: str) -> NDArray[Any]:
        """One input of a stage."""
        if name in ("slots", "query_start_loc"):
            return self.slots if name == "slots" else self.starts
        if name in ("qkvz", "ba"):
            return self._ordered(name)
        if name in ("a", "b"):
            return np.ascontiguousarray(self.projected()[3 if name == "a" else 2])
        if name == "qkv":
            return self.convolved(self.table("conv_state"))[0]
        return self._weight(name)

    def _weight(self, name: str) -> NDArray[Any]:
        if name == "conv_bias" and not self.file.has(name):  # asked for by mode, though none was captured
            return oracle.narrow(
                generator(self.case.id, name).standard_normal(self.heads.conv_dim, np.float32), np.zeros(0, np.uint16)
            )
        spec, held = spec_of(self.problem, name, "in"), self.file.tensor(name)
        return as_stored(np.array(held), self.file.dtype(name), spec.dtype)

    def _ordered(self, name: str) -> NDArray[Any]:
        """qkvz or ba in the order that the problem asks for."""
        asked, has = self.problem.mode("reorder_input"), self.file.modes.get("reorder_input", "contiguous")
        given = self.qkvz() if name == "qkvz" else self.ba()
        return given if asked == has else reordered(given, name, self.heads, has, asked)

    def convolved(self, table: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """(q|k|v behind the conv, conv states behind it), as a right one writes them; rows of no sequence hold their
        projection."""
        mixed = np.ascontiguousarray(self.projected()[0])
        bias = self.file.tensor("conv_bias") if self.file.has("conv_bias") else None
        weight, order = self.file.tensor("conv_weights"), self.file.modes.get("conv_bias", "off")
        return oracle.conv(mixed, weight, bias, table, self.slots, self.starts, mixed, order)


def open_states_once(path: str) -> StateFile:
    """A state file, its header read once a process and file."""
    return _opened(path, Path(path).stat().st_mtime_ns)


@functools.cache
def _opened(path: str, written_ns: int) -> StateFile:
    return open_states(Path(path))


def as_stored(array: NDArray[Any], held: str, wanted: str) -> NDArray[Any]:
    """A captured tensor in the dtype that a mode asks for, rounded to nearest even."""
    if held == wanted:
        return array
    like = {"bf16": np.uint16, "f16": np.float16, "f32": np.float32}[wanted]
    return oracle.narrow(oracle.widen(array), np.zeros(0, like))


def reordered(given: NDArray[Any], name: str, heads: Heads, has: str, asked: str) -> NDArray[Any]:
    """qkvz or ba from one order into the other."""
    split = oracle.split_qkvz if name == "qkvz" else oracle.split_ba
    # Where each element of a contiguous row lies in an interleaved one.
    at = np.concatenate([part.ravel() for part in split(np.arange(given.shape[1])[None], heads, "interleaved")])
    if has == "interleaved":
        return np.ascontiguousarray(given[:, at])
    out = np.empty_like(given)
    out[:, at] = given
    return out


def inputs_of(ins: str, inout: str) -> Callable[[Case], Tensors]:
    """The inputs of a stage with these tensors."""

    def inputs(case: Case) -> Tensors:
        drawn = Drawn(case)
        given: Tensors = {n: drawn.get(n) for n in ins.split() if n != "conv_bias" or biased(case.problem)}
        return given | {n: drawn.table(n) if n.endswith("_state") else drawn.left(n) for n in inout.split()}

    return inputs


def biased(problem: Problem) -> bool:
    """Whether the conv has a bias."""
    return dict(problem.modes).get("conv_bias", "off") != "off"
