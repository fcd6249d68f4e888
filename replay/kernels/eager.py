"""Provider ``eager``: every MoE stage in plain torch operations, exact in every mode.

The reference that a kernel is compared with when nothing better is at hand; right before it is fast. It follows the
contract with torch's own operations: exp in f64, rounding half away in f64, matrix products whose sums are exact.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from replay.kernels.eager_common import eager_kernel, exp_cr, fma, round_half_away, sigmoid, strided32_tree
from replay.kernels.modes import of_stage
from replay.model import Kernel, Problem

if TYPE_CHECKING:
    import torch

    from replay.kernels.registry import Run

    T = torch.Tensor
    Gemm = Callable[..., None]
    Tensors = Mapping[str, T]

EPS = 1e-10


def _kernel(stage: str, function: str, *, graph_safe: bool = True) -> Kernel:
    return eager_kernel(stage, __name__, function, graph_safe=graph_safe, modes=of_stage(stage))


def _gathered(stage: str, function: str) -> Kernel:
    """Never asks the device how many rows an expert has, at the price of a copy of its weights a row."""
    return Kernel(
        id=f"eager:{stage}:gathered", prepare=f"replay.kernels.eager:{function}", devices=("xpu", "cuda"),
        needs=("python:torch",), graph_safe=True, modes=of_stage(stage),
        summary="plain torch operations, each row against a copy of its expert's weights",
    )  # fmt: skip


KERNELS = (
    _kernel("moe.quantize", "prepare_quantize"),
    _kernel("moe.route", "prepare_route"),
    _kernel("moe.remap", "prepare_remap"),
    _kernel("moe.gemm1", "prepare_gemm1", graph_safe=False),
    _gathered("moe.gemm1", "prepare_gemm1_gathered"),
    _kernel("moe.act_quant", "prepare_act_quant"),
    _kernel("moe.gemm2", "prepare_gemm2", graph_safe=False),
    _gathered("moe.gemm2", "prepare_gemm2_gathered"),
    _kernel("moe.combine", "prepare_combine"),
    _kernel("moe.shared", "prepare_shared"),
    _kernel("moe.middle", "prepare_middle", graph_safe=False),
    _gathered("moe.middle", "prepare_middle_gathered"),
    _kernel("moe.layer", "prepare_layer", graph_safe=False),
    _gathered("moe.layer", "prepare_layer_gathered"),
)


# ---------------------------------------------------------------- operations


def quantize(x: "T", mode: str) -> tuple["T", "T"]:
    """f32 [R, H] → (q int8 [R, H], scale f32 [R] or [R, H/G])."""
    import torch

    name, _, group = mode.partition(":")
    if name == "group_trunc":
        rows, width = x.shape
        q, scale = _quantize_rows(x.reshape(-1, int(group)), name)
        return q.reshape(rows, width), scale.reshape(rows, width // int(group))
    return _quantize_rows(x.to(torch.float32), name)


def _quantize_rows(x: "T", mode: str) -> tuple["T", "T"]:
    import torch

    absmax = x.abs().amax(dim=1)
    m = absmax if mode == "rmsnorm_int8" else absmax.clamp_min(EPS)
    # Divide by tensors: torch turns scalar / tensor, and on CUDA tensor / scalar, into a product with a reciprocal.
    limit, one = torch.full_like(m, 127), torch.ones_like(m)
    scale = m / limit
    if mode == "rmsnorm_int8":
        scale = torch.where(m > 0, scale, one)
    finite = torch.isfinite(absmax)
    scale = torch.where(finite, scale, absmax)
    s = scale[:, None]
    low, high = (-128, 127) if mode in ("rmsnorm_int8", "group_trunc") else (-127, 127)
    if mode == "recip_half_away":
        codes = round_half_away(x * (limit / m)[:, None]).clamp(low, high)
    elif mode == "recip_half_even":
        codes = torch.round(x * (limit / m)[:, None]).clamp(low, high)
    elif mode == "div_half_even":
        codes = torch.round(x / s).clamp(low, high)
    elif mode == "rmsnorm_int8":
        codes = torch.round(x * (one / scale)[:, None]).clamp(low, high)
    else:
        codes = torch.trunc((x / s).clamp(low, high))
    codes = torch.where(finite[:, None], codes, torch.zeros_like(codes)).nan_to_num(nan=0.0)
    return codes.to(torch.int8), scale


def route(topk_ids: "T", experts: int, expert_map: "T | None" = None) -> tuple["T", "T", "T"]:
    """ids int32 [T, k] → (rows_per_expert int32 [E], offsets int64 [E+1], unpermuted_to_permuted int32 [T, k])."""
    import torch

    flat = topk_ids.reshape(-1).long()
    if expert_map is not None:
        flat = torch.where(flat >= 0, expert_map.long()[flat.clamp_min(0)], -1)
    padded = torch.where(flat >= 0, flat, experts)
    # Not bincount, which asks the device for the largest value before it goes on.
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device).scatter_add_(0, padded, torch.ones_like(padded))[
        :experts
    ]
    offsets = torch.zeros(experts + 1, dtype=torch.int64, device=topk_ids.device)
    torch.cumsum(counts, 0, out=offsets[1:])
    order = torch.argsort(padded, stable=True)
    permuted = torch.empty_like(flat)
    permuted[order] = torch.arange(flat.numel(), device=flat.device)
    permuted = torch.where(flat >= 0, permuted, -1)
    return counts.int(), offsets, permuted.int().reshape(topk_ids.shape)


def tokens_of(permuted: "T", places: int) -> "T":
    """Which token's row lies at each of so many places, int64 [R]; −1 where nobody's does."""
    import torch

    flat = permuted.reshape(-1).long()
    # What goes nowhere meets behind the last place, so that nothing asks how many those are.
    token = torch.full((places + 1,), -1, device=flat.device)
    token[torch.where(flat >= 0, flat, places)] = torch.arange(len(flat), device=flat.device) // permuted.shape[1]
    return token[:places]


def remap(q: "T", scale: "T", permuted: "T", rows: "T", row_scales: "T") -> None:
    """Write the rows and scales of [T, …] to their places in [R, …]; −1 writes nowhere."""
    import torch

    token = tokens_of(permuted, len(rows))
    source, given = token.clamp_min(0), token >= 0
    rows.copy_(torch.where(given[:, None], q[source], rows))
    row_scales.copy_(torch.where(given, scale[source], row_scales))


def wide_scratch(w: "T") -> "T":
    """Room for one expert's weights [K, N] in a dtype whose products sum exactly: no int32 matmul on accelerators."""
    import torch

    return torch.empty(w.shape[1:], dtype=torch.int32 if w.device.type == "cpu" else torch.float64, device=w.device)


