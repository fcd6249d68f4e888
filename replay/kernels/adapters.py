"""Operations of vllm-xpu-kernels and the stages that they run: one table of arguments, read from either side.

A binding says what each argument of an operation is to a stage: one of its tensors, a value of the problem, or room that the
operation wants and no stage has. The provider ``xpu_kernels`` calls operations by it; an engine that calls one can be given a
kernel of ours by the same table. ``writes`` is what an operation does, whether its schema declares it or not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from replay.model import Problem

if TYPE_CHECKING:
    import torch

    T = torch.Tensor
    Tensors = Mapping[str, T]


@dataclass(frozen=True)
class Is:
    """A tensor of the stage; ``zeroed`` by whoever calls, right before."""

    tensor: str
    zeroed: bool = False


@dataclass(frozen=True)
class Value:
    """A number, a flag, a string, or a tensor that is made of the stage's."""

    of: "Callable[[Problem, Tensors], Any]"


@dataclass(frozen=True)
class Room:
    """A tensor that an operation fills and no stage has, or reads and no stage gives: dtype and shape."""

    dtype: str
    shape: Callable[[Problem], tuple[int, ...]]


Argument = Is | Value | Room
NONE = Value(lambda p, t: None)


def _ends(p: Problem, t: "Tensors", args: Mapping[str, Any], returned: Any) -> None:
    """Most operations write all that the stage asks for."""


@dataclass(frozen=True, kw_only=True)
class Binding:
    """``op`` runs ``stage`` as ``variant``. ``named``: a fork's schema of which only the names are known, so only they are held.

    ``finish(problem, tensors, arguments, returned)`` writes what the stage asks for and the operation does not.
    """

    op: str
    schema: str
    stage: str
    variant: str
    arguments: Mapping[str, Argument]
    writes: tuple[str, ...]
    named: bool = False
    modes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    finish: "Callable[[Problem, Tensors, Mapping[str, Any], Any], None]" = _ends
    undeclared: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        """``moe.combine:moe_gather``."""
        return f"{self.stage}:{self.variant}"


def _problem(of: Callable[[Problem], Any]) -> Value:
    return Value(lambda p, t: of(p))


def _same(*names: str) -> dict[str, Argument]:
    """Arguments that the stage calls by the same name."""
    return {name: Is(name) for name in names}


# ---------------------------------------------------------------- MoE, as released

HIDDEN, EXPERTS = _problem(lambda p: p.geometry.hidden), Value(lambda p, t: len(t["rows_per_expert"]))


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
        "total_experts_num": _problem(lambda p: p.geometry.experts),
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
        "unpermuted_row_to_permuted_row": Is("unpermuted_to_permuted"), "num_experts": _problem(lambda p: p.geometry.experts),
    },
    writes=("output",),
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


_GEMMS = {"moe.gemm1": ("a", "w13", "gate_up"), "moe.gemm2": ("h", "w2", "y")}
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
    )  # fmt: skip


# ---------------------------------------------------------------- GDN, decode


def _heads(p: Problem, t: "Tensors", part: int) -> "T":
    """q, k or v of the conv's output, [T, heads, dim], contiguous as the operations take it."""
    g, width = p.geometry, p.geometry.k_heads * p.geometry.head_dim
    begin, end = ((0, width), (width, 2 * width), (2 * width, g.conv_dim))[part]
    return t["qkv"][:, begin:end].reshape(p.rows, -1, g.head_dim).contiguous()


