"""Launch our MoE kernels: grid sizes and arguments; the arithmetic is in ``sycl/``.

A stage's kernel is a *step* (one or more launches added to a program); a composite is its steps in a row, with scratch
in between. Each step is written once and serves the stage and every composite.
"""

import ctypes
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from replay.kernels.gathered import gathered
from replay.kernels.sycl.launch import device_kind
from replay.kernels.sycl.runtime import Program
from replay.model import Problem

if TYPE_CHECKING:
    import torch

    from replay.kernels.registry import Run

    Weights = Mapping[str, torch.Tensor]

_EPILOGUES = {"row_then_col": 0, "scales_first": 1}
ACTS = {"silu_round_twice": 0, "silu_round_once": 1, "silu_f32": 2}
_QUANTS = {"recip_half_away": 0, "recip_half_even": 1, "div_half_even": 2, "rmsnorm_int8": 3, "group_trunc": 4}
_ROWS_TOGETHER = 4  # dot.hpp
_ITEM_BYTES = 64 << 10  # weights a cpu work-item reads: enough to outweigh its start, few enough to share among cores
_COMBINE_COLUMNS = 512  # moe_rows.cpp
_LANES = 256
_SUB_GROUPS = 4

i32, i64 = ctypes.c_int32, ctypes.c_int64