def parts_of(offsets: "T") -> "Iterator[tuple[int, slice]]":
    """(expert, its rows) of every expert that has any; asks the device for the offsets."""
    for e, (begin, end) in enumerate(pairwise(offsets.tolist())):
        if begin < end:
            yield e, slice(begin, end)


def grouped_gemm(
    a: "T", a_scale: "T", offsets: "T", w: "T", w_scale: "T", bias: "T | None", epilogue: str, scratch: "T", out: "T"
) -> None:
    """Rows of each expert against its weights s8 [K, N]; sums are exact, so only the epilogue's order matters."""
    import torch

    for e, part in parts_of(offsets):
        acc = (a[part].to(scratch.dtype) @ scratch.copy_(w[e])).float()
        row, col = a_scale[part, None], w_scale[e][None, :]
        y = acc * row * col if epilogue == "row_then_col" else acc * (row * col)
        if bias is not None:
            y = y + bias[e][None, :]
        out[part] = y.to(torch.bfloat16)


def gathered_gemm(
    a: "T", a_scale: "T", offsets: "T", w: "T", w_scale: "T", bias: "T | None", epilogue: str, scratch: "T", out: "T"
) -> None:
    """The same without a word from the device to the host: every row is multiplied with a copy of its expert's weights."""
    import torch

    rows = torch.arange(len(a), device=a.device)
    found = torch.searchsorted(offsets, rows, right=True) - 1
    valid, expert = found < len(w), found.clamp_max(len(w) - 1)
    acc = torch.bmm(a[:, None].double(), w[expert].double())[:, 0].float()
    row, col = a_scale[:, None], w_scale[expert]
    y = acc * row * col if epilogue == "row_then_col" else acc * (row * col)
    if bias is not None:
        y = y + bias[expert]
    out.copy_(torch.where(valid[:, None], y.to(torch.bfloat16), out))