_HEADS: dict[str, Argument] = {
    "num_k_heads": _problem(lambda p: p.geometry.k_heads), "num_v_heads": _problem(lambda p: p.geometry.v_heads),
    "head_k_dim": _problem(lambda p: p.geometry.head_dim), "head_v_dim": _problem(lambda p: p.geometry.head_dim),
}  # fmt: skip
_DECODES: dict[str, Argument] = {
    "num_prefills": _problem(lambda p: 0), "num_decodes": _problem(lambda p: p.rows), "num_spec_decodes": _problem(lambda p: 0),
    "has_initial_state": NONE, "non_spec_query_start_loc": Is("query_start_loc"), "non_spec_token_indx": NONE,
    "non_spec_state_indices_tensor": Is("slots"),
}  # fmt: skip
_ACTUAL: dict[str, Argument] = {"num_actual_tokens": _problem(lambda p: p.rows), "tp_size": _problem(lambda p: 1)}
_CONVOLVED: dict[str, Argument] = {
    "conv_weights": Is("conv_weights"), "conv_bias": Value(lambda p, t: t.get("conv_bias")),
    "activation": _problem(lambda p: "silu"),
}  # fmt: skip
_PROJECTED: dict[str, Argument] = {"projected_states_qkvz": Is("qkvz"), "projected_states_ba": Is("ba")}
_REORDER: dict[str, Argument] = {"reorder_input": _problem(lambda p: p.mode("reorder_input") == "contiguous")}
_DECODE_MODES = (("batch", ("decode",)), ("padding_z", ("written",)), ("conv_bias", ("off", "bias_last")))
_STATE_MODES = (("batch", ("decode",)), ("state_layout", ("v_k",)))


def _convolved(p: Problem, t: "Tensors", args: Mapping[str, Any], returned: Any) -> None:
    """The conv returns q, k, v, b and a of its own."""
    import torch

    t["qkv"].copy_(torch.cat([part.flatten(1) for part in returned[:3]], 1))
    t["b"].copy_(returned[3])
    t["a"].copy_(returned[4])


_CONV = Binding(
    op="_xpu_C::causal_conv1d_non_spec", stage="gdn.conv", variant="causal_conv1d_non_spec",
    schema="(Tensor! z, Tensor projected_states_qkvz, Tensor projected_states_ba, int num_k_heads, int num_v_heads, "
    "int head_k_dim, int head_v_dim, Tensor! conv_state, Tensor conv_weights, Tensor? conv_bias, str activation, "
    "int num_prefills, int num_decodes, int num_spec_decodes, Tensor? has_initial_state, Tensor non_spec_query_start_loc, "
    "Tensor? non_spec_token_indx, Tensor non_spec_state_indices_tensor, int num_actual_tokens, int tp_size, "
    "bool reorder_input) -> Tensor[]",
    arguments={**_same("z"), **_PROJECTED, **_HEADS, **_same("conv_state"), **_CONVOLVED, **_DECODES, **_ACTUAL, **_REORDER},
    writes=("z", "conv_state"), modes=_DECODE_MODES, finish=_convolved,
)  # fmt: skip

_DELTA = Binding(
    op="_xpu_C::gated_delta_rule_non_spec", stage="gdn.recurrent", variant="gated_delta_rule_non_spec",
    schema="(Tensor! core_attn_out, Tensor q, Tensor k, Tensor v, Tensor b, Tensor a, int num_v_heads, int head_v_dim, "
    "Tensor A_log, Tensor dt_bias, Tensor! ssm_state, int num_prefills, int num_decodes, int num_spec_decodes, "
    "Tensor? has_initial_state, Tensor non_spec_query_start_loc, Tensor? non_spec_token_indx, "
    "Tensor non_spec_state_indices_tensor, int num_actual_tokens, int tp_size) -> ()",
    arguments={
        **_same("core_attn_out"), "q": Value(lambda p, t: _heads(p, t, 0)), "k": Value(lambda p, t: _heads(p, t, 1)),
        "v": Value(lambda p, t: _heads(p, t, 2)), **_same("b", "a"), "num_v_heads": _HEADS["num_v_heads"],
        "head_v_dim": _HEADS["head_v_dim"], **_same("A_log", "dt_bias", "ssm_state"), **_DECODES, **_ACTUAL,
    },
    writes=("core_attn_out", "ssm_state"), modes=_STATE_MODES,
)  # fmt: skip

