"""Launch the MoE kernels in Triton: grids and sizes; the arithmetic is in ``device/moe.py``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from triton import next_power_of_2

from replay.kernels.triton.device import moe as device
from replay.kernels.triton.launch import bits, launched, once, prepared, words
from replay.model import Problem

if TYPE_CHECKING:
    import torch

    T = torch.Tensor
    Tensors = Mapping[str, T]

_BLOCK = 128  # pairs, or experts, of a program that routes
_COMBINE_COLUMNS = 256
_LEFT = ("w13", "w13_scale", "w13_bias", "w2", "w2_scale", "w2_bias")


def pack(problem: Problem, weights: "Tensors") -> "dict[str, T]":
    """Weights s8 [n, K, N] → [n, N, K], so that a column is one run of memory; the rest as it is."""
    return {n: w.transpose(1, 2).contiguous() if w.dim() == 3 else w for n, w in weights.items()}


@dataclass(frozen=True)
class Tile:
    """Columns that a program computes, and its warps."""

    columns: int
    warps: int = 4


# Kilobytes that a program reads at once: enough to keep memory busy, few enough that many programs share the work.
STAGED, SECOND = Tile(16), Tile(8)


def first_tile(inter: int) -> Tile:
    """Of the layer's first half."""
    return Tile(8) if inter > 128 else Tile(4, 8)


