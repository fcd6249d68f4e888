"""The MoE operations: as released, and the fork's int8."""

import numpy as np
import torch

from replay.oracle import moe as moe_oracle
from replay.oracle import moe_wide as wide_oracle
from replay.oracle.moe import ExpertRows
from replay.oracle.quant import quantize
from replay.session.buffers import to_numpy, to_torch
from tests.fakes.arguments import Arguments, apart, counts_of, fill, number, require, tensor

EXPERTS, INTER = 8, 24  # of the tests' layers: what an operation is told and its tensors do not show


def _table(w: torch.Tensor) -> ExpertRows:
    rows = to_numpy(w)
    return ExpertRows(len(rows), np.arange(len(rows)), rows)


def remap_hidden_states(a: Arguments) -> None:
    """Counts, places, and rows in their order; the caller has zeroed the counters."""
    counts_of(a, "total_experts_num", "local_experts_num")
    tokens, hidden = tensor(a, "hidden_states", "bfloat16 float16", None, None).shape
    ids = tensor(a, "topk_ids", "int32 int64", tokens, None)
    moved = tensor(a, "remapped_hidden_states", str(a["hidden_states"].dtype).removeprefix("torch."), ids.numel(), hidden)
    counts = tensor(a, "rows_per_expert", "int32", a["local_experts_num"])
    places = tensor(a, "unpermuted_row_to_permuted_row", "int32", tokens, ids.shape[1])
    for name in ("hidden_states_scales", "remapped_hidden_states_scales"):
        require(a[name] is None, name, "none for 16-bit rows", a[name])
    mapped = a["expert_map"]
    if mapped is None:
        number(a, "local_experts_num", a["total_experts_num"])
    else:
        mapped = to_numpy(tensor(a, "expert_map", "int32", a["total_experts_num"]))
        require(mapped.max() < a["local_experts_num"], "expert_map", f"ids under {a['local_experts_num']}", mapped.max())
    require(int(counts.count_nonzero()) == 0, "rows_per_expert", "zeros", "counts of another call")
    require(int(ids.max()) < a["total_experts_num"] and int(ids.min()) >= -1, "topk_ids", "expert ids", "others")
    apart(a, "topk_ids", "unpermuted_row_to_permuted_row", "rows_per_expert")
    found, _, permuted = moe_oracle.route(to_numpy(ids).astype(np.int32), a["local_experts_num"], mapped)
    fill(counts, found, "i32")
    fill(places, permuted, "i32")
    for token, row in np.argwhere(permuted >= 0):
        moved[permuted[token, row]] = a["hidden_states"][token]


def moe_gather(a: Arguments) -> None:
    """The weighted sum over slots."""
    counts_of(a, "num_experts")
    out = tensor(a, "output", "bfloat16", None, None)
    tokens, hidden = out.shape
    weights = tensor(a, "topk_weights", "float32", tokens, None)
    y = tensor(a, "moe_output", "bfloat16", weights.numel(), hidden)
    places = tensor(a, "unpermuted_row_to_permuted_row", "int32", *weights.shape)
    require(int(places.max()) < len(y), "unpermuted_row_to_permuted_row", f"rows under {len(y)}", int(places.max()))
    number(a, "num_experts", EXPERTS)
    fill(out, moe_oracle.combine(to_numpy(y), to_numpy(places), to_numpy(weights), "off"), "bf16")


def per_token_quant_int8_xpu_out(a: Arguments) -> None:
    """A row's codes and scale, half away from zero."""
    x = tensor(a, "x", "bfloat16", None, None)
    q, scale = tensor(a, "q", "int8", *x.shape), tensor(a, "scales", "float32", len(x))
    codes, scales = quantize(to_numpy(x.float()), "recip_half_away")
    fill(q, codes, "i8")
    fill(scale, scales, "f32")


