"""The values a right MoE layer would hold on a case: the oracle's intermediate results, each computed when asked for."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from replay.model import Case, CaseId, Problem
from replay.oracle import moe as oracle
from replay.oracle import moe_wide as wide
from replay.oracle.arith import F32, I32, bf16_to_f32, rn_bf16
from replay.oracle.moe import ExpertRows
from replay.oracle.quant import quantize
from replay.stages import draw
from replay.stages.moe_tensors import is_wide

QUANT = ("recip_half_away", "recip_half_even", "div_half_even", "rmsnorm_int8")
ACT = ("silu_round_twice", "silu_round_once", "silu_f32")
EPILOGUE = ("row_then_col", "scales_first")


class Chain:
    """The oracle's intermediate values of one layer on one case, each computed when first asked for."""

    def __init__(self, case: Case, modes: tuple[tuple[str, str], ...]) -> None:
        self.case, self.g, self.second, self.modes = case.id, case.problem.geometry, bool(case.bytes_of), dict(modes)
        routes, geometry, order = case.routes, self.g, -1 if self.second else 1
        self.topk_ids: I32 = np.array(routes.topk_ids, np.int32)[:, ::order].copy()
        self.topk_weights: F32 = (
            draw.router_weights(case.id, geometry.top_k)
            if routes.topk_weights is None
            else np.array(routes.topk_weights, np.float32)
        )
        self.rows_per_expert, self.offsets, self.permuted = oracle.route(self.topk_ids, geometry.experts)
        self.wide = is_wide(self.modes)
        self.active = np.flatnonzero(self.rows_per_expert)
        # One weight tensor by name: the rows of the active experts. Kept as long as this chain is.
        self.weight: Callable[[str], ExpertRows] = functools.cache(self._weight)

    @functools.cached_property
    def x(self) -> Any:
        """Hidden rows, bf16 [T, H]."""
        return draw.hidden_rows(self.case, self.g.hidden, "hidden, second" if self.second else "hidden")

    @functools.cached_property
    def quantized(self) -> Any:
        """(q, scale) of the hidden rows."""
        return quantize(bf16_to_f32(self.x), self.modes["quant"])

    @functools.cached_property
    def remapped(self) -> Any:
        """(rows, scales) in expert order; bf16 rows have none."""
        if self.wide:
            return wide.remap(self.x, self.permuted), None
        q, scale = self.quantized
        return oracle.remap(q, scale, self.permuted)

    @functools.cached_property
    def gate_up(self) -> Any:
        """GEMM1's output, bf16 [V, 2I]."""
        a, a_scale = self.remapped
        if self.wide:
            return wide.grouped_gemm(a, self.offsets, self.weight("w13"))
        w13, scale = self.weight("w13"), self.weight("w13_scale")
        return oracle.grouped_gemm(a, a_scale, self.offsets, w13, scale, self.modes["epilogue"])

    @functools.cached_property
    def activated(self) -> Any:
        """(q, scale) after the activation; bf16 has no scale."""
        if self.wide:
            return wide.activate(self.gate_up, self.modes["act"]), None
        return oracle.act_quant(self.gate_up, self.modes["act"], self.modes["quant"])

    @functools.cached_property
    def down(self) -> Any:
        """GEMM2's output, bf16 [V, H]."""
        h, h_scale = self.activated
        if self.wide:
            return wide.grouped_gemm(h, self.offsets, self.weight("w2"))
        w2, scale = self.weight("w2"), self.weight("w2_scale")
        return oracle.grouped_gemm(h, h_scale, self.offsets, w2, scale, self.modes["epilogue"])

    def _weight(self, name: str) -> ExpertRows:
        depth, width = (self.g.hidden, 2 * self.g.inter) if "13" in name else (self.g.inter, self.g.hidden)
        total, experts = (1, np.zeros(1, np.int64)) if name.startswith("shared_") else (self.g.experts, self.active)
        if name.endswith(("w13", "w2")):
            rows: Any = draw.expert_codes(self.case, name, experts, (depth, width))
            if self.wide:  # what the codes and their scales stand for, rounded
                scales = draw.expert_scales(self.case, f"{name}_scale", experts, depth, width)
                rows = rn_bf16(rows.astype(np.float32) * scales[:, None, :])
        elif name.endswith("_scale"):
            rows = draw.expert_scales(self.case, name, experts, depth, width)
        else:  # bias: of the size of the outputs
            drawn = [draw.generator(self.case, name, int(e)).standard_normal(width, np.float32) for e in experts]
            rows = np.array(drawn, np.float32).reshape(len(drawn), width)
        return ExpertRows(total, experts, rows)

    @functools.cached_property
    def shared_gate(self) -> Any:
        """The shared expert's gate weights, bf16 [H], of a size that keeps the gate's argument near unit size."""
        drawn = draw.generator(self.case, "shared_gate").standard_normal(self.g.hidden, np.float32)
        return rn_bf16(drawn * np.float32(self.g.hidden**-0.5))

    @functools.cached_property
    def combined(self) -> Any:
        """The routed experts' output, bf16 [T, H]."""
        return oracle.combine(self.down, self.permuted, self.topk_weights, "off")


_UPSTREAM = {"quant": QUANT[0], "epilogue": EPILOGUE[0], "act": ACT[0]}


@functools.lru_cache(maxsize=4)
def _chain(case: Case, modes: tuple[tuple[str, str], ...]) -> Chain:
    return Chain(case, modes)


def chain_of(case: Case) -> Chain:
    """The case's chain; stages of one case share it. Modes that the stage lacks are the accepted path's."""
    own = {n: v for n, v in case.problem.modes if n in _UPSTREAM and not v.startswith("group_trunc")}
    neutral = CaseId(Problem("moe", case.problem.geometry, case.problem.rows, ()), case.id.source, case.id.seed)
    return _chain(Case(neutral, case.routes, case.bytes_of), tuple((_UPSTREAM | own).items()))