def activate(gate_up: "T", act: str) -> "T":
    """bf16 [R, 2I] → silu(gate)·up, f32 [R, I], rounded to bf16 in between as the mode says."""
    gate, up = (half.float() for half in gate_up.chunk(2, dim=1))
    silu = gate / (1 + exp_cr(-gate))
    if act == "silu_round_twice":
        return (silu.bfloat16().float() * up).bfloat16().float()
    if act == "silu_round_once":
        return (silu * up).bfloat16().float()
    return silu * up


def act_quant(gate_up: "T", act: str, quant: str) -> tuple["T", "T"]:
    """bf16 [R, 2I] → (q int8 [R, I], scale f32 [R])."""
    return quantize(activate(gate_up, act), quant)


def combine(y: "T", permuted: "T", weights: "T", fma_mode: str, out: "T") -> None:
    """The weighted sum over slots, in slot order, f32; −1 is skipped."""
    import torch

    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for j in range(permuted.shape[1]):
        row = permuted[:, j].long()
        value, weight = y[row.clamp_min(0)].float(), weights[:, j, None]
        added = total + value * weight if fma_mode == "off" else fma(value, weight, total)
        total = torch.where((row >= 0)[:, None], added, total)
    out.copy_(total.bfloat16())


# ---------------------------------------------------------------- stages


def prepare_quantize(problem: Problem, weights: "Tensors") -> "Run":
    """moe.quantize."""
    mode = problem.mode("quant")

    def run(t: "Tensors") -> None:
        q, scale = quantize(t["x"].float(), mode)
        t["q"].copy_(q)
        t["q_scale"].copy_(scale)

    return run


def prepare_route(problem: Problem, weights: "Tensors") -> "Run":
    """moe.route."""

    def run(t: "Tensors") -> None:
        counts, offsets, permuted = route(t["topk_ids"], len(t["rows_per_expert"]), t.get("expert_map"))
        t["rows_per_expert"].copy_(counts)
        t["offsets"].copy_(offsets)
        t["unpermuted_to_permuted"].copy_(permuted)

    return run


def prepare_remap(problem: Problem, weights: "Tensors") -> "Run":
    """moe.remap."""

    def run(t: "Tensors") -> None:
        remap(t["q"], t["q_scale"], t["unpermuted_to_permuted"], t["a"], t["a_scale"])

    return run


def _prepare_gemm(problem: Problem, weights: "Tensors", rows: str, weight: str, out: str, gemm: "Gemm") -> "Run":
    epilogue, scratch = problem.mode("epilogue"), wide_scratch(weights[weight])

    def run(t: "Tensors") -> None:
        bias = t.get(f"{weight}_bias")
        gemm(t[rows], t[f"{rows}_scale"], t["offsets"], t[weight], t[f"{weight}_scale"], bias, epilogue, scratch, t[out])

    return run


def prepare_gemm1(problem: Problem, weights: "Tensors", gemm: "Gemm" = grouped_gemm) -> "Run":
    """moe.gemm1."""
    return _prepare_gemm(problem, weights, "a", "w13", "gate_up", gemm)


def prepare_gemm2(problem: Problem, weights: "Tensors", gemm: "Gemm" = grouped_gemm) -> "Run":
    """moe.gemm2."""
    return _prepare_gemm(problem, weights, "h", "w2", "y", gemm)


def prepare_act_quant(problem: Problem, weights: "Tensors") -> "Run":
    """moe.act_quant."""
    import torch

    act, quant = problem.mode("act"), problem.mode("quant")

    def run(t: "Tensors") -> None:
        q, scale = act_quant(t["gate_up"], act, quant)
        valid = torch.arange(len(q), device=q.device) < t["offsets"][-1]
        t["h"].copy_(torch.where(valid[:, None], q, t["h"]))
        t["h_scale"].copy_(torch.where(valid, scale, t["h_scale"]))

    return run