def silu_and_mul_quant_int8_xpu_out(a: Arguments) -> None:
    """The activation, rounded twice, and its codes."""
    q = tensor(a, "q", "int8", None, None)
    x, scale = tensor(a, "x", "bfloat16", len(q), 2 * q.shape[1]), tensor(a, "scales", "float32", len(q))
    codes, scales = moe_oracle.act_quant(to_numpy(x), "silu_round_twice", "recip_half_away")
    fill(q, codes, "i8")
    fill(scale, scales, "f32")


def silu_and_mul(a: Arguments) -> None:
    """The activation of 16-bit rows."""
    result = tensor(a, "result", "bfloat16", None, None)
    x = tensor(a, "input", "bfloat16", len(result), 2 * result.shape[1])
    fill(result, wide_oracle.activate(to_numpy(x), "silu_round_twice"), "bf16")


def _sizes(a: Arguments, dtype: str) -> tuple[torch.Tensor, torch.Tensor, ExpertRows | None]:
    """(rows, output, bias) of a grouped product whose numbers are those of its weights [E, K, N]."""
    counts_of(a, "N", "K", "num_experts")
    experts, depth, width = tensor(a, "ptr_B", dtype, None, None, None).shape
    rows = tensor(a, "ptr_A", dtype, None, depth)
    out = tensor(a, "ptr_D", "bfloat16", len(rows), width)
    bias = None if a["ptr_bias"] is None else _table(tensor(a, "ptr_bias", "float32", experts, width))
    for name, want in (("N", width), ("K", depth), ("num_experts", experts)):
        number(a, name, want)
    return rows, out, bias


def _begins(a: Arguments, offsets: np.ndarray) -> np.ndarray:
    """Where each expert's rows begin, and the last one's end."""
    right = len(offsets) == len(a["ptr_B"]) + 1 and (np.diff(offsets) >= 0).all()
    require(bool(right), "offsets", "ascending, one more than experts", offsets.shape)
    require(offsets[-1] <= len(a["ptr_A"]), "offsets", f"at most {len(a['ptr_A'])} rows", offsets[-1])
    return offsets


def _counted(a: Arguments, experts: int) -> np.ndarray:
    """The same of how many rows each expert has."""
    counts = to_numpy(tensor(a, "rows_per_expert", "int32", experts))
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


def grouped_16bit(a: Arguments) -> torch.Tensor:
    """Rows of each expert counted, nothing quantised."""
    rows, out, bias = _sizes(a, "bfloat16")
    for name in ("ptr_A_scale", "ptr_B_scale"):
        require(a[name] is None, name, "none for 16-bit rows", a[name])
    fill(
        out, wide_oracle.grouped_gemm(to_numpy(rows), _begins(a, _counted(a, a["num_experts"])), _table(a["ptr_B"]), bias), "bf16"
    )
    return out


def _grouped(a: Arguments, offsets: np.ndarray) -> torch.Tensor:
    rows, out, bias = _sizes(a, "int8")
    tensor(a, "ptr_A_scales", "float32", len(rows))
    tensor(a, "ptr_B_scales", "float32", len(a["ptr_B"]), out.shape[1])
    tables = _table(a["ptr_B"]), _table(a["ptr_B_scales"])
    y = moe_oracle.grouped_gemm(
        to_numpy(rows), to_numpy(a["ptr_A_scales"]), _begins(a, offsets), *tables, "row_then_col", bias
    )  # fmt: skip
    fill(out, y, "bf16")
    return out


def _experts(a: Arguments) -> int:
    return len(tensor(a, "ptr_B", "int8", None, None, None))


def grouped(a: Arguments) -> torch.Tensor:
    """Rows of each expert counted."""
    return _grouped(a, _counted(a, _experts(a)))


def grouped_offsets(a: Arguments) -> torch.Tensor:
    """Where each expert's rows begin."""
    return _grouped(a, to_numpy(tensor(a, "expert_first_token_offset", "int64", _experts(a) + 1)))


