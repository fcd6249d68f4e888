"""The GDN stages of decode: conv, recurrence, and both in one step; their tensors, inputs, work and labels.

States are whole tables with two slots more than there are sequences, in an order of their own; whatever a kernel writes to a
slot that is nobody's shows. Outputs that a padding row may leave as they are come filled with what another call left there.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.captures.states import StateFile, open_states
from replay.errors import InputError
from replay.model import Case, Problem, Spec, Work
from replay.oracle import gdn as oracle
from replay.oracle.gdn import Heads, Modes
from replay.stages.draw import generator
from replay.stages.stage import GAP, Budget, Outputs, Stage, Tensors, laid_out

COUNT = r"[1-9]\d*"
REORDER = ("contiguous", "interleaved")
BIAS = ("off", "bias_last", "bias_first")
Z = ("written", "untouched")
BATCH = ("decode", COUNT)  # one token a sequence, or so many sequences of what lengths they have
NORM = ("div_sqrt_eps_in", "rsqrt_eps_in", "eps_out")
SOFTPLUS = ("softplus_log", "softplus_log1p")
LAYOUT = ("v_k", "k_v")
STATE = ("f32", "bf16", "f16")
DT_BIAS = ("f32", "bf16")
SLOT_STRIDE = ("packed", COUNT)  # elements from one slot to the next

CONV_MODES = {"batch": BATCH, "conv_bias": BIAS, "conv_slot_stride": SLOT_STRIDE, "padding_z": Z, "reorder_input": REORDER}
RECURRENT_MODES = {
    "batch": BATCH, "dt_bias": DT_BIAS, "l2norm": NORM, "softplus": SOFTPLUS, "ssm_slot_stride": SLOT_STRIDE, "ssm_state": STATE,
    "state_layout": LAYOUT,
}  # fmt: skip


def heads_of(problem: Problem) -> Heads:
    """The head counts and dims of a problem's rank."""
    g = problem.geometry
    return Heads(g.k_heads, g.v_heads, g.head_dim, g.head_dim)


def batch_of(problem: Problem) -> int:
    """How many sequences there are."""
    value = problem.mode("batch")
    return problem.rows if value == "decode" else int(value)


def _check(problem: Problem) -> None:
    g = problem.geometry
    if g.v_heads % g.k_heads:
        raise InputError("geometry", "v_heads", f"a multiple of k_heads {g.k_heads}", str(g.v_heads))
    if g.conv_width < 2:
        raise InputError("geometry", "conv_width", "2 or more", str(g.conv_width))
    for name, spec in (("conv_slot_stride", "conv_state"), ("ssm_slot_stride", "ssm_state")):
        value = dict(problem.modes).get(name, "packed")
        least = int(np.prod(_shape(problem, spec)[1:]))
        if value != "packed" and int(value) < least:
            raise InputError("--mode", name, f"{least} or more, the elements of a slot", value)


# ---------------------------------------------------------------- tensors

_DTYPE = {"A_log": "f32", "slots": "i32", "query_start_loc": "i32"}


def _shape(problem: Problem, name: str) -> tuple[int, ...]:
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


def _spec(problem: Problem, name: str, role: Any) -> Spec:
    modes = dict(problem.modes)
    dtype = _DTYPE.get(name) or modes.get(name if name in ("dt_bias", "ssm_state") else "", "bf16")
    spec = Spec(name, role, _shape(problem, name), dtype)
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


def _specs(ins: str, inout: str) -> Callable[[Problem], tuple[Spec, ...]]:
    def specs(problem: Problem) -> tuple[Spec, ...]:
        return (
            *(_spec(problem, n, "in") for n in ins.split() if n != "conv_bias" or biased(problem)),
            *(_spec(problem, n, "inout") for n in inout.split()),
        )

    return specs


# ---------------------------------------------------------------- inputs