def prepare_combine(problem: Problem, weights: "Tensors") -> "Run":
    """moe.combine."""
    mode = problem.mode("combine_fma")

    def run(t: "Tensors") -> None:
        combine(t["y"], t["unpermuted_to_permuted"], t["topk_weights"], mode, t["out"])

    return run


def prepare_middle(problem: Problem, weights: "Tensors", gemm: "Gemm" = grouped_gemm) -> "Run":
    """moe.middle."""
    import torch

    epilogue, act, quant = (problem.mode(m) for m in ("epilogue", "act", "quant"))
    inter = problem.geometry.inter
    scratch13, scratch2 = wide_scratch(weights["w13"]), wide_scratch(weights["w2"])

    def run(t: "Tensors") -> None:
        gate_up = torch.empty(t["a"].shape[0], 2 * inter, dtype=torch.bfloat16, device=t["a"].device)
        gemm(t["a"], t["a_scale"], t["offsets"], t["w13"], t["w13_scale"], None, epilogue, scratch13, gate_up)
        h, h_scale = act_quant(gate_up, act, quant)  # rows past the valid ones are garbage that no expert owns
        gemm(h, h_scale, t["offsets"], t["w2"], t["w2_scale"], None, epilogue, scratch2, t["y"])

    return run


def prepare_layer(problem: Problem, weights: "Tensors", gemm: "Gemm" = grouped_gemm) -> "Run":
    """moe.layer."""
    import torch

    middle = prepare_middle(problem, weights, gemm)
    quant, mode = problem.mode("quant"), problem.mode("combine_fma")
    g = problem.geometry
    total = problem.rows * g.top_k
    add_shared = prepare_shared(problem, weights) if problem.mode("shared") == "on" else None

    def run(t: "Tensors") -> None:
        x = t["x"]
        q, scale = quantize(x.float(), quant)
        _, offsets, permuted = route(t["topk_ids"], g.experts)
        a = torch.empty(total, g.hidden, dtype=torch.int8, device=x.device)
        a_scale = torch.empty(total, dtype=torch.float32, device=x.device)
        remap(q, scale, permuted, a, a_scale)
        y = torch.empty(total, g.hidden, dtype=torch.bfloat16, device=x.device)
        middle({**t, "a": a, "a_scale": a_scale, "offsets": offsets, "y": y})
        combine(y, permuted, t["topk_weights"], mode, t["out"])
        if add_shared is not None:
            add_shared({**t, "routed": t["out"].clone()})

    return run


def prepare_shared(problem: Problem, weights: "Tensors") -> "Run":
    """moe.shared."""
    import torch

    epilogue, act, quant = (problem.mode(m) for m in ("epilogue", "act", "quant"))
    scratch13, scratch2 = wide_scratch(weights["shared_w13"]), wide_scratch(weights["shared_w2"])
    t_rows, g = problem.rows, problem.geometry

    def run(t: "Tensors") -> None:
        x = t["x"].float()
        q, scale = quantize(x, quant)
        all_rows = torch.tensor([0, t_rows])
        gate_up = torch.empty(t_rows, 2 * g.inter, dtype=torch.bfloat16, device=x.device)
        y = torch.empty(t_rows, g.hidden, dtype=torch.bfloat16, device=x.device)
        grouped_gemm(q, scale, all_rows, t["shared_w13"], t["shared_w13_scale"], None, epilogue, scratch13, gate_up)
        h, h_scale = act_quant(gate_up, act, quant)
        grouped_gemm(h, h_scale, all_rows, t["shared_w2"], t["shared_w2_scale"], None, epilogue, scratch2, y)
        z = strided32_tree(x * t["shared_gate"].float()).bfloat16().float()
        s = sigmoid(z).bfloat16().float()
        p = (s[:, None] * y.float()).bfloat16().float()
        t["out"].copy_((t["routed"].float() + p).bfloat16())

    return run


prepare_gemm1_gathered = functools.partial(prepare_gemm1, gemm=gathered_gemm)
prepare_gemm2_gathered = functools.partial(prepare_gemm2, gemm=gathered_gemm)
prepare_middle_gathered = functools.partial(prepare_middle, gemm=gathered_gemm)
prepare_layer_gathered = functools.partial(prepare_layer, gemm=gathered_gemm)
