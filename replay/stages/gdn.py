"""The GDN stages of decode: conv, recurrence, and both in one step; their modes, oracles, work and labels."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.errors import InputError
from replay.model import Case, Problem, Work
from replay.oracle import gdn as oracle
from replay.oracle.gdn import Modes
from replay.stages.gdn_tensors import Drawn, heads_of, inputs_of, shape_of, spec_of, specs_of
from replay.stages.stage import COUNT, Budget, Outputs, Stage, Tensors

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


def _check(problem: Problem) -> None:
    g = problem.geometry
    if g.v_heads % g.k_heads:
        raise InputError("geometry", "v_heads", f"a multiple of k_heads {g.k_heads}", str(g.v_heads))
    if g.conv_width < 2:
        raise InputError("geometry", "conv_width", "2 or more", str(g.conv_width))
    for name, spec in (("conv_slot_stride", "conv_state"), ("ssm_slot_stride", "ssm_state")):
        value = dict(problem.modes).get(name, "packed")
        least = int(np.prod(shape_of(problem, spec)[1:]))
        if value != "packed" and int(value) < least:
            raise InputError("--mode", name, f"{least} or more, the elements of a slot", value)


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
    left = np.zeros(shape_of(p, "qkv"), np.uint16)
    front = _conv(p, {**t, "qkv": left})
    back = _recurrent(p, {**t, "qkv": front["qkv"], "a": front["a"], "b": front["b"]})
    return {"conv_state": front["conv_state"], "z": front["z"], **back}


# ---------------------------------------------------------------- work, scale, labels


def _work(states: str) -> Callable[[Problem, Tensors], Work]:
    """The states of the sequences that there are: read and written, cold; all else is hot."""

    def work(problem: Problem, inputs: Tensors) -> Work:
        slots, starts = np.asarray(inputs["slots"]), np.asarray(inputs["query_start_loc"])
        live = sum(1 for _ in oracle.sequences(slots, starts))
        tables = {s: spec_of(problem, s, "inout") for s in states.split()}
        cold = sum(live * s.nbytes // s.shape[0] for s in tables.values())
        hot = sum(np.asarray(value).nbytes for name, value in inputs.items() if name not in tables)
        return Work(cold, cold, hot, 0)

    return work


def _row_scale(problem: Problem, inputs: Tensors, output: str, want: NDArray[Any]) -> NDArray[Any]:
    """absmax over K of what was reduced: the state's row as it is afterwards, or for an output the terms S'·q of its token."""
    given: Any = inputs
    if output == "core_attn_out":
        return _terms(problem, given)
    after = (_recurrent if "qkv" in given else _step)(problem, given)
    axis = 3 if problem.mode("state_layout") == "v_k" else 2
    state: NDArray[Any] = np.abs(oracle.widen(after["ssm_state"])).max(axis=axis, keepdims=True)
    return state


def behind_conv(problem: Problem, given: Any) -> dict[str, Any]:
    """The inputs of a stage with qkv, a and b as the recurrence sees them: given, or by the contract's conv."""
    if "qkv" in given:
        return dict(given)
    front = _conv(problem, {**given, "qkv": np.zeros(shape_of(problem, "qkv"), np.uint16)})
    return {**given, "qkv": front["qkv"], "a": front["a"], "b": front["b"]}


def _terms(problem: Problem, given: Any) -> NDArray[Any]:
    """max |S'·q| over K, for every token, head and row of V."""
    given = behind_conv(problem, given)
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


def _overflowed(case: Case, outputs: Outputs) -> str:
    """Which states are past the range of their dtype: right to the bit, and of no use to the next step."""
    if "ssm_state" not in outputs:
        return ""
    finite = np.isfinite(oracle.widen(outputs["ssm_state"])).all(axis=(1, 2, 3))
    slots = [s for s in np.flatnonzero(~finite).tolist() if s in Drawn(case).slots]
    if not slots:
        return ""
    return f"{case.problem.mode('ssm_state')} overflowed in {len(slots)} states, first {_label(case, 'ssm_state', slots[0])}"


def _degenerate(problem: Problem, inputs: Tensors) -> bool:
    """A batch of nothing but padding leaves everything as it is."""
    slots, starts = np.asarray(inputs["slots"]), np.asarray(inputs["query_start_loc"])
    return not any(True for _ in oracle.sequences(slots, starts))


# Why these are fair: whoever does not follow the contract's order sums over K in another, and S' and o carry what m had of it:
# five steps of the row's largest element at most. Whoever has an exp and a log of his own has another g as well: exp(A_log), the
# softplus and their product round, and where both chains do so to a step the other way, x = A·softplus(a + dt_bias) is four steps
# of itself off, and exp(−x) 4·x. With x at 4, where g is 2 %, that is 16; where x is larger, S·g seldom is what a row's largest
# element is made of. (fla's recurrence came to 15 and 16 over 32 sequences: docs/gdn.md.)
# The conv reduces nothing over K: another exp moves an output by one bf16 step, in one of 1e5, so hardly twice in a row. An
# output is bf16: an error in f32 moves it by one step at most, and few of a row.
_REDUCED = Budget("own_gates_and_order", 16, 1 << 62)
_SUMMED = Budget("own_gates_and_order", 1, 16)
_CONVOLVED = Budget("own_exp", 1, 1)


def _stage(name: str, modes: dict[str, tuple[str, ...]], ins: str, inout: str, **rest: Any) -> Stage:
    return Stage(
        name=name, modes=modes, specs=specs_of(ins, inout), inputs=inputs_of(ins, inout), label=_label,
        notice=_overflowed, relabel=None, check=_check, degenerate=_degenerate,
        rests_on=("division", "square_root", "contraction", "bf16"), **rest,
    )  # fmt: skip


STAGES = (
    _stage(
        "gdn.conv", CONV_MODES, "qkvz ba conv_weights conv_bias slots query_start_loc", "conv_state qkv z b a", oracle=_conv,
        work=_work("conv_state"), probes=("qkvz", "ba", "conv_weights", "conv_state", "slots"),
        budgets=lambda p: {"qkv": _CONVOLVED},
    ),
    _stage(
        "gdn.recurrent", RECURRENT_MODES, "qkv a b A_log dt_bias slots query_start_loc", "ssm_state core_attn_out",
        oracle=_recurrent, work=_work("ssm_state"), probes=("qkv", "a", "b", "A_log", "dt_bias", "ssm_state", "slots"),
        budgets=lambda p: {"ssm_state": _REDUCED, "core_attn_out": _SUMMED}, row_scale=_row_scale,
    ),
    _stage(
        "gdn.step", CONV_MODES | RECURRENT_MODES,
        "qkvz ba conv_weights conv_bias A_log dt_bias slots query_start_loc", "conv_state ssm_state z core_attn_out",
        oracle=_step, work=_work("conv_state ssm_state"),
        probes=("qkvz", "ba", "conv_weights", "conv_state", "A_log", "dt_bias", "ssm_state", "slots"),
        budgets=lambda p: {"ssm_state": _REDUCED, "core_attn_out": _SUMMED}, row_scale=_row_scale,
    ),
)  # fmt: skip
