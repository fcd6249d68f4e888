"""Operations of vllm-xpu-kernels that are nobody's kernels: registered under the same schemas, computed by the oracles, and strict.

A fake looks at every argument as the library's text describes it: dtype, shape, stride, counters that the caller zeroes, numbers that
must agree with the tensors beside them. What is wrong is refused with the argument's name. So an adapter that confuses two of them is
seen without a card.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from replay.kernels.adapters import BINDINGS
from replay.oracle import gdn as gdn_oracle
from replay.oracle import moe as moe_oracle
from replay.oracle import moe_wide as wide_oracle
from replay.oracle import router as router_oracle
from replay.oracle import topk as topk_oracle
from replay.oracle.gdn import Heads, Modes
from replay.oracle.moe import ExpertRows
from replay.oracle.quant import quantize
from replay.session.buffers import to_numpy, to_torch

Arguments = Mapping[str, Any]
EXPERTS, INTER = 8, 24  # of the tests' layers: what an operation is told and its tensors do not show


class Refused(ValueError):
    """An argument that is not what the schema's text says."""


def _is(condition: bool, name: str, expected: str, got: object) -> None:
    if not condition:
        raise Refused(f"{name}: expected {expected}, got {got}")


def _tensor(a: Arguments, name: str, dtypes: str, *shape: int | None, strided: bool = False) -> torch.Tensor:
    """An argument of one of these dtypes and this shape, None being any extent; contiguous unless its first stride may be larger."""
    t = a[name]
    _is(isinstance(t, torch.Tensor), name, "a tensor", type(t).__name__)
    _is(str(t.dtype).removeprefix("torch.") in dtypes.split(), name, dtypes, t.dtype)
    _is(t.dim() == len(shape), name, f"{len(shape)} dimensions", t.dim())
    for extent, want in zip(t.shape, shape, strict=True):
        _is(want is None or extent == want, name, f"shape {shape}", tuple(t.shape))
    _is((t[0] if strided else t).is_contiguous(), name, "contiguous" + (" rows" if strided else ""), t.stride())
    return t


def _number(a: Arguments, name: str, want: object) -> None:
    _is(a[name] == want and type(a[name]) is type(want), name, repr(want), repr(a[name]))


def _counts(a: Arguments, *names: str) -> None:
    """Numbers, and not below zero."""
    for name in names:
        _is(type(a[name]) is int and a[name] >= 0, name, "a number", a[name])


def _apart(a: Arguments, *names: str) -> None:
    """No two of these are one tensor."""
    seen: dict[int, str] = {}
    for name in names:
        at = a[name].data_ptr()
        _is(at not in seen or not a[name].numel(), name, f"memory apart from {seen.get(at)}", "the same")
        seen[at] = name


def _fill(t: torch.Tensor, value: Any, dtype: str) -> None:
    """Write the rows that an oracle gave."""
    made = to_torch(np.ascontiguousarray(value), dtype)
    t[: len(made)].copy_(made.view(t[: len(made)].shape))


# ---------------------------------------------------------------- MoE


def _table(w: torch.Tensor) -> ExpertRows:
    rows = to_numpy(w)
    return ExpertRows(len(rows), np.arange(len(rows)), rows)