def grouped_active(a: Arguments) -> torch.Tensor:
    """The same, and which experts have any."""
    counts_of(a, "num_active_experts")
    active = to_numpy(tensor(a, "active_expert_ids", "int32", a["num_active_experts"]))
    offsets = to_numpy(tensor(a, "expert_first_token_offset", "int64", _experts(a) + 1))
    require(np.array_equal(np.flatnonzero(np.diff(offsets)), active), "active_expert_ids", "the experts that have rows", active)
    return _grouped(a, offsets)


def grouped_topk8(a: Arguments) -> torch.Tensor:
    """Each pair's expert by its id."""
    ids = to_numpy(tensor(a, "topk_ids", "int32", None, None))
    places = to_numpy(tensor(a, "unpermuted_row_to_permuted_row", "int32", *ids.shape))
    require(ids.min() >= -1 and ids.max() < _experts(a), "topk_ids", f"ids under {_experts(a)}", ids.max())
    counts, offsets, _ = moe_oracle.route(ids, _experts(a))
    owners = np.repeat(np.arange(len(counts)), counts)
    here = places >= 0
    require(np.array_equal(here, ids >= 0), "unpermuted_row_to_permuted_row", "a place for every id", "others")
    right = bool((places[here] < len(owners)).all()) and np.array_equal(owners[places[here]], ids[here])
    require(right, "unpermuted_row_to_permuted_row", "places grouped by expert", "others")
    return _grouped(a, offsets)


def int8_gemm_w8a8(a: Arguments) -> torch.Tensor:
    """One dense product."""
    depth, width = tensor(a, "B", "int8", None, None).shape
    rows = tensor(a, "A", "int8", None, depth)
    row, column = tensor(a, "A_scale", "float32", len(rows)), tensor(a, "B_scale", "float32", width)
    require(a["out_dtype"] == torch.bfloat16, "out_dtype", "bfloat16", a["out_dtype"])
    bias = None if a["bias"] is None else to_numpy(tensor(a, "bias", "float32", width))
    acc = moe_oracle.int8_matmul(to_numpy(rows), to_numpy(a["B"]))
    return to_torch(moe_oracle.epilogue(acc, to_numpy(row), to_numpy(column), "row_then_col", bias), "bf16")


def fused_moe_prologue(a: Arguments) -> None:
    """Offsets and places, each in its part of the workspace."""
    counts_of(a, "hidden_size", "inter_size", "ep_rank", "ep_size", "num_experts_on_rank")
    tokens = len(tensor(a, "input", "int8", None, a["hidden_size"]))
    tensor(a, "input_scales", "float32", tokens)
    ids = tensor(a, "token_selected_experts", "int64", tokens, None)
    tensor(a, "token_final_scales", "float32", *ids.shape)
    for name, want in (("ep_rank", 0), ("ep_size", 1), ("inter_size", INTER), ("num_experts_on_rank", EXPERTS)):
        number(a, name, want)
    experts, pairs = a["num_experts_on_rank"], ids.numel()
    block = 32 * max(1, 1 << (-(-experts // 32) - 1).bit_length())  # a test has few tokens: one block of them
    require(block >= experts and tokens <= block, "num_experts_on_rank", f"at most {block}", experts)
    sizes = [4 * pairs] * 3 + [4 * experts] * 2 + [4 * experts * tokens, 8 * (experts + 1), 4 * pairs, pairs * a["hidden_size"]]
    begins = np.cumsum([0] + [-(-size // 256) * 256 for size in sizes])
    room = tensor(a, "workspace", "uint8", int(begins[-1]))
    _, offsets, permuted = moe_oracle.route(to_numpy(ids).astype(np.int32), experts)
    for part, value in ((2, permuted), (6, offsets)):
        found = torch.from_numpy(np.ascontiguousarray(value).view(np.uint8).ravel())
        room[begins[part] : begins[part] + len(found)].copy_(found)
