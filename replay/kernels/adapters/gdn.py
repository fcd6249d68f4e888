"""Operations that run GDN stages of decode."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from replay.kernels.adapters.binding import NONE, Argument, Binding, Is, Value, of_problem, same
from replay.model import Problem

if TYPE_CHECKING:
    import torch

    T = torch.Tensor
    Tensors = Mapping[str, T]


def _heads(p: Problem, t: "Tensors", part: int) -> "T":
    """q, k or v of the conv's output, [T, heads, dim], contiguous as the operations take it."""
    g, width = p.geometry, p.geometry.k_heads * p.geometry.head_dim
    begin, end = ((0, width), (width, 2 * width), (2 * width, g.conv_dim))[part]
    return t["qkv"][:, begin:end].reshape(p.rows, -1, g.head_dim).contiguous()


_HEADS: dict[str, Argument] = {
    "num_k_heads": of_problem(lambda p: p.geometry.k_heads), "num_v_heads": of_problem(lambda p: p.geometry.v_heads),
    "head_k_dim": of_problem(lambda p: p.geometry.head_dim), "head_v_dim": of_problem(lambda p: p.geometry.head_dim),
}  # fmt: skip
_DECODES: dict[str, Argument] = {
    "num_prefills": of_problem(lambda p: 0), "num_decodes": of_problem(lambda p: p.rows),
    "num_spec_decodes": of_problem(lambda p: 0),
    "has_initial_state": NONE, "non_spec_query_start_loc": Is("query_start_loc"), "non_spec_token_indx": NONE,
    "non_spec_state_indices_tensor": Is("slots"),
}  # fmt: skip
_ACTUAL: dict[str, Argument] = {"num_actual_tokens": of_problem(lambda p: p.rows), "tp_size": of_problem(lambda p: 1)}
_CONVOLVED: dict[str, Argument] = {
    "conv_weights": Is("conv_weights"), "conv_bias": Value(lambda p, t: t.get("conv_bias")),
    "activation": of_problem(lambda p: "silu"),
}  # fmt: skip
_PROJECTED: dict[str, Argument] = {"projected_states_qkvz": Is("qkvz"), "projected_states_ba": Is("ba")}
_REORDER: dict[str, Argument] = {"reorder_input": of_problem(lambda p: p.mode("reorder_input") == "contiguous")}
_DECODE_MODES = (("batch", ("decode",)), ("padding_z", ("written",)), ("conv_bias", ("off", "bias_last")))
_RECURRENCE = (("state_layout", ("v_k",)), ("l2norm", ("div_sqrt_eps_in",)), ("softplus", ("softplus_log",)))


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
    arguments={**same("z"), **_PROJECTED, **_HEADS, **same("conv_state"), **_CONVOLVED, **_DECODES, **_ACTUAL, **_REORDER},
    writes=("z", "conv_state"), modes=_DECODE_MODES, finish=_convolved,
)  # fmt: skip

_DELTA = Binding(
    op="_xpu_C::gated_delta_rule_non_spec", stage="gdn.recurrent", variant="gated_delta_rule_non_spec",
    schema="(Tensor! core_attn_out, Tensor q, Tensor k, Tensor v, Tensor b, Tensor a, int num_v_heads, int head_v_dim, "
    "Tensor A_log, Tensor dt_bias, Tensor! ssm_state, int num_prefills, int num_decodes, int num_spec_decodes, "
    "Tensor? has_initial_state, Tensor non_spec_query_start_loc, Tensor? non_spec_token_indx, "
    "Tensor non_spec_state_indices_tensor, int num_actual_tokens, int tp_size) -> ()",
    arguments={
        **same("core_attn_out"), "q": Value(lambda p, t: _heads(p, t, 0)), "k": Value(lambda p, t: _heads(p, t, 1)),
        "v": Value(lambda p, t: _heads(p, t, 2)), **same("b", "a"), "num_v_heads": _HEADS["num_v_heads"],
        "head_v_dim": _HEADS["head_v_dim"], **same("A_log", "dt_bias", "ssm_state"), **_DECODES, **_ACTUAL,
    },
    writes=("core_attn_out", "ssm_state"), modes=(_DECODE_MODES[0], *_RECURRENCE),
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
        **same("core_attn_out", "z"), **_PROJECTED, **_HEADS, **same("conv_state", "ssm_state"), **_CONVOLVED,
        **same("A_log", "dt_bias"), **_DECODES, **dict.fromkeys(_SPECULATION, NONE), **_ACTUAL, **_REORDER,
    },
    writes=("core_attn_out", "z", "conv_state", "ssm_state"), modes=(*_DECODE_MODES, *_RECURRENCE),
)  # fmt: skip


BINDINGS = (_CONV, _DELTA, _ATTENTION)