class Drawn:
    """The tensors of a case: captured rows, placed into tables with slots of their own; read where they are asked for.

    The ``second`` twin has every value moved one place along its row, and the slots in another order.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.problem = case, case.problem
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
        if self.file.has("qkvz"):
            return self.rows("qkvz")
        return np.concatenate([self.rows("mixed_qkv"), self.rows("z").reshape(len(self.tokens), -1)], axis=1)

    def ba(self) -> NDArray[Any]:
        """[T, 2·Hv]."""
        return self.rows("ba") if self.file.has("ba") else np.concatenate([self.rows("b"), self.rows("a")], axis=1)

    def table(self, name: str) -> NDArray[Any]:
        """A state table [slots, …]: captured states at their slots, and in the others states that are nobody's."""
        captured = self.file.tensor(name)
        if name == "ssm_state" and self.file.modes.get("state_layout", "v_k") != self.problem.mode("state_layout"):
            captured = captured.swapaxes(2, 3)
        spec = _spec(self.problem, name, "inout")
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
        spec = _spec(self.problem, name, "inout")
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
            return self.convolved()
        return self._weight(name)

    def _weight(self, name: str) -> NDArray[Any]:
        if name == "conv_bias" and not self.file.has(name):  # asked for by mode, though none was captured
            return oracle.narrow(
                generator(self.case.id, name).standard_normal(self.heads.conv_dim, np.float32), np.zeros(0, np.uint16)
            )
        spec, held = _spec(self.problem, name, "in"), self.file.tensor(name)
        return as_stored(np.array(held), self.file.dtype(name), spec.dtype)

    def _ordered(self, name: str) -> NDArray[Any]:
        """qkvz or ba in the order that the problem asks for."""
        asked, has = self.problem.mode("reorder_input"), self.file.modes.get("reorder_input", "contiguous")
        given = self.qkvz() if name == "qkvz" else self.ba()
        return given if asked == has else reordered(given, name, self.heads, has, asked)

    def convolved(self) -> NDArray[Any]:
        """q|k|v behind the conv, as a right one writes it; rows of no sequence hold their projection."""
        mixed = np.ascontiguousarray(self.projected()[0])
        bias = self.file.tensor("conv_bias") if self.file.has("conv_bias") else None
        table, weight = self.table("conv_state"), self.file.tensor("conv_weights")
        order = self.file.modes.get("conv_bias", "off")
        return oracle.conv(mixed, weight, bias, table, self.slots, self.starts, mixed, order)[0]


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


def _inputs(ins: str, inout: str) -> Callable[[Case], Tensors]:
    def inputs(case: Case) -> Tensors:
        drawn = Drawn(case)
        given: Tensors = {n: drawn.get(n) for n in ins.split() if n != "conv_bias" or biased(case.problem)}
        return given | {n: drawn.table(n) if n.endswith("_state") else drawn.left(n) for n in inout.split()}

    return inputs


def biased(problem: Problem) -> bool:
    """Whether the conv has a bias."""
    return dict(problem.modes).get("conv_bias", "off") != "off"


# ---------------------------------------------------------------- oracles, from stage tensors


def _conv(p: Problem, t: Any) -> Outputs:
    heads, order = heads_of(p), p.mode("reorder_input")
    mixed, z_in = oracle.split_qkvz(t["qkvz"], heads, order)
    b, a = oracle.split_ba(t["ba"], heads, order)
    qkv, state = oracle.conv(
        np.ascontiguousarray(mixed), t["conv_weights"], t.get("conv_bias"), t["conv_state"], t["slots"], t["query_start_loc"],
        t["qkv"], p.mode("conv_bias"),
    )  # fmt: skip
    z = t["z"].copy()
    rows = _rows_of_sequences(t) if p.mode("padding_z") == "untouched" else slice(None)
    z[rows] = z_in[rows]
    return {"conv_state": state, "qkv": qkv, "z": z, "b": np.ascontiguousarray(b), "a": np.ascontiguousarray(a)}


def _rows_of_sequences(t: Any) -> list[int]:
    return [row for _, rows in oracle.sequences(t["slots"], t["query_start_loc"]) for row in rows]


def _recurrent(p: Problem, t: Any) -> Outputs:
    modes = Modes(p.mode("l2norm"), p.mode("softplus"), p.mode("state_layout"))
    out, state = oracle.recurrent(
        t["qkv"], t["a"], t["b"], t["A_log"], t["dt_bias"], t["ssm_state"], t["slots"], t["query_start_loc"], t["core_attn_out"],
        heads_of(p), modes,
    )  # fmt: skip
    return {"ssm_state": state, "core_attn_out": out}


def _step(p: Problem, t: Any) -> Outputs:
    left = np.zeros(_shape(p, "qkv"), np.uint16)
    front = _conv(p, {**t, "qkv": left})
    back = _recurrent(p, {**t, "qkv": front["qkv"], "a": front["a"], "b": front["b"]})
    return {"conv_state": front["conv_state"], "z": front["z"], **back}


# ---------------------------------------------------------------- work, scale, labels