def remap_hidden_states(a: Arguments) -> None:
    """Counts, places, and rows in their order; the caller has zeroed the counters."""
    _counts(a, "total_experts_num", "local_experts_num")
    tokens, hidden = _tensor(a, "hidden_states", "bfloat16 float16", None, None).shape
    ids = _tensor(a, "topk_ids", "int32 int64", tokens, None)
    moved = _tensor(a, "remapped_hidden_states", str(a["hidden_states"].dtype).removeprefix("torch."), ids.numel(), hidden)
    counts = _tensor(a, "rows_per_expert", "int32", a["local_experts_num"])
    places = _tensor(a, "unpermuted_row_to_permuted_row", "int32", tokens, ids.shape[1])
    for name in ("hidden_states_scales", "remapped_hidden_states_scales"):
        _is(a[name] is None, name, "none for 16-bit rows", a[name])
    mapped = a["expert_map"]
    if mapped is None:
        _number(a, "local_experts_num", a["total_experts_num"])
    else:
        mapped = to_numpy(_tensor(a, "expert_map", "int32", a["total_experts_num"]))
        _is(mapped.max() < a["local_experts_num"], "expert_map", f"ids under {a['local_experts_num']}", mapped.max())
    _is(int(counts.count_nonzero()) == 0, "rows_per_expert", "zeros", "counts of another call")
    _is(int(ids.max()) < a["total_experts_num"] and int(ids.min()) >= -1, "topk_ids", "expert ids", "others")
    _apart(a, "topk_ids", "unpermuted_row_to_permuted_row", "rows_per_expert")
    found, _, permuted = moe_oracle.route(to_numpy(ids).astype(np.int32), a["local_experts_num"], mapped)
    _fill(counts, found, "i32")
    _fill(places, permuted, "i32")
    for token, row in np.argwhere(permuted >= 0):
        moved[permuted[token, row]] = a["hidden_states"][token]


def moe_gather(a: Arguments) -> None:
    """The weighted sum over slots."""
    _counts(a, "num_experts")
    out = _tensor(a, "output", "bfloat16", None, None)
    tokens, hidden = out.shape
    weights = _tensor(a, "topk_weights", "float32", tokens, None)
    y = _tensor(a, "moe_output", "bfloat16", weights.numel(), hidden)
    places = _tensor(a, "unpermuted_row_to_permuted_row", "int32", *weights.shape)
    _is(int(places.max()) < len(y), "unpermuted_row_to_permuted_row", f"rows under {len(y)}", int(places.max()))
    _number(a, "num_experts", EXPERTS)
    _fill(out, moe_oracle.combine(to_numpy(y), to_numpy(places), to_numpy(weights), "off"), "bf16")


def per_token_quant_int8_xpu_out(a: Arguments) -> None:
    """A row's codes and scale, half away from zero."""
    x = _tensor(a, "x", "bfloat16", None, None)
    q, scale = _tensor(a, "q", "int8", *x.shape), _tensor(a, "scales", "float32", len(x))
    codes, scales = quantize(to_numpy(x.float()), "recip_half_away")
    _fill(q, codes, "i8")
    _fill(scale, scales, "f32")


def silu_and_mul_quant_int8_xpu_out(a: Arguments) -> None:
    """The activation, rounded twice, and its codes."""
    q = _tensor(a, "q", "int8", None, None)
    x, scale = _tensor(a, "x", "bfloat16", len(q), 2 * q.shape[1]), _tensor(a, "scales", "float32", len(q))
    codes, scales = moe_oracle.act_quant(to_numpy(x), "silu_round_twice", "recip_half_away")
    _fill(q, codes, "i8")
    _fill(scale, scales, "f32")


def silu_and_mul(a: Arguments) -> None:
    """The activation of 16-bit rows."""
    result = _tensor(a, "result", "bfloat16", None, None)
    x = _tensor(a, "input", "bfloat16", len(result), 2 * result.shape[1])
    _fill(result, wide_oracle.activate(to_numpy(x), "silu_round_twice"), "bf16")


def grouped_16bit(a: Arguments) -> torch.Tensor:
    """Rows of each expert counted, nothing quantised."""
    _counts(a, "N", "K", "num_experts")
    experts, depth, width = _tensor(a, "ptr_B", "bfloat16", None, None, None).shape
    rows = _tensor(a, "ptr_A", "bfloat16", None, depth)
    out = _tensor(a, "ptr_D", "bfloat16", len(rows), width)
    bias = None if a["ptr_bias"] is None else _table(_tensor(a, "ptr_bias", "float32", experts, width))
    for name, want in (("N", width), ("K", depth), ("num_experts", experts)):
        _number(a, name, want)
    for name in ("ptr_A_scale", "ptr_B_scale"):
        _is(a[name] is None, name, "none for 16-bit rows", a[name])
    counts = to_numpy(_tensor(a, "rows_per_expert", "int32", experts))
    offsets = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
    _is(counts.min() >= 0 and offsets[-1] <= len(rows), "rows_per_expert", f"at most {len(rows)} rows", offsets[-1])
    _fill(out, wide_oracle.grouped_gemm(to_numpy(rows), offsets, _table(a["ptr_B"]), bias), "bf16")
    return out


