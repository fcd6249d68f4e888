"""The GDN operations of decode."""

import numpy as np
import torch

from replay.oracle import gdn as gdn_oracle
from replay.oracle.gdn import Heads, Modes
from replay.session.buffers import to_numpy, to_torch
from tests.fakes.arguments import Arguments, apart, counts_of, fill, number, require, tensor


def _decode(a: Arguments) -> tuple[np.ndarray, np.ndarray]:
    """(slots, starts) of a batch of one token a sequence."""
    counts_of(a, "num_prefills", "num_decodes", "num_spec_decodes", "num_actual_tokens", "tp_size")
    slots = tensor(a, "non_spec_state_indices_tensor", "int32", a["num_decodes"])
    starts = tensor(a, "non_spec_query_start_loc", "int32", len(slots) + 1)
    for name, want in (("num_prefills", 0), ("num_spec_decodes", 0), ("num_actual_tokens", len(slots)), ("tp_size", 1)):
        number(a, name, want)
    for name in ("has_initial_state", "non_spec_token_indx"):
        require(a[name] is None, name, "none in decode", a[name])
    require(starts.tolist() == list(range(len(slots) + 1)), "non_spec_query_start_loc", "one token a sequence", starts.tolist())
    return to_numpy(slots), to_numpy(starts)


def _projections(a: Arguments) -> tuple[Heads, str]:
    """(heads, order) of the projected states, all of them looked at."""
    counts_of(a, "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
    heads = Heads(a["num_k_heads"], a["num_v_heads"], a["head_k_dim"], a["head_v_dim"])
    require(heads.k_heads > 0, "num_k_heads", "some", heads.k_heads)
    require(heads.v_heads % heads.k_heads == 0, "num_v_heads", f"a multiple of {heads.k_heads}", heads.v_heads)
    rows, taps = a["num_actual_tokens"], tensor(a, "conv_weights", "bfloat16", None, None).shape[-1]
    number(a, "activation", "silu")
    require(type(a["reorder_input"]) is bool, "reorder_input", "a flag", a["reorder_input"])
    tensor(a, "projected_states_qkvz", "bfloat16", rows, heads.conv_dim + heads.v_heads * heads.v_dim)
    tensor(a, "projected_states_ba", "bfloat16", rows, 2 * heads.v_heads)
    tensor(a, "conv_weights", "bfloat16", heads.conv_dim, taps)
    tensor(a, "conv_state", "bfloat16", None, taps - 1, heads.conv_dim, strided=True)
    tensor(a, "z", "bfloat16", rows, heads.v_heads, heads.v_dim)
    if a["conv_bias"] is not None:
        tensor(a, "conv_bias", "bfloat16", heads.conv_dim)
    return heads, "contiguous" if a["reorder_input"] else "interleaved"


def _conv(a: Arguments) -> tuple[Heads, np.ndarray, np.ndarray, np.ndarray]:
    """(heads, q|k|v, b, a), z and the states written."""
    slots, starts = _decode(a)
    heads, order = _projections(a)
    mixed, z = gdn_oracle.split_qkvz(to_numpy(a["projected_states_qkvz"]), heads, order)
    b, gate = gdn_oracle.split_ba(to_numpy(a["projected_states_ba"]), heads, order)
    bias = None if a["conv_bias"] is None else to_numpy(a["conv_bias"])
    mixed = np.ascontiguousarray(mixed)
    qkv, state = gdn_oracle.conv(
        mixed, to_numpy(a["conv_weights"]), bias, to_numpy(a["conv_state"]), slots, starts, mixed, "bias_last" if bias is not None else "off"
    )  # fmt: skip
    fill(a["z"], z, "bf16")
    fill(a["conv_state"], state, "bf16")
    return heads, qkv, np.ascontiguousarray(b), np.ascontiguousarray(gate)


def causal_conv1d_non_spec(a: Arguments) -> list[torch.Tensor]:
    """q, k, v [T, heads, dim], b, a [T, heads]."""
    heads, qkv, b, gate = _conv(a)
    width = heads.k_heads * heads.k_dim
    q, k, v = np.split(qkv, [width, 2 * width], 1)
    made = [to_torch(np.ascontiguousarray(x), "bf16") for x in (q, k, v, b, gate)]
    shapes = [(len(q), heads.k_heads, heads.k_dim)] * 2 + [(len(q), heads.v_heads, heads.v_dim)] + [(len(q), heads.v_heads)] * 2
    return [x.view(shape) for x, shape in zip(made, shapes, strict=True)]


def _delta(a: Arguments, heads: Heads, qkv: np.ndarray, b: np.ndarray, gate: np.ndarray) -> None:
    slots, starts = _decode(a)
    tensor(a, "A_log", "float32", heads.v_heads)
    tensor(a, "dt_bias", "float32 bfloat16", heads.v_heads)
    state = tensor(a, "ssm_state", "float32 bfloat16 float16", None, heads.v_heads, heads.v_dim, heads.k_dim, strided=True)
    out = tensor(a, "core_attn_out", "bfloat16", len(qkv), heads.v_heads, heads.v_dim)
    o, after = gdn_oracle.recurrent(
        qkv, gate, b, to_numpy(a["A_log"]), to_numpy(a["dt_bias"]), to_numpy(state), slots, starts, to_numpy(out), heads,
        Modes("div_sqrt_eps_in", "softplus_log", "v_k"),
    )  # fmt: skip
    fill(out, o, "bf16")
    fill(state, after, {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[str(state.dtype).removeprefix("torch.")])


def gated_delta_rule_non_spec(a: Arguments) -> None:
    """The recurrence over q, k and v apart."""
    counts_of(a, "num_actual_tokens", "num_v_heads", "head_v_dim")
    rows = a["num_actual_tokens"]
    q = tensor(a, "q", "bfloat16", rows, None, None)
    k = tensor(a, "k", "bfloat16", *q.shape)
    v = tensor(a, "v", "bfloat16", rows, a["num_v_heads"], a["head_v_dim"])
    heads = Heads(q.shape[1], v.shape[1], q.shape[2], v.shape[2])
    b, gate = (tensor(a, name, "bfloat16", rows, heads.v_heads) for name in ("b", "a"))
    apart(a, "q", "k", "v", "b", "a")
    qkv = np.concatenate([to_numpy(x).reshape(rows, -1) for x in (q, k, v)], 1)
    _delta(a, heads, qkv, to_numpy(b), to_numpy(gate))


def gdn_attention(a: Arguments) -> None:
    """Conv and recurrence."""
    for name in ("spec_query_start_loc", "spec_token_indx", "spec_state_indices_tensor", "num_accepted_tokens"):
        require(a[name] is None, name, "none without speculation", a[name])
    for name in ("core_attn_out", "z"):
        tensor(a, name, "bfloat16", None, None, None)
    apart(a, "core_attn_out", "z")
    tensor(a, "ssm_state", "float32 bfloat16 float16", None, None, None, None, strided=True)
    heads, qkv, b, gate = _conv(a)
    _delta(a, heads, qkv, b, gate)