def _work(states: str) -> Callable[[Problem, Tensors], Work]:
    """The states of the sequences that there are: read and written, cold; all else is hot."""

    def work(problem: Problem, inputs: Tensors) -> Work:
        slots, starts = np.asarray(inputs["slots"]), np.asarray(inputs["query_start_loc"])
        live = sum(1 for _ in oracle.sequences(slots, starts))
        tables = {s: _spec(problem, s, "inout") for s in states.split()}
        cold = sum(live * s.nbytes // s.shape[0] for s in tables.values())
        hot = sum(np.asarray(value).nbytes for name, value in inputs.items() if name not in tables)
        return Work(cold, cold, hot, 0)

    return work


def _row_scale(problem: Problem, inputs: Tensors, output: str) -> NDArray[Any]:
    """absmax over K of what was reduced: the state's row as it is afterwards, or for an output the terms S'·q of its token."""
    given: Any = inputs
    if output == "core_attn_out":
        return _terms(problem, given)
    after = (_recurrent if "qkv" in given else _step)(problem, given)
    axis = 3 if problem.mode("state_layout") == "v_k" else 2
    state: NDArray[Any] = np.abs(oracle.widen(after["ssm_state"])).max(axis=axis, keepdims=True)
    return state


def _terms(problem: Problem, given: Any) -> NDArray[Any]:
    """max |S'·q| over K, for every token, head and row of V."""
    if "qkv" not in given:
        front = _conv(problem, {**given, "qkv": np.zeros(_shape(problem, "qkv"), np.uint16)})
        given = {**given, "qkv": front["qkv"], "a": front["a"], "b": front["b"]}
    modes = Modes(problem.mode("l2norm"), problem.mode("softplus"), problem.mode("state_layout"))
    scale = np.zeros(given["core_attn_out"].shape, np.float32)
    gates = given["a"], given["b"], given["A_log"], given["dt_bias"]
    tokens = oracle.tokens(
        given["qkv"], *gates, given["ssm_state"], given["slots"], given["query_start_loc"], heads_of(problem), modes
    )
    for token in tokens:
        scale[token.row] = np.abs(token.state * token.q[:, None, :]).max(axis=2)
    return scale


def _label(case: Case, output: str, row: int) -> str:
    """``slot 3, sequence 1 (captured row 17)`` for a row of a state table; the same for a token's row."""
    drawn = Drawn(case)
    owner = {int(slot): i for i, slot in enumerate(drawn.slots) if slot >= 0}
    if output.endswith("_state"):
        if row not in owner:
            return f"slot {row}, which is nobody's"
        return f"slot {row}, sequence {owner[row]} (captured state {drawn.sequences[owner[row]].state})"
    sequence = int(np.searchsorted(drawn.starts, row, side="right")) - 1
    padding = ", padding" if drawn.slots[sequence] < 0 else ""
    return f"token {row - drawn.starts[sequence]} of sequence {sequence}{padding}, captured row {drawn.tokens[row]}"


def _as_is(problem: Problem, inputs: Tensors, outputs: Outputs) -> Outputs:
    return outputs


def _degenerate(problem: Problem, inputs: Tensors) -> bool:
    """A batch of nothing but padding leaves everything as it is."""
    slots, starts = np.asarray(inputs["slots"]), np.asarray(inputs["query_start_loc"])
    return not any(True for _ in oracle.sequences(slots, starts))


# Why these are fair: whoever does not follow the contract's order sums over K in another, and S' and o carry what m had of it;
# five steps of the row's largest element was the most that honest orders came to over 1000 steps (semantics: Arithmetic). The
# conv reduces nothing over K: another exp moves an output by one bf16 step, in one of 1e5, so hardly twice in a row.
# An output is bf16: an error in f32 moves it by one step at most, and few of a row.
_REDUCED = Budget("other_order_of_sums", 5, 1 << 62)
_SUMMED = Budget("other_order_of_sums", 1, 16)
_CONVOLVED = Budget("own_exp", 1, 1)


def _stage(name: str, modes: dict[str, tuple[str, ...]], ins: str, inout: str, **rest: Any) -> Stage:
    return Stage(
        name=name, modes=modes, specs=_specs(ins, inout), inputs=_inputs(ins, inout), canonical=_as_is, label=_label,
        relabel=None, check=_check, degenerate=_degenerate, rests_on=("division", "square_root", "contraction", "bf16"), **rest,
    )  # fmt: skip


STAGES = (
    _stage(
        "gdn.conv", CONV_MODES, "qkvz ba conv_weights conv_bias slots query_start_loc", "conv_state qkv z b a", oracle=_conv,
        work=_work("conv_state"), probes=("qkvz", "ba", "conv_weights", "conv_state", "slots"), budgets={"qkv": _CONVOLVED},
    ),
    _stage(
        "gdn.recurrent", RECURRENT_MODES, "qkv a b A_log dt_bias slots query_start_loc", "ssm_state core_attn_out",
        oracle=_recurrent, work=_work("ssm_state"), probes=("qkv", "a", "b", "A_log", "dt_bias", "ssm_state", "slots"),
        budgets={"ssm_state": _REDUCED, "core_attn_out": _SUMMED}, row_scale=_row_scale,
    ),
    _stage(
        "gdn.step", CONV_MODES | RECURRENT_MODES,
        "qkvz ba conv_weights conv_bias A_log dt_bias slots query_start_loc", "conv_state ssm_state z core_attn_out",
        oracle=_step, work=_work("conv_state ssm_state"),
        probes=("qkvz", "ba", "conv_weights", "conv_state", "A_log", "dt_bias", "ssm_state", "slots"),
        budgets={"ssm_state": _REDUCED, "core_attn_out": _SUMMED}, row_scale=_row_scale,
    ),
)  # fmt: skip