def _columns(depth: int) -> int:
    """Columns of weights K = ``depth`` that one cpu work-item computes."""
    return max(16, _ITEM_BYTES // depth // 16 * 16)


def pack_rows(problem: Problem, weights: "Weights") -> "dict[str, torch.Tensor]":
    """Weights s8 [n, K, N] as the device's body reads them; the rest as it is.

    CPU: [n, N/16, K/2, 16, 2], zeros behind the real sizes (dot.hpp). GPU: [n, N, K].
    """
    return {n: _packed(w) if w.dim() == 3 else w for n, w in weights.items()}


def _packed(w: "torch.Tensor") -> "torch.Tensor":
    import torch

    if w.device.type != "cpu":
        return w.transpose(1, 2).contiguous()
    count, depth, width = w.shape
    padded = torch.nn.functional.pad(w, (0, -width % 16, 0, -depth % 2))
    blocks = padded.reshape(count, padded.shape[1] // 2, 2, padded.shape[2] // 16, 16)
    return blocks.permute(0, 3, 1, 4, 2).contiguous()


def pack_matrix(problem: Problem, weights: "Weights") -> "dict[str, torch.Tensor]":
    """Weights s8 [n, K, N] → [n, Kp/4, Np, 4] with Kp a multiple of 32 and Np of 16: four along K, zeros behind."""
    import torch

    packed = {}
    for name, w in weights.items():
        if w.dim() == 3:
            padded = torch.nn.functional.pad(w, (0, -w.shape[2] % 16, 0, -w.shape[1] % 32))
            count, depth, width = padded.shape
            packed[name] = padded.reshape(count, depth // 4, 4, width).permute(0, 1, 3, 2).contiguous()
        else:
            packed[name] = w
    return packed


class Steps:
    """A program under construction for one problem and device kind; tensors are named as the stage names them."""

    def __init__(self, problem: Problem, kind: str) -> None:
        self.p, self.g, self.kind = problem, problem.geometry, kind
        self.modes = dict(problem.modes)
        self.program = Program(kind)
        self.pairs = problem.rows * self.g.top_k

    def scratch(self, *shape: int, dtype: str = "int8") -> "torch.Tensor":
        """A buffer that lives as long as the program."""
        import torch

        return torch.empty(shape, dtype=getattr(torch, dtype), device=self.kind)

    def mode(self, table: Mapping[str, int], name: str) -> ctypes.c_int32:
        """A mode's number."""
        return i32(table[self.modes[name].partition(":")[0]])

    def _rows(self, source: str, kernel: str, groups: int | tuple[int, int], *args: Any) -> None:
        """Work-groups in one or two dimensions: a single item each on the CPU device, 256 on a GPU."""
        lanes = 1 if self.kind == "cpu" else _LANES
        *outer, last = (groups,) if isinstance(groups, int) else groups
        local = (*(1 for _ in outer), lanes)
        self.program.add(source, f"{kernel}_{'cpu' if lanes == 1 else 'gpu'}", (*outer, last * lanes), local, *args)

    # ------------------------------------------------------------ stages

    def quantize(self, x: Any = "x", q: Any = "q", scale: Any = "q_scale") -> None:
        """moe.quantize."""
        rows, width = self.p.rows, self.g.hidden
        if group := self.modes["quant"].partition(":")[2]:
            rows, width = rows * width // int(group), int(group)
        self._rows("moe_rows", "quantize_rows", rows, x, q, scale, i32(width), self.mode(_QUANTS, "quant"))

    def route_fused(
        self, rows: Any = "rows_per_expert", offsets: Any = "offsets", permuted: Any = "unpermuted_to_permuted"
    ) -> None:
        """moe.route in one launch."""
        self._rows(
            "moe_route", "route_fused", 1, "topk_ids", self._map(), rows, offsets, permuted, i64(self.pairs), i32(self._experts())
        )

    def route_zero_remap(self) -> None:
        """moe.route: zeroed counters, then arrival by atomics."""
        self.program.add("moe_route", "route_zero", (self._experts(),), (1,), "rows_per_expert")
        args = ("topk_ids", self._map(), "rows_per_expert", "offsets", "unpermuted_to_permuted")
        self._rows("moe_route", "route_arrive", 1, *args, i64(self.pairs), i32(self._experts()))

    def route_prefix(self) -> None:
        """moe.route: counted and placed by an item an expert."""
        e, pairs = self._experts(), i64(self.pairs)
        add = self.program.add
        add("moe_route", "route_count", (e,), (1,), "topk_ids", self._map(), "rows_per_expert", pairs)
        add("moe_route", "route_prefix", (1,), (1,), "rows_per_expert", "offsets", i32(e))
        add(
            "moe_route",
            "route_place",
            (e + 1,),
            (1,),
            "topk_ids",
            self._map(),
            "offsets",
            "unpermuted_to_permuted",
            pairs,
            i32(e),
        )

    def _map(self) -> str | None:
        return "expert_map" if self.modes.get("expert_map", "off") != "off" else None

    def _experts(self) -> int:
        """Experts of this rank."""
        value = self.modes.get("expert_map", "off")
        return self.g.experts if value == "off" else self.g.experts // int(value[2:].partition(":")[0])

    def remap(
        self,
        q: Any = "q",
        scale: Any = "q_scale",
        permuted: Any = "unpermuted_to_permuted",
        a: Any = "a",
        a_scale: Any = "a_scale",
    ) -> None:
        """moe.remap."""
        self._rows(
            "moe_rows",
            "remap_rows",
            (self.p.rows, self.g.top_k),
            q,
            scale,
            permuted,
            a,
            a_scale,
            i32(self.g.hidden),
            i32(self.g.top_k),
        )

    def gemm(
        self,
        variant: str,
        first: bool,
        a: Any,
        a_scale: Any,
        out: Any,
        offsets: Any = "offsets",
        prefix: str = "",
        experts: int = 0,
    ) -> None:
        """moe.gemm1 (``first``) or moe.gemm2 in one of its variants; see moe_gemm.cpp."""
        n, k = (2 * self.g.inter, self.g.hidden) if first else (self.g.hidden, self.g.inter)
        w = prefix + ("w13" if first else "w2")
        bias = f"{w}_bias" if self.modes.get("bias") == "on" else None
        args = (a, a_scale, w, f"{w}_scale", bias, out, i32(n), i32(k), self.mode(_EPILOGUES, "epilogue"), i32(_columns(k)))
        experts = experts or self.g.experts
        if variant == "rows":
            self._grid("gemm_rows", self.pairs, n, k, *args, offsets, i32(experts))
        elif variant == "offsets":
            self._grid("gemm_offsets", experts, n, k, *args, offsets)
        elif variant == "active_offsets":
            slots = min(experts, self.pairs)
            active = self.scratch(slots, dtype="int32")
            self.program.add("moe_gemm", "list_active", (1,), (1,), offsets, active, i32(experts), i32(slots))
            self._grid("gemm_active", slots, n, k, *args, offsets, active)
        else:
            self._grid("gemm_direct", self.pairs, n, k, *args, "topk_ids", "unpermuted_to_permuted")

    def gemm_matrix(self, first: bool) -> None:
        """moe.gemm1 or moe.gemm2 on the matrix engine: a work-group an expert and 64 columns (moe_matrix.cpp)."""
        n, k = (2 * self.g.inter, self.g.hidden) if first else (self.g.hidden, self.g.inter)
        a, w, out = ("a", "w13", "gate_up") if first else ("h", "w2", "y")
        bias = f"{w}_bias" if self.modes.get("bias") == "on" else None
        width = 16 * _SUB_GROUPS
        memory = range(8 * -(-k // 32) * 32 + _SUB_GROUPS * 8 * 16 * 4)  # a tile of rows, and each sub-group's sums
        args = (a, f"{a}_scale", w, f"{w}_scale", bias, out, i32(n), i32(k), self.mode(_EPILOGUES, "epilogue"), "offsets", memory)
        self.program.add("moe_matrix", "gemm_matrix_gpu", (self.g.experts, -(-n // width) * width), (1, width), *args)

    def _grid(self, kernel: str, groups: int, columns: int, depth: int, *args: Any) -> None:
        if self.kind == "cpu":
            self.program.add("moe_gemm", f"{kernel}_cpu", (groups, -(-columns // _columns(depth))), (1, 1), *args)
        else:
            width = 16 * _SUB_GROUPS
            self.program.add("moe_gemm", f"{kernel}_gpu", (groups, -(-columns // _SUB_GROUPS) * width), (1, width), *args)

    def act_quant(
        self,
        gate_up: Any = "gate_up",
        h: Any = "h",
        h_scale: Any = "h_scale",
        offsets: Any = "offsets",
        experts: int = 0,
        rows: int = 0,
    ) -> None:
        """moe.act_quant in one launch."""
        sizes = i32(experts or self.g.experts), i32(self.g.inter)
        modes = self.mode(ACTS, "act"), self.mode(_QUANTS, "quant")
        self._rows("moe_rows", "act_quant", rows or self.pairs, gate_up, offsets, h, h_scale, *sizes, *modes)

    def act_quant_two_step(self) -> None:
        """moe.act_quant: the activation into f32 scratch, then its quantisation."""
        p = self.scratch(self.pairs, self.g.inter, dtype="float32")
        sizes = i32(self.g.experts), i32(self.g.inter)
        self._rows("moe_rows", "activate", self.pairs, "gate_up", "offsets", p, *sizes, self.mode(ACTS, "act"))
        self._rows("moe_rows", "quantize_f32", self.pairs, p, "offsets", "h", "h_scale", *sizes, self.mode(_QUANTS, "quant"))

    def combine(self, y: Any = "y", permuted: Any = "unpermuted_to_permuted", out: Any = "out", direct: bool = False) -> None:
        """moe.combine; ``direct``: y is in the order of the pairs, and ``permuted`` only says which of them exist."""
        groups = self.p.rows, -(-self.g.hidden // _COMBINE_COLUMNS)
        chain = i32(self.modes["combine_fma"] == "chain")
        args = (y, permuted, "topk_weights", out, i32(self.g.hidden), i32(self.g.top_k), chain, i32(direct))
        self._rows("moe_rows", "combine", groups, *args)

    # ------------------------------------------------------------ composites

    def _expert_args(self) -> tuple[Any, ...]:
        modes = self.mode(ACTS, "act"), self.mode(_QUANTS, "quant"), self.mode(_EPILOGUES, "epilogue")
        return "w13", "w13_scale", "w2", "w2_scale", i32(self.g.hidden), i32(self.g.inter), *modes

    def middle_staged(
        self, a: Any = "a", a_scale: Any = "a_scale", offsets: Any = "offsets", y: Any = "y", gemm: str = "offsets"
    ) -> None:
        """gemm1, act_quant, gemm2: three launches, with a listing before each GEMM five."""
        gate_up = self.scratch(self.pairs, 2 * self.g.inter, dtype="bfloat16")
        h, h_scale = self.scratch(self.pairs, self.g.inter), self.scratch(self.pairs, dtype="float32")
        self.gemm(gemm, True, a, a_scale, gate_up, offsets)
        self.act_quant(gate_up, h, h_scale, offsets)
        self.gemm(gemm, False, h, h_scale, y, offsets)

    def middle_layerlet(self) -> None:
        """The same in one launch."""
        gate_up, h = self.scratch(self.pairs, 2 * self.g.inter, dtype="bfloat16"), self.scratch(self.pairs, self.g.inter)
        p = self.scratch(self.pairs, self.g.inter, dtype="float32")
        args = ("a", "a_scale", "topk_ids", "unpermuted_to_permuted", "offsets", gate_up, p, h, "y")
        self._rows("moe_layerlet", "middle", self.pairs, *args, *self._expert_args())

    def _layer_scratch(self) -> tuple[Any, ...]:
        """(a, a_scale, offsets, permuted, y) of a layer that keeps them to itself."""
        return (
            self.scratch(self.pairs, self.g.hidden), self.scratch(self.pairs, dtype="float32"),
            self.scratch(self.g.experts + 1, dtype="int64"), self.scratch(self.pairs, dtype="int32"),
            self.scratch(self.pairs, self.g.hidden, dtype="bfloat16"),
        )  # fmt: skip

    def layer_staged(self) -> None:
        """Every stage a launch of its own: seven."""
        a, a_scale, offsets, permuted, y = self._layer_scratch()
        q, q_scale = self.scratch(self.p.rows, self.g.hidden), self.scratch(self.p.rows, dtype="float32")
        self.quantize(q=q, scale=q_scale)
        self.route_fused(self.scratch(self.g.experts, dtype="int32"), offsets, permuted)
        self.remap(q, q_scale, permuted, a, a_scale)
        self.middle_staged(a, a_scale, offsets, y)
        self.combine(y, permuted, self._routed())
        self._shared()

    def _prologue(self) -> tuple[Any, ...]:
        """Quantise, route and remap in one launch; what comes of it, and room for y."""
        a, a_scale, offsets, permuted, y = self._layer_scratch()
        count = self.scratch(self.g.experts, dtype="int32")
        sizes = i32(self.p.rows), i32(self.g.top_k), i32(self.g.hidden), i32(self.g.experts), self.mode(_QUANTS, "quant")
        self._rows("moe_layerlet", "prologue", 1, "x", "topk_ids", a, a_scale, offsets, permuted, count, *sizes)
        return a, a_scale, offsets, permuted, y

    def layer_fused_prologue_offsets(self) -> None:
        """Quantise, route and remap in one launch, then the staged middle and the combine: five."""
        a, a_scale, offsets, permuted, y = self._prologue()
        self.middle_staged(a, a_scale, offsets, y)
        self.combine(y, permuted, self._routed())
        self._shared()

    def layer_active_offsets(self) -> None:
        """The fused prologue, then GEMMs over the active experts alone, and the combine: seven."""
        a, a_scale, offsets, permuted, y = self._prologue()
        self.middle_staged(a, a_scale, offsets, y, gemm="active_offsets")
        self.combine(y, permuted, self._routed())
        self._shared()

    def layer_full_layerlet(self) -> None:
        """Everything up to the combine in one launch, and the combine: two."""
        rows = self.pairs * (_ROWS_TOGETHER if self.kind == "cpu" else 1)
        a, gate_up = self.scratch(rows, self.g.hidden), self.scratch(rows, 2 * self.g.inter, dtype="bfloat16")
        h, y = self.scratch(rows, self.g.inter), self.scratch(self.pairs, self.g.hidden, dtype="bfloat16")
        p = self.scratch(rows, self.g.inter, dtype="float32")
        sizes = i32(self.p.rows), i32(self.g.top_k)
        self._rows(
            "moe_layerlet",
            "layer",
            (self.p.rows, self.g.top_k),
            "x",
            "topk_ids",
            a,
            gate_up,
            p,
            h,
            y,
            *sizes,
            *self._expert_args(),
        )
        self.combine(y, "topk_ids", self._routed(), direct=True)
        self._shared()

    def _routed(self) -> Any:
        """Where the combine writes: the layer's output, or scratch that the shared expert is added to."""
        self.routed = self.scratch(self.p.rows, self.g.hidden, dtype="bfloat16") if self.modes.get("shared") == "on" else "out"
        return self.routed

    def _shared(self) -> None:
        if self.modes.get("shared") == "on":
            self.shared(self.routed)

    def shared(self, routed: Any = "routed") -> None:
        """moe.shared: one expert for every token, staged, and its gate; five launches."""
        t, g = self.p.rows, self.g
        q, q_scale = self.scratch(t, g.hidden), self.scratch(t, dtype="float32")
        gate_up, h, h_scale = (
            self.scratch(t, 2 * g.inter, dtype="bfloat16"),
            self.scratch(t, g.inter),
            self.scratch(t, dtype="float32"),
        )
        y, all_rows = self.scratch(t, g.hidden, dtype="bfloat16"), self.scratch(2, dtype="int64")
        all_rows[0], all_rows[1] = 0, t
        self.quantize(q=q, scale=q_scale)
        self.gemm("offsets", True, q, q_scale, gate_up, all_rows, "shared_", 1)
        self.act_quant(gate_up, h, h_scale, all_rows, 1, t)
        self.gemm("offsets", False, h, h_scale, y, all_rows, "shared_", 1)
        args: tuple[Any, ...] = ("x", "shared_gate", y, routed, "out", i32(g.hidden))
        self._rows("moe_rows", "shared_gate", t, *args, *(() if self.kind == "cpu" else (range(128),)))


def _prepare(step: Callable[[Steps], None]) -> Callable[[Problem, "Weights"], "Run"]:
    def prepare(problem: Problem, weights: "Weights") -> "Run":
        steps = Steps(problem, device_kind(weights))
        step(steps)
        run = steps.program.run
        return run if problem.layout == "contiguous" else lambda tensors: run(gathered(tensors, weights))

    return prepare


def _gemm(variant: str, first: bool) -> Callable[[Steps], None]:
    names = ("a", "a_scale", "gate_up") if first else ("h", "h_scale", "y")
    return lambda steps: steps.gemm(variant, first, *names)


def _gemms() -> dict[str, Callable[[Steps], None]]:
    """``gemm1_rows`` … ``gemm2_topk_direct``: both GEMMs in each variant."""
    found = {f"gemm{n}_{v}": _gemm(v, n == 1) for n in (1, 2) for v in ("rows", "offsets", "active_offsets", "topk_direct")}
    return found | {"gemm1_matrix": lambda s: s.gemm_matrix(True), "gemm2_matrix": lambda s: s.gemm_matrix(False)}


def __getattr__(name: str) -> Callable[[Problem, "Weights"], "Run"]:
    """``prepare_STEP`` for every step, so that a variant is one method of Steps and one line of registration."""
    step = name.removeprefix("prepare_")
    found = _gemms().get(step) or getattr(Steps, step, None)
    if step == name or found is None:
        raise AttributeError(name)
    return _prepare(found)
