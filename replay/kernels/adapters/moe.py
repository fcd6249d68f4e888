"""Operations that run MoE stages: as released, and the fork's int8."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from replay.kernels.adapters.binding import NONE, Argument, Binding, Is, Room, Value, of_problem
from replay.kernels.eager import parts_of
from replay.kernels.modes import WIDE
from replay.model import Problem

if TYPE_CHECKING:
    import torch

    T = torch.Tensor
    Tensors = Mapping[str, T]


_GEMMS = {"moe.gemm1": ("a", "w13", "gate_up"), "moe.gemm2": ("h", "w2", "y")}
HIDDEN, EXPERTS = of_problem(lambda p: p.geometry.hidden), Value(lambda p, t: len(t["rows_per_expert"]))


def _offsets(p: Problem, t: "Tensors", args: Mapping[str, Any], returned: Any) -> None:
    """The released prologue counts rows and does not add them up."""
    import torch

    t["offsets"][0] = 0
    torch.cumsum(t["rows_per_expert"], 0, out=t["offsets"][1:])


_REMAP = Binding(
    op="_moe_C::remap_hidden_states", stage="moe.route", variant="remap_hidden_states",
    schema="(Tensor hidden_states, Tensor? hidden_states_scales, Tensor remapped_hidden_states, "
    "Tensor? remapped_hidden_states_scales, Tensor? expert_map, Tensor rows_per_expert, Tensor unpermuted_row_to_permuted_row, "
    "Tensor topk_ids, int total_experts_num, int local_experts_num) -> ()",
    arguments={
        "hidden_states": Room("bfloat16", lambda p: (p.rows, p.geometry.hidden)),
        "hidden_states_scales": NONE,
        "remapped_hidden_states": Room("bfloat16", lambda p: (p.rows * p.geometry.top_k, p.geometry.hidden)),
        "remapped_hidden_states_scales": NONE,
        "expert_map": Value(lambda p, t: t.get("expert_map")),
        "rows_per_expert": Is("rows_per_expert", zeroed=True),
        "unpermuted_row_to_permuted_row": Is("unpermuted_to_permuted"),
        "topk_ids": Is("topk_ids"),
        "total_experts_num": of_problem(lambda p: p.geometry.experts),
        "local_experts_num": EXPERTS,
    },
    writes=("remapped_hidden_states", "rows_per_expert", "unpermuted_row_to_permuted_row"),
    undeclared=("remapped_hidden_states", "rows_per_expert", "unpermuted_row_to_permuted_row"),
    finish=_offsets,
)  # fmt: skip

_GATHER = Binding(
    op="_moe_C::moe_gather", stage="moe.combine", variant="moe_gather",
    schema="(Tensor! output, Tensor moe_output, Tensor topk_weights, Tensor unpermuted_row_to_permuted_row, "
    "int num_experts) -> ()",
    arguments={
        "output": Is("out"), "moe_output": Is("y"), "topk_weights": Is("topk_weights"),
        "unpermuted_row_to_permuted_row": Is("unpermuted_to_permuted"), "num_experts": of_problem(lambda p: p.geometry.experts),
    },
    writes=("output",), modes=(("combine_fma", ("off",)),),
)  # fmt: skip


_SILU = Binding(
    op="_C::silu_and_mul", stage="moe.act_quant", variant="silu_and_mul", schema="(Tensor! result, Tensor input) -> ()",
    arguments={"result": Is("h"), "input": Is("gate_up")}, writes=("result",), modes=WIDE,
)  # fmt: skip


def _grouped_wide(stage: str) -> Binding:
    """The released grouped product: 16-bit rows, weights [E, K, N] as the stage has them."""
    rows, weight, out = _GEMMS[stage]
    return Binding(
        op="_xpu_C::cutlass_grouped_gemm_interface", stage=stage, variant="cutlass_grouped_16bit", writes=("ptr_D",), modes=WIDE,
        schema="(Tensor ptr_A, Tensor? ptr_A_scale, Tensor ptr_B, Tensor? ptr_B_scale, Tensor? ptr_bias, Tensor ptr_D, "
        "Tensor rows_per_expert, int N, int K, int num_experts) -> Tensor", undeclared=("ptr_D",),
        arguments={
            "ptr_A": Is(rows), "ptr_A_scale": NONE, "ptr_B": Is(weight), "ptr_B_scale": NONE,
            "ptr_bias": Value(lambda p, t: t.get(f"{weight}_bias")), "ptr_D": Is(out), "rows_per_expert": Is("rows_per_expert"),
            "N": Value(lambda p, t: t[weight].shape[2]), "K": Value(lambda p, t: t[weight].shape[1]),
            "num_experts": Value(lambda p, t: t[weight].shape[0]),
        },
    )  # fmt: skip


# ---------------------------------------------------------------- MoE, the fork's int8


def _quantizer(op: str, stage: str, x: str, q: str) -> Binding:
    return Binding(
        op=f"_xpu_C::{op}", stage=stage, variant=op, named=True, schema="(Tensor x, Tensor! q, Tensor! scales) -> ()",
        arguments={"x": Is(x), "q": Is(q), "scales": Is(f"{q}_scale")}, writes=("q", "scales"),
        modes=(("quant", ("recip_half_away", "recip_half_even", "div_half_even", "rmsnorm_int8")),),
    )  # fmt: skip


def _active(p: Problem, t: "Tensors") -> "T":
    return t["rows_per_expert"].nonzero()[:, 0].int()


# What each form has in the place of the rows of each expert, and behind the number of experts.
_FORMS: dict[str, tuple[dict[str, tuple[str, Argument]], dict[str, tuple[str, Argument]]]] = {
    "": ({"rows_per_expert": ("Tensor", Is("rows_per_expert"))}, {}),
    "_offsets": ({"expert_first_token_offset": ("Tensor", Is("offsets"))}, {}),
    "_active_offsets": (
        {"expert_first_token_offset": ("Tensor", Is("offsets")), "active_expert_ids": ("Tensor", Value(_active))},
        {"num_active_experts": ("int", Value(lambda p, t: int(t["rows_per_expert"].count_nonzero())))},
    ),
    "_topk8_gemm1": (
        {"topk_ids": ("Tensor", Is("topk_ids")), "unpermuted_row_to_permuted_row": ("Tensor", Is("unpermuted_to_permuted"))}, {},
    ),
}  # fmt: skip


def _grouped(stage: str, form: str) -> Binding:
    """A grouped product of int8 rows: weights [E, K, N] and scales [E, N], as the stage has them."""
    rows, weight, out = _GEMMS[stage]
    instead, behind = _FORMS[form]
    named: dict[str, tuple[str, Argument]] = {
        "ptr_A": ("Tensor", Is(rows)), "ptr_A_scales": ("Tensor", Is(f"{rows}_scale")), "ptr_B": ("Tensor", Is(weight)),
        "ptr_B_scales": ("Tensor", Is(f"{weight}_scale")), "ptr_bias": ("Tensor?", Value(lambda p, t: t.get(f"{weight}_bias"))),
        "ptr_D": ("Tensor!", Is(out)), **instead, "N": ("int", Value(lambda p, t: t[weight].shape[2])),
        "K": ("int", Value(lambda p, t: t[weight].shape[1])), "num_experts": ("int", Value(lambda p, t: t[weight].shape[0])),
        **behind,
    }  # fmt: skip
    return Binding(
        op=f"_xpu_C::cutlass_grouped_gemm_w8a8_int8{form}_interface", stage=stage, variant=f"cutlass_grouped{form}", named=True,
        schema=f"({', '.join(f'{kind} {name}' for name, (kind, _) in named.items())}) -> Tensor",
        arguments={name: argument for name, (_, argument) in named.items()}, writes=("ptr_D",),
        modes=(("epilogue", ("row_then_col",)),),
    )  # fmt: skip


def _experts(stage: str) -> "Callable[[Problem, Tensors], Iterator[Tensors]]":
    """The rows of each expert that has any, and its weights; the offsets are asked of the device."""
    rows, weight, out = _GEMMS[stage]

    def calls(p: Problem, t: "Tensors") -> "Iterator[Tensors]":
        for e, part in parts_of(t["offsets"]):
            own = {name: t[name][e] for name in (weight, f"{weight}_scale", f"{weight}_bias") if name in t}
            yield own | {name: t[name][part] for name in (rows, f"{rows}_scale", out)}

    return calls


def _dense(stage: str) -> Binding:
    """One expert a call: weights [K, N]."""
    rows, weight, out = _GEMMS[stage]

    def copied(p: Problem, t: "Tensors", args: Mapping[str, Any], returned: Any) -> None:
        t[out].copy_(returned)

    return Binding(
        op="_xpu_C::int8_gemm_w8a8", stage=stage, variant="int8_gemm_w8a8", named=True, writes=(),
        schema="(Tensor A, Tensor A_scale, Tensor B, Tensor B_scale, ScalarType? out_dtype, Tensor? bias) -> Tensor",
        calls=_experts(stage), finish=copied, modes=(("epilogue", ("row_then_col",)),), arguments={
            "A": Is(rows), "A_scale": Is(f"{rows}_scale"), "B": Is(weight), "B_scale": Is(f"{weight}_scale"),
            "out_dtype": Value(lambda p, t: t[out].dtype), "bias": Value(lambda p, t: t.get(f"{weight}_bias")),
        },
    )  # fmt: skip


def workspace(p: Problem) -> dict[str, tuple[int, int]]:
    """Where the fused prologue leaves what: (first byte, bytes), each part at a multiple of 256, as upstream's caller has it."""
    pairs, experts, rows = p.rows * p.geometry.top_k, p.geometry.experts, p.rows
    block = next((b for b in (32, 64, 128, 256, 512) if -(-rows // b) * experts <= b), 1024)
    counts = 4 * experts * -(-rows // block)
    sizes = {
        "permuted_row_to_unpermuted_row": 4 * pairs, "permuted_token_selected_experts": 4 * pairs,
        "unpermuted_row_to_permuted_row": 4 * pairs, "blocked_expert_counts": counts, "blocked_expert_counts_cumsum": counts,
        "blocked_row_to_unpermuted_row": 4 * experts * rows, "expert_first_token_offset": 8 * (experts + 1),
        "permuted_token_final_scales": 4 * pairs, "overlapped_gemm1_gemm2_inputs": pairs * p.geometry.hidden,
    }  # fmt: skip
    parts, begin = {}, 0
    for name, size in sizes.items():
        parts[name] = (begin, size)
        begin += -(-size // 256) * 256
    return parts | {"all": (0, begin)}


def _taken_out(p: Problem, t: "Tensors", args: Mapping[str, Any], returned: Any) -> None:
    """Offsets and places out of the workspace; rows an expert are what lies between its offsets."""
    import torch

    def part(name: str, dtype: "torch.dtype") -> "T":
        begin, size = workspace(p)[name]
        found: T = args["workspace"][begin : begin + size].view(dtype)
        return found

    t["offsets"].copy_(part("expert_first_token_offset", torch.int64))
    t["rows_per_expert"].copy_(t["offsets"].diff())
    t["unpermuted_to_permuted"].copy_(part("unpermuted_row_to_permuted_row", torch.int32).view(t["topk_ids"].shape))


_PROLOGUE = Binding(
    op="_moe_C::fused_moe_prologue", stage="moe.route", variant="fused_moe_prologue", named=True,
    modes=(("expert_map", ("off",)),),
    schema="(Tensor input, Tensor? input_scales, Tensor token_selected_experts, Tensor token_final_scales, Tensor! workspace, "
    "int hidden_size, int inter_size, int ep_rank, int ep_size, int num_experts_on_rank) -> ()",
    arguments={
        "input": Room("int8", lambda p: (p.rows, p.geometry.hidden)), "input_scales": Room("float32", lambda p: (p.rows,)),
        "token_selected_experts": Value(lambda p, t: t["topk_ids"].long()),
        "token_final_scales": Room("float32", lambda p: (p.rows, p.geometry.top_k)),
        "workspace": Room("uint8", lambda p: (workspace(p)["all"][1],)), "hidden_size": HIDDEN,
        "inter_size": of_problem(lambda p: p.geometry.inter),
        "ep_rank": of_problem(lambda p: 0), "ep_size": of_problem(lambda p: 1),
        "num_experts_on_rank": EXPERTS,
    },
    writes=("workspace",), finish=_taken_out,
)  # fmt: skip


BINDINGS = (
    _REMAP,
    _GATHER,
    _SILU,
    *(_grouped_wide(stage) for stage in _GEMMS),
    _quantizer("per_token_quant_int8_xpu_out", "moe.quantize", "x", "q"),
    _quantizer("silu_and_mul_quant_int8_xpu_out", "moe.act_quant", "gate_up", "h"),
    *(_grouped(stage, form) for stage in _GEMMS for form in ("", "_offsets", "_active_offsets")),
    _grouped("moe.gemm1", "_topk8_gemm1"),
    *(_dense(stage) for stage in _GEMMS),
    _PROLOGUE,
)