def _weights(a: Arguments) -> tuple[int, int, int]:
    """(experts, K, N)."""
    experts, depth, width = _tensor(a, "ptr_B", "int8", None, None, None).shape
    return experts, depth, width


def _grouped(a: Arguments, offsets: np.ndarray) -> torch.Tensor:
    experts, depth, width = _weights(a)
    rows = _tensor(a, "ptr_A", "int8", None, depth)
    _tensor(a, "ptr_A_scales", "float32", len(rows))
    _tensor(a, "ptr_B_scales", "float32", experts, width)
    out = _tensor(a, "ptr_D", "bfloat16", len(rows), width)
    bias = None if a["ptr_bias"] is None else _table(_tensor(a, "ptr_bias", "float32", experts, width))
    for name, want in (("N", width), ("K", depth), ("num_experts", experts)):
        _number(a, name, want)
    _is(
        len(offsets) == experts + 1 and (np.diff(offsets) >= 0).all(),
        "offsets",
        "ascending, one more than experts",
        offsets.shape,
    )
    _is(offsets[-1] <= len(rows), "offsets", f"at most {len(rows)} rows", offsets[-1])
    tables = _table(a["ptr_B"]), _table(a["ptr_B_scales"])
    y = moe_oracle.grouped_gemm(to_numpy(rows), to_numpy(a["ptr_A_scales"]), offsets, *tables, "row_then_col", bias)
    _fill(out, y, "bf16")
    return out


def grouped(a: Arguments) -> torch.Tensor:
    """Rows of each expert counted."""
    counts = to_numpy(_tensor(a, "rows_per_expert", "int32", _weights(a)[0]))
    return _grouped(a, np.concatenate(([0], np.cumsum(counts, dtype=np.int64))))


def grouped_offsets(a: Arguments) -> torch.Tensor:
    """Where each expert's rows begin."""
    return _grouped(a, to_numpy(_tensor(a, "expert_first_token_offset", "int64", _weights(a)[0] + 1)))


def grouped_active(a: Arguments) -> torch.Tensor:
    """The same, and which experts have any."""
    _counts(a, "num_active_experts")
    active = to_numpy(_tensor(a, "active_expert_ids", "int32", a["num_active_experts"]))
    offsets = to_numpy(_tensor(a, "expert_first_token_offset", "int64", _weights(a)[0] + 1))
    _is(np.array_equal(np.flatnonzero(np.diff(offsets)), active), "active_expert_ids", "the experts that have rows", active)
    return _grouped(a, offsets)


def grouped_topk8(a: Arguments) -> torch.Tensor:
    """Each pair's expert by its id."""
    ids = to_numpy(_tensor(a, "topk_ids", "int32", None, None))
    places = to_numpy(_tensor(a, "unpermuted_row_to_permuted_row", "int32", *ids.shape))
    _is(ids.min() >= -1 and ids.max() < _weights(a)[0], "topk_ids", f"ids under {_weights(a)[0]}", ids.max())
    counts, offsets, _ = moe_oracle.route(ids, _weights(a)[0])
    owners = np.repeat(np.arange(len(counts)), counts)
    here = places >= 0
    _is(np.array_equal(here, ids >= 0), "unpermuted_row_to_permuted_row", "a place for every id", "others")
    right = bool((places[here] < len(owners)).all()) and np.array_equal(owners[places[here]], ids[here])
    _is(right, "unpermuted_row_to_permuted_row", "places grouped by expert", "others")
    return _grouped(a, offsets)