_SPECULATION = ("spec_query_start_loc", "spec_token_indx", "spec_state_indices_tensor", "num_accepted_tokens")
_ATTENTION = Binding(
    op="_xpu_C::gdn_attention", stage="gdn.step", variant="gdn_attention",
    schema="(Tensor! core_attn_out, Tensor! z, Tensor projected_states_qkvz, Tensor projected_states_ba, int num_k_heads, "
    "int num_v_heads, int head_k_dim, int head_v_dim, Tensor! conv_state, Tensor! ssm_state, Tensor conv_weights, "
    "Tensor? conv_bias, str activation, Tensor A_log, Tensor dt_bias, int num_prefills, int num_decodes, int num_spec_decodes, "
    "Tensor? has_initial_state, Tensor? non_spec_query_start_loc, Tensor? non_spec_token_indx, "
    "Tensor? non_spec_state_indices_tensor, Tensor? spec_query_start_loc, Tensor? spec_token_indx, "
    "Tensor? spec_state_indices_tensor, Tensor? num_accepted_tokens, int num_actual_tokens, int tp_size, "
    "bool reorder_input) -> ()",
    arguments={
        **_same("core_attn_out", "z"), **_PROJECTED, **_HEADS, **_same("conv_state", "ssm_state"), **_CONVOLVED,
        **_same("A_log", "dt_bias"), **_DECODES, **dict.fromkeys(_SPECULATION, NONE), **_ACTUAL, **_REORDER,
    },
    writes=("core_attn_out", "z", "conv_state", "ssm_state"), modes=(*_DECODE_MODES, _STATE_MODES[1]),
)  # fmt: skip


# ---------------------------------------------------------------- selection

_TOP_K = Binding(
    op="_C::top_k_per_row_decode", stage="topk.rows", variant="top_k_per_row_decode",
    schema="(Tensor logits, int next_n, Tensor seq_lens, Tensor! indices, int numRows, int stride0, int stride1, int topK) -> ()",
    arguments={
        "logits": Is("logits"), "next_n": _problem(lambda p: int(p.mode("next_n"))), "seq_lens": Is("seq_lens"),
        "indices": Is("indices"), "numRows": _problem(lambda p: p.rows), "stride0": Value(lambda p, t: t["logits"].stride(0)),
        "stride1": Value(lambda p, t: t["logits"].stride(1)), "topK": _problem(lambda p: int(p.mode("k"))),
    },
    writes=("indices",), modes=(("logits", ("f32",)),),
)  # fmt: skip


_SOFTMAX = Binding(
    op="_moe_C::topk_softmax", stage="topk.router", variant="topk_softmax",
    schema="(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, Tensor gating_output, bool renormalize, "
    "Tensor? bias, Tensor? is_padding) -> ()",
    arguments={
        "topk_weights": Is("topk_weights"), "topk_indices": Is("topk_ids"),
        "token_expert_indices": Room("int32", lambda p: (p.rows, p.geometry.top_k)), "gating_output": Is("gating_output"),
        "renormalize": _problem(lambda p: p.mode("renormalize") == "on"), "bias": Value(lambda p, t: t.get("bias")),
        "is_padding": Value(lambda p, t: t["is_padding"].bool() if "is_padding" in t else None),
    },
    writes=("topk_weights", "topk_indices", "token_expert_indices"),
)  # fmt: skip


BINDINGS: Mapping[str, Binding] = {
    b.name: b
    for b in (
        _REMAP,
        _GATHER,
        _quantizer("per_token_quant_int8_xpu_out", "moe.quantize", "x", "q"),
        _quantizer("silu_and_mul_quant_int8_xpu_out", "moe.act_quant", "gate_up", "h"),
        *(_grouped(stage, form) for stage in _GEMMS for form in ("", "_offsets", "_active_offsets")),
        _grouped("moe.gemm1", "_topk8_gemm1"),
        _CONV,
        _DELTA,
        _ATTENTION,
        _TOP_K,
        _SOFTMAX,
    )
}


def arguments_of(binding: Binding, problem: Problem, tensors: "Tensors", kept: "dict[str, T]") -> dict[str, Any]:
    """The operation's arguments, by name; ``kept`` holds what it wants beside the stage's tensors."""
    import torch

    given: dict[str, Any] = {}
    like = next(iter(tensors.values()))
    for name, argument in binding.arguments.items():
        if isinstance(argument, Is):
            given[name] = tensors[argument.tensor].zero_() if argument.zeroed else tensors[argument.tensor]
        elif isinstance(argument, Value):
            given[name] = argument.of(problem, tensors)
        else:
            if name not in kept:
                kept[name] = torch.zeros(argument.shape(problem), dtype=getattr(torch, argument.dtype), device=like.device)
            given[name] = kept[name]
    return given
