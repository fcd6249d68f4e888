"""How far the oracle is from what the engine itself wrote, on the rows that a recording kept: a second line beside a replay.

A replay says whether a kernel follows the contract to the bit. This says whether the contract is what the engine does: it reads
no kernel of ours. The engine's kernels round where the contract does not, so there is a budget, and it is stated.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.captures.gates import open_gates
from replay.captures.manifest import Capture, default_geometry
from replay.captures.select import layer_label
from replay.captures.states import StateFile, open_states
from replay.captures.tensors import TensorFile
from replay.errors import InputError
from replay.exactness.ulp import scaled_ulp
from replay.model import Geometry
from replay.oracle import gdn, router
from replay.oracle.arith import bf16_to_f32

# Of a head's norm, for a state. vLLM's CPU kernels round the conv's output, k and what a token adds to bf16, each by 2⁻⁸ of its
# value at most, and the sum of three such errors is the farthest that they come to. (A state scaled by 0.98 is 2 % away.)
STATE_BUDGET = 3 * 2.0**-8
# An exp and a sum of the engine's own: each a step or two of f32, in e, Σ, p, their sum over the chosen, and the quotient. Where
# the logits are bf16, probabilities and quotients are rounded to bf16 as well, each by half a step, which is 2^15 of f32's.
WEIGHT_BUDGET_ULP = {"f32": 16.0, "bf16": 2.0**16 + 16}


def out_budget(head_dim: int) -> float:
    """bf16 steps of the largest term S'·q: K terms that are a rounding or two off add up as √K of them do."""
    return float(head_dim**0.5)


@dataclass(frozen=True)
class Agreement:
    """One output of one layer. ``worst`` in ``unit``, of the row numbered ``row``; ``told`` is what else there is to say."""

    layer: str
    output: str
    rows: int
    worst: float
    budget: float
    unit: str
    row: int
    told: str = ""

    @property
    def agrees(self) -> bool:
        """Whether every row is within the budget."""
        return self.worst <= self.budget

    def cells(self) -> list[str]:
        """In the order of ``HEADERS``."""
        verdict = "agrees" if self.agrees else f"DISAGREES at row {self.row}"
        return [
            self.layer,
            self.output,
            str(self.rows),
            f"{self.worst:.3g} {self.unit}",
            f"{self.budget:.3g}",
            verdict,
            self.told,
        ]


HEADERS = ["layer", "output", "rows", "farthest", "budget", "oracle and engine", ""]


def agreements(capture: Capture) -> Iterator[Agreement]:
    """Of every file that holds what the engine wrote; none where nothing was kept."""
    if capture.manifest is None and capture.holds in ("states", "gates"):
        raise InputError(capture.name, "manifest", "one: it has the sizes of the layers", "none")
    geometry = capture.manifest.geometry if capture.manifest else default_geometry(capture.holds)
    for path in capture.files:
        if capture.holds == "states":
            yield from _of_states(open_states(path), geometry)
        elif capture.holds == "gates":
            yield from _of_gates(open_gates(path))