def int8_gemm_w8a8(a: Arguments) -> torch.Tensor:
    """One dense product."""
    depth, width = _tensor(a, "B", "int8", None, None).shape
    rows = _tensor(a, "A", "int8", None, depth)
    row, column = _tensor(a, "A_scale", "float32", len(rows)), _tensor(a, "B_scale", "float32", width)
    _is(a["out_dtype"] == torch.bfloat16, "out_dtype", "bfloat16", a["out_dtype"])
    bias = None if a["bias"] is None else to_numpy(_tensor(a, "bias", "float32", width))
    acc = moe_oracle.int8_matmul(to_numpy(rows), to_numpy(a["B"]))
    return to_torch(moe_oracle.epilogue(acc, to_numpy(row), to_numpy(column), "row_then_col", bias), "bf16")


def fused_moe_prologue(a: Arguments) -> None:
    """Offsets and places, each in its part of the workspace."""
    _counts(a, "hidden_size", "inter_size", "ep_rank", "ep_size", "num_experts_on_rank")
    tokens = len(_tensor(a, "input", "int8", None, a["hidden_size"]))
    _tensor(a, "input_scales", "float32", tokens)
    ids = _tensor(a, "token_selected_experts", "int64", tokens, None)
    _tensor(a, "token_final_scales", "float32", *ids.shape)
    for name, want in (("ep_rank", 0), ("ep_size", 1), ("inter_size", INTER), ("num_experts_on_rank", EXPERTS)):
        _number(a, name, want)
    experts, pairs = a["num_experts_on_rank"], ids.numel()
    block = 32 * max(1, 1 << (-(-experts // 32) - 1).bit_length())  # a test has few tokens: one block of them
    _is(block >= experts and tokens <= block, "num_experts_on_rank", f"at most {block}", experts)
    sizes = [4 * pairs] * 3 + [4 * experts] * 2 + [4 * experts * tokens, 8 * (experts + 1), 4 * pairs, pairs * a["hidden_size"]]
    begins = np.cumsum([0] + [-(-size // 256) * 256 for size in sizes])
    room = _tensor(a, "workspace", "uint8", int(begins[-1]))
    _, offsets, permuted = moe_oracle.route(to_numpy(ids).astype(np.int32), experts)
    for part, value in ((2, permuted), (6, offsets)):
        found = torch.from_numpy(np.ascontiguousarray(value).view(np.uint8).ravel())
        room[begins[part] : begins[part] + len(found)].copy_(found)


# ---------------------------------------------------------------- GDN


def _decode(a: Arguments) -> tuple[np.ndarray, np.ndarray]:
    """(slots, starts) of a batch of one token a sequence."""
    _counts(a, "num_prefills", "num_decodes", "num_spec_decodes", "num_actual_tokens", "tp_size")
    slots = _tensor(a, "non_spec_state_indices_tensor", "int32", a["num_decodes"])
    starts = _tensor(a, "non_spec_query_start_loc", "int32", len(slots) + 1)
    for name, want in (("num_prefills", 0), ("num_spec_decodes", 0), ("num_actual_tokens", len(slots)), ("tp_size", 1)):
        _number(a, name, want)
    for name in ("has_initial_state", "non_spec_token_indx"):
        _is(a[name] is None, name, "none in decode", a[name])
    _is(starts.tolist() == list(range(len(slots) + 1)), "non_spec_query_start_loc", "one token a sequence", starts.tolist())
    return to_numpy(slots), to_numpy(starts)


def _projections(a: Arguments) -> tuple[Heads, str]:
    """(heads, order) of the projected states, all of them looked at."""
    _counts(a, "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
    heads = Heads(a["num_k_heads"], a["num_v_heads"], a["head_k_dim"], a["head_v_dim"])
    _is(heads.k_heads > 0, "num_k_heads", "some", heads.k_heads)
    _is(heads.v_heads % heads.k_heads == 0, "num_v_heads", f"a multiple of {heads.k_heads}", heads.v_heads)
    rows, taps = a["num_actual_tokens"], _tensor(a, "conv_weights", "bfloat16", None, None).shape[-1]
    _number(a, "activation", "silu")
    _is(type(a["reorder_input"]) is bool, "reorder_input", "a flag", a["reorder_input"])
    _tensor(a, "projected_states_qkvz", "bfloat16", rows, heads.conv_dim + heads.v_heads * heads.v_dim)
    _tensor(a, "projected_states_ba", "bfloat16", rows, 2 * heads.v_heads)
    _tensor(a, "conv_weights", "bfloat16", heads.conv_dim, taps)
    _tensor(a, "conv_state", "bfloat16", None, taps - 1, heads.conv_dim, strided=True)
    _tensor(a, "z", "bfloat16", rows, heads.v_heads, heads.v_dim)
    if a["conv_bias"] is not None:
        _tensor(a, "conv_bias", "bfloat16", heads.conv_dim)
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
    _fill(a["z"], z, "bf16")
    _fill(a["conv_state"], state, "bf16")
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
    _tensor(a, "A_log", "float32", heads.v_heads)
    _tensor(a, "dt_bias", "float32 bfloat16", heads.v_heads)
    state = _tensor(a, "ssm_state", "float32 bfloat16 float16", None, heads.v_heads, heads.v_dim, heads.k_dim, strided=True)
    out = _tensor(a, "core_attn_out", "bfloat16", len(qkv), heads.v_heads, heads.v_dim)
    o, after = gdn_oracle.recurrent(
        qkv, gate, b, to_numpy(a["A_log"]), to_numpy(a["dt_bias"]), to_numpy(state), slots, starts, to_numpy(out), heads,
        Modes("div_sqrt_eps_in", "softplus_log", "v_k"),
    )  # fmt: skip
    _fill(out, o, "bf16")
    _fill(state, after, {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[str(state.dtype).removeprefix("torch.")])


def gated_delta_rule_non_spec(a: Arguments) -> None:
    """The recurrence over q, k and v apart."""
    _counts(a, "num_actual_tokens", "num_v_heads", "head_v_dim")
    rows = a["num_actual_tokens"]
    q = _tensor(a, "q", "bfloat16", rows, None, None)
    k = _tensor(a, "k", "bfloat16", *q.shape)
    v = _tensor(a, "v", "bfloat16", rows, a["num_v_heads"], a["head_v_dim"])
    heads = Heads(q.shape[1], v.shape[1], q.shape[2], v.shape[2])
    b, gate = (_tensor(a, name, "bfloat16", rows, heads.v_heads) for name in ("b", "a"))
    _apart(a, "q", "k", "v", "b", "a")
    qkv = np.concatenate([to_numpy(x).reshape(rows, -1) for x in (q, k, v)], 1)
    _delta(a, heads, qkv, to_numpy(b), to_numpy(gate))


def gdn_attention(a: Arguments) -> None:
    """Conv and recurrence."""
    for name in ("spec_query_start_loc", "spec_token_indx", "spec_state_indices_tensor", "num_accepted_tokens"):
        _is(a[name] is None, name, "none without speculation", a[name])
    for name in ("core_attn_out", "z"):
        _tensor(a, name, "bfloat16", None, None, None)
    _apart(a, "core_attn_out", "z")
    _tensor(a, "ssm_state", "float32 bfloat16 float16", None, None, None, None, strided=True)
    heads, qkv, b, gate = _conv(a)
    _delta(a, heads, qkv, b, gate)


# ---------------------------------------------------------------- selection


def top_k_per_row_decode(a: Arguments) -> None:
    """The k largest of a row's valid columns."""
    _counts(a, "next_n", "numRows", "stride0", "stride1", "topK")
    logits = _tensor(a, "logits", "float32", a["numRows"], None, strided=True)
    for name, want in (("stride0", logits.stride(0)), ("stride1", 1)):
        _number(a, name, want)
    _is(a["next_n"] >= 1 and a["numRows"] % a["next_n"] == 0, "next_n", f"a divisor of {a['numRows']}", a["next_n"])
    lengths = _tensor(a, "seq_lens", "int32", a["numRows"] // a["next_n"])
    indices = _tensor(a, "indices", "int32", a["numRows"], a["topK"])
    valid = topk_oracle.valid_columns(to_numpy(lengths), a["next_n"], len(logits), logits.shape[1])
    _fill(indices, topk_oracle.rows(topk_oracle.canonical(to_numpy(logits)), valid, a["topK"]), "i32")


def topk_softmax(a: Arguments) -> None:
    """The k largest of a softmax, and which of the expanded rows each is: slot · tokens + token."""
    x = _tensor(a, "gating_output", "float32 bfloat16", None, None)
    weights = _tensor(a, "topk_weights", "float32", len(x), None)
    ids, expanded = (_tensor(a, name, "int32", *weights.shape) for name in ("topk_indices", "token_expert_indices"))
    _is(weights.shape[1] <= x.shape[1], "topk_weights", f"at most {x.shape[1]} columns", weights.shape[1])
    _is(type(a["renormalize"]) is bool, "renormalize", "a flag", a["renormalize"])
    bias = None if a["bias"] is None else to_numpy(_tensor(a, "bias", "float32", x.shape[1]))
    padding = None if a["is_padding"] is None else _tensor(a, "is_padding", "bool", len(x)).numpy()
    _apart(a, "topk_indices", "token_expert_indices")
    p, chosen = router_oracle.route(to_numpy(x.float()), bias, padding, weights.shape[1], renormalize=a["renormalize"])
    _fill(weights, p, "f32")
    _fill(ids, chosen, "i32")
    _fill(expanded, np.arange(chosen.size, dtype=np.int32).reshape(chosen.shape[::-1]).T, "i32")


FAKES: Mapping[str, Callable[[Arguments], Any]] = {
    "_moe_C::remap_hidden_states": remap_hidden_states,
    "_moe_C::moe_gather": moe_gather,
    "_xpu_C::per_token_quant_int8_xpu_out": per_token_quant_int8_xpu_out,
    "_xpu_C::silu_and_mul_quant_int8_xpu_out": silu_and_mul_quant_int8_xpu_out,
    "_xpu_C::cutlass_grouped_gemm_w8a8_int8_interface": grouped,
    "_xpu_C::cutlass_grouped_gemm_w8a8_int8_offsets_interface": grouped_offsets,
    "_xpu_C::cutlass_grouped_gemm_w8a8_int8_active_offsets_interface": grouped_active,
    "_xpu_C::cutlass_grouped_gemm_w8a8_int8_topk8_gemm1_interface": grouped_topk8,
    "_C::silu_and_mul": silu_and_mul,
    "_xpu_C::cutlass_grouped_gemm_interface": grouped_16bit,
    "_xpu_C::int8_gemm_w8a8": int8_gemm_w8a8,
    "_moe_C::fused_moe_prologue": fused_moe_prologue,
    "_xpu_C::causal_conv1d_non_spec": causal_conv1d_non_spec,
    "_xpu_C::gated_delta_rule_non_spec": gated_delta_rule_non_spec,
    "_xpu_C::gdn_attention": gdn_attention,
    "_C::top_k_per_row_decode": top_k_per_row_decode,
    "_moe_C::topk_softmax": topk_softmax,
}


@contextlib.contextmanager
def library(schemas: Mapping[str, str] | None = None) -> Iterator[list[dict[str, Any]]]:
    """The fakes as torch operations on a CPU while it lasts; the arguments of each call are kept. ``schemas`` replaces some."""
    calls: list[dict[str, Any]] = []
    texts = {b.op: b.schema for b in BINDINGS.values()} | dict(schemas or {})
    spaces = {op.partition("::")[0] for op in FAKES}
    libraries = {space: torch.library.Library(space, "FRAGMENT") for space in spaces}
    try:
        for op, fake in FAKES.items():
            space, _, name = op.partition("::")
            libraries[space].define(name + texts[op])
            names = [a.name for a in torch._C.parse_schema(op + texts[op]).arguments]
            libraries[space].impl(name, _recorded(fake, names, calls), "CPU")
        yield calls
    finally:
        for one in libraries.values():
            one._destroy()


def _recorded(fake: Callable[[Arguments], Any], names: list[str], calls: list[dict[str, Any]]) -> Callable[..., Any]:
    def run(*given: Any, **named: Any) -> Any:
        arguments = dict(zip(names, given, strict=False)) | named
        calls.append(arguments)
        return fake(arguments)

    return run