class Steps:
    """The launches of one problem; a composite is its steps in a row, over scratch that is kept."""

    def __init__(self, problem: Problem) -> None:
        self.p, self.g, self.modes = problem, problem.geometry, dict(problem.modes)
        self.pairs = problem.rows * self.g.top_k
        self.kept: dict[str, T] = {}
        for name, size in (("hidden", self.g.hidden), ("inter", self.g.inter)):
            if size % 4:
                raise ValueError(f"{name}: expected a multiple of 4, got {size}")

    def scratch(self, name: str, like: "T", dtype: str, *shape: int) -> "T":
        """A buffer by name, on the device of ``like``; zeros, since pairs without an expert write none."""
        import torch

        return once(self.kept, name, lambda: torch.zeros(shape, dtype=getattr(torch, dtype), device=like.device))

    def places(self, like: "T", count: int) -> "T":
        """0, 1, 2, …: the places of rows that nobody permutes."""
        import torch

        return once(self.kept, f"places {count}", lambda: torch.arange(count, dtype=torch.int32, device=like.device))

    def whole(self, like: "T", rows: int) -> "T":
        """Offsets of which only the last counts: all rows are somebody's."""
        import torch

        # A fill, so that a graph can hold it.
        return once(self.kept, f"whole {rows}", lambda: torch.full((1,), rows, device=like.device))

    def quantize(self, x: "T", q: "T", scale: "T") -> None:
        """moe.quantize."""
        h = self.g.hidden
        launched(device.quantize, (len(x),), bits(x), q, scale, h, next_power_of_2(h), self.modes["quant"])

    def gemm(self, a: "T", a_scale: "T", ids: "T", permuted: "T", t: "Tensors", weight: str, out: "T", alike: int = 1) -> None:
        """One of the two products of a pair's row with its expert's weights; ``alike`` places share a row of ``a``."""
        w, bias = t[weight], t.get(f"{weight}_bias")
        _, width, depth = w.shape
        launched(
            device.gemm, (ids.numel(), -(-width // STAGED.columns)), words(a), a_scale, ids, permuted,
            words(w), t[f"{weight}_scale"], w if bias is None else bias, bits(out), depth, width, alike,
            bias is not None, self.modes["epilogue"], STAGED.columns, min(next_power_of_2(depth // 4), 256),
            warps=STAGED.warps,
        )  # fmt: skip

    def act_quant(self, gate_up: "T", offsets: "T", h: "T", h_scale: "T") -> None:
        """moe.act_quant over all rows up to the last of ``offsets``."""
        i = self.g.inter
        launched(
            device.act_quant, (len(gate_up),), bits(gate_up), offsets, len(offsets) - 1, h, h_scale, i, next_power_of_2(i),
            self.modes["act"], self.modes["quant"],
        )  # fmt: skip

    def combine(self, y: "T", ids: "T", permuted: "T", weights: "T", out: "T") -> None:
        """moe.combine; ``ids`` or places that are −1 have no row."""
        h = self.g.hidden
        grid = (self.p.rows, -(-h // _COMBINE_COLUMNS))
        launched(device.combine, grid, bits(y), ids, permuted, weights, bits(out), h, self.g.top_k, _COMBINE_COLUMNS)

    def middle(
        self, a: "T", a_scale: "T", offsets: "T", ids: "T", permuted: "T", t: "Tensors", y: "T", *, of: str = "", alike: int = 1
    ) -> None:
        """gemm1, act_quant, gemm2; three launches. ``of`` stands before the names of the weights."""
        rows, i = ids.numel(), self.g.inter
        gate_up = self.scratch(f"{of}gate_up", a, "bfloat16", rows, 2 * i)
        h = self.scratch(f"{of}h", a, "int8", rows, i)
        h_scale = self.scratch(f"{of}h_scale", a, "float32", rows)
        self.gemm(a, a_scale, ids, permuted, t, f"{of}w13", gate_up, alike)
        self.act_quant(gate_up, offsets, h, h_scale)
        self.gemm(h, h_scale, ids, permuted, t, f"{of}w2", y)

    def quantized(self, x: "T") -> "tuple[T, T]":
        """Codes and scales of the hidden rows, in scratch."""
        q, scale = self.scratch("q", x, "int8", *x.shape), self.scratch("q_scale", x, "float32", len(x))
        self.quantize(x, q, scale)
        return q, scale

    def shared(self, t: "Tensors", routed: "T") -> None:
        """moe.shared: all tokens through one expert, then its gate; five launches."""
        x, rows, h = t["x"], self.p.rows, self.g.hidden
        y = self.scratch("shared_y", x, "bfloat16", rows, h)
        ids = self.scratch("shared_ids", x, "int32", rows)
        self.middle(*self.quantized(x), self.whole(x, rows), ids, self.places(x, rows), t, y, of="shared_")
        tensors = [bits(s) for s in (x, t["shared_gate"], y, routed, t["out"])]
        launched(device.shared_out, (rows,), *tensors, h, _COMBINE_COLUMNS)

    def layer_staged(self, t: "Tensors", out: "T") -> None:
        """Every stage a launch; pairs stay where they are, so nothing is routed or moved."""
        x, ids, k = t["x"], t["topk_ids"], self.g.top_k
        y = self.scratch("y", x, "bfloat16", self.pairs, self.g.hidden)
        places = self.places(x, self.pairs)
        self.middle(*self.quantized(x), self.whole(x, self.pairs), ids, places, t, y, alike=k)
        self.combine(y, ids, places, t["topk_weights"], out)

    def layer_halves(self, t: "Tensors", out: "T") -> None:
        """Two launches, the second of which begins during the first; between them the activations, f32."""
        g, modes, tile = self.g, self.modes, first_tile(self.g.inter)
        x, ids = t["x"], t["topk_ids"]
        p = self.scratch("p", x, "float32", self.pairs, g.inter)
        w13, w2 = (words(t[n]) for n in ("w13", "w2"))
        arithmetic = modes["quant"], modes["epilogue"]
        launched(
            device.layer_first, (self.pairs * -(-g.inter // tile.columns),), bits(x), ids, w13, t["w13_scale"], p, g.hidden,
            g.inter, g.top_k, tile.columns, next_power_of_2(g.hidden), *arithmetic, modes["act"], warps=tile.warps,
        )  # fmt: skip
        launched(
            device.layer_second, (-(-g.hidden // SECOND.columns), self.p.rows), p, ids, w2, t["w2_scale"], t["topk_weights"],
            bits(out), g.hidden, g.inter, g.top_k, next_power_of_2(g.top_k), SECOND.columns, next_power_of_2(g.inter),
            *arithmetic, warps=SECOND.warps,
        )  # fmt: skip


# ---------------------------------------------------------------- stages


_prepare = partial(prepared, Steps, _LEFT)


def _route(s: Steps, t: "Tensors") -> None:
    """Inputs alone may be copies: what is written lies contiguous in every layout."""
    mapped, experts = t.get("expert_map"), len(t["rows_per_expert"])
    ids, blocks = t["topk_ids"], -(-s.pairs // _BLOCK) + -(-(experts + 1) // _BLOCK)
    launched(
        device.route, (blocks,), ids, ids if mapped is None else mapped, t["rows_per_expert"], t["offsets"],
        t["unpermuted_to_permuted"], s.pairs, experts, mapped is not None, _BLOCK,
    )  # fmt: skip


def _remap(s: Steps, t: "Tensors") -> None:
    h, names = s.g.hidden, ("q", "q_scale", "unpermuted_to_permuted", "a", "a_scale")
    launched(device.remap, (s.pairs,), *(t[n] for n in names), h, s.g.top_k, next_power_of_2(h))


def _gemm(rows: str, weight: str, out: str) -> Callable[[Steps, "Tensors"], None]:
    def step(s: Steps, t: "Tensors") -> None:
        s.gemm(t[rows], t[f"{rows}_scale"], t["topk_ids"], t["unpermuted_to_permuted"], t, weight, t[out])

    return step


def _middle(s: Steps, t: "Tensors") -> None:
    s.middle(t["a"], t["a_scale"], t["offsets"], t["topk_ids"], t["unpermuted_to_permuted"], t, t["y"])


def _combine(s: Steps, t: "Tensors") -> None:
    places = t["unpermuted_to_permuted"]
    s.combine(t["y"], places, places, t["topk_weights"], t["out"])


def _layer(layer: Callable[[Steps, "Tensors", "T"], None]) -> Callable[[Steps, "Tensors"], None]:
    def step(s: Steps, t: "Tensors") -> None:
        if s.modes["shared"] == "off":
            layer(s, t, t["out"])
        else:
            routed = s.scratch("routed", t["x"], "bfloat16", *t["out"].shape)
            layer(s, t, routed)
            s.shared(t, routed)

    return step


prepare_quantize_rows = _prepare(lambda s, t: s.quantize(t["x"], t["q"], t["q_scale"]))
prepare_route_count = _prepare(_route)
prepare_remap_pairs = _prepare(_remap)
prepare_gemm1_row_dot = _prepare(_gemm("a", "w13", "gate_up"))
prepare_act_quant_rows = _prepare(lambda s, t: s.act_quant(t["gate_up"], t["offsets"], t["h"], t["h_scale"]))
prepare_gemm2_row_dot = _prepare(_gemm("h", "w2", "y"))
prepare_combine_columns = _prepare(_combine)
prepare_middle_staged = _prepare(_middle)
prepare_shared_staged = _prepare(lambda s, t: s.shared(t, t["routed"]))
prepare_layer_staged = _prepare(_layer(Steps.layer_staged))
prepare_layer_halves = _prepare(_layer(Steps.layer_halves))