def _of_states(file: StateFile, g: Geometry) -> Iterator[Agreement]:
    rows = np.flatnonzero(file.index["state_row"] >= 0)
    if not len(rows):
        return
    at, layer = file.index["state_row"][rows], layer_label(file.layer)
    heads = gdn.Heads(g.k_heads, g.v_heads, g.head_dim, g.head_dim)
    slots, starts = np.arange(len(rows), dtype=np.int32), np.arange(len(rows) + 1, dtype=np.int32)
    mixed = np.ascontiguousarray(file.tensor("mixed_qkv")[rows])
    bias = file.tensor("conv_bias") if file.has("conv_bias") else None
    qkv, conv_state = gdn.conv(mixed, file.tensor("conv_weights"), bias, file.tensor("conv_state")[at], slots, starts, mixed)
    left = np.zeros((len(rows), g.v_heads, g.head_dim), np.uint16)
    a, b = (np.ascontiguousarray(file.tensor(n)[rows]) for n in ("a", "b"))
    a_log, dt_bias = np.array(file.tensor("A_log")), file.tensor("dt_bias")
    modes = gdn.Modes(state_layout=file.modes.get("state_layout", "v_k"))
    out, state = gdn.recurrent(qkv, a, b, a_log, dt_bias, file.tensor("ssm_state")[at], slots, starts, left, heads, modes)
    if file.has("conv_state_after"):
        changed = (conv_state != file.tensor("conv_state_after")[at]).reshape(len(rows), -1).sum(1)
        yield Agreement(layer, "conv_state", len(rows), float(changed.max()), 0, "elements", int(rows[changed.argmax()]))
    if file.has("ssm_state_after"):
        far = _of_norm(gdn.widen(state), gdn.widen(file.tensor("ssm_state_after")[at]))
        yield Agreement(layer, "ssm_state", len(rows), float(far.max()), STATE_BUDGET, "of the norm", int(rows[far.argmax()]))
    if file.has("core_attn_out"):
        scale = np.zeros(out.shape, np.float32)
        for token in gdn.tokens(qkv, a, b, a_log, dt_bias, file.tensor("ssm_state")[at], slots, starts, heads, modes):
            scale[token.row] = np.abs(token.state * token.q[:, None, :]).max(axis=2)
        far = scaled_ulp(out, file.tensor("core_attn_out")[rows], "bf16", scale).reshape(len(rows), -1).max(1)
        unit = "bf16 steps, scaled"
        yield Agreement(
            layer, "core_attn_out", len(rows), float(far.max()), out_budget(g.head_dim), unit, int(rows[far.argmax()])
        )


def _of_norm(want: NDArray[Any], got: NDArray[Any]) -> NDArray[np.float64]:
    """‖got − want‖ / ‖want‖ of every row [Hv, …]; the head that is farthest counts."""
    a, b = (x.astype(np.float64).reshape(len(x), x.shape[1], -1) for x in (want, got))
    whole, far = np.sqrt((a**2).sum(2)), np.sqrt(((b - a) ** 2).sum(2))
    share: NDArray[np.float64] = (far / np.where(whole > 0, whole, 1)).max(1)
    return np.where(np.isfinite(share), share, np.inf)


def _of_gates(file: TensorFile) -> Iterator[Agreement]:
    if not file.has("topk_ids"):
        return
    logits, ids = file.tensor("router_logits"), file.tensor("topk_ids")
    wide = bf16_to_f32(logits) if logits.dtype == np.uint16 else np.array(logits)
    layer = layer_label(file.layer)
    weights, own = router.route(wide, None, None, ids.shape[1], renormalize=True)
    # Where the last chosen logit and the first one left are equal, either choice is right.
    ordered = -np.sort(-wide, axis=1)
    tied = ordered[:, ids.shape[1] - 1] == ordered[:, ids.shape[1]]
    other = (np.sort(ids, axis=1) != np.sort(own, axis=1)).any(1)
    wrong = other & ~tied
    told = f"{int((other & tied).sum())} rows chose another of two equal logits" if (other & tied).any() else ""
    yield Agreement(layer, "topk_ids", len(ids), float(wrong.sum()), 0, "rows", int(wrong.argmax()), told)
    if file.has("topk_weights"):
        same = np.flatnonzero(~other)
        mine = np.take_along_axis(weights, np.argsort(own, axis=1), 1)[same]
        theirs = np.take_along_axis(np.array(file.tensor("topk_weights")), np.argsort(ids, axis=1), 1)[same]
        far = scaled_ulp(mine, theirs, "f32").max(1) if len(same) else np.zeros(1)
        yield Agreement(
            layer,
            "topk_weights",
            len(same),
            float(far.max()),
            WEIGHT_BUDGET_ULP[file.dtype("router_logits")],
            "ulp",
            int(far.argmax()),
        )
