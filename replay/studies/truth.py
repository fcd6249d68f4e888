"""The steps of a chain as they should be, by the contract and in f64, and how far from f64 an arm's are."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.exactness.ulp import ulp
from replay.model import Case
from replay.oracle import gdn64
from replay.oracle.arith import bf16_to_f32
from replay.oracle.gdn import gates, split_heads, widen
from replay.stages import STAGES
from replay.stages.gdn import behind_conv
from replay.stages.gdn_chain import carried, links, owned
from replay.stages.gdn_tensors import heads_of
from replay.stages.stage import Outputs, Tensors

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Truth:
    """One step as it should be: what it was given, the contract's outputs, f64, and whether its inputs were captured."""

    case: Case
    inputs: Tensors
    want: Outputs
    exact: gdn64.Step
    captured: bool

    @cached_property
    def rows(self) -> NDArray[np.intp]:
        """The rows of the batch that are no padding."""
        return np.flatnonzero(np.asarray(self.inputs["slots"]) >= 0)

    @cached_property
    def own(self) -> tuple[Numbers, Numbers]:
        """The contract's errors."""
        return errors(self, self.want)


def truths(case: Case, reset: str) -> Iterator[Truth]:
    """The contract's steps and those of f64, without end."""
    stage, problem = STAGES[case.problem.stage], case.problem
    first = stage.inputs(case)
    at_first = states(case, first, first["ssm_state"]).astype(np.float64)
    exact, want = at_first, None
    for link in links(case, reset):
        inputs: Tensors = {**link.inputs, **carried(case, reset, first, want)}
        want = stage.expected(problem, inputs)
        found = _step64(case, inputs, at_first if reset == "fresh" else exact)
        exact = found.state
        yield Truth(case, inputs, want, found, link.captured)


def _step64(case: Case, inputs: Tensors, state: Numbers) -> gdn64.Step:
    """A step in f64, from the gates and the normed q and k of the contract."""
    problem, given = case.problem, behind_conv(case.problem, inputs)
    rows = np.flatnonzero(given["slots"] >= 0)
    q, k, v = split_heads(given["qkv"][rows], heads_of(problem), problem.mode("l2norm"))
    a, b = (bf16_to_f32(given[name][rows]) for name in ("a", "b"))
    g, beta = gates(a, b, given["A_log"], widen(given["dt_bias"]), problem.mode("softplus"))
    return gdn64.step(state, q, k, v, g, beta)


def states(case: Case, first: Tensors, table: Any) -> NDArray[np.float32]:
    """The states that sequences own, [N, Hv, V, K] in f32, as a table holds them."""
    held = widen(np.asarray(table)[owned(first)])
    return held if case.problem.mode("state_layout") == "v_k" else held.swapaxes(2, 3)


def errors(truth: Truth, outputs: Outputs) -> tuple[Numbers, Numbers]:
    """(of the states, of the output), each [N, Hv]: the largest |got − f64| of a sequence's head, in ulp at what was reduced;
    inf where one is not finite."""
    state = states(truth.case, truth.inputs, outputs["ssm_state"])
    largest = np.abs(truth.exact.state).max(axis=3, keepdims=True)
    out = widen(outputs["core_attn_out"][truth.rows])
    scale = np.maximum(truth.exact.terms, np.abs(truth.exact.out))
    dtype = truth.case.problem.mode("ssm_state")
    return _largest(state, truth.exact.state, ulp(largest, dtype)), _largest(out, truth.exact.out, ulp(scale, "bf16"))


def _largest(got: NDArray[np.float32], want: Numbers, step: Numbers) -> Numbers:
    with np.errstate(invalid="ignore"):
        distance = np.abs(got.astype(np.float64) - want) / step
    distance = np.where(np.isfinite(got), distance, np.inf)
    found: Numbers = distance.max(axis=tuple(range(2, distance.ndim)), initial=0)
    return found
