"""Provider ``sycl``: our SYCL kernels, compiled at run time for the device at hand. One line registers a variant."""

from replay.kernels.modes import WIDE, of_stage
from replay.model import Kernel

NEEDS = ("python:torch", "dist:intel-sycl-rt", "dist:dpctl", "command:g++")
_PACK = "replay.kernels.sycl.moe:pack_rows"


def _kernel(id_: str, function: str, launches: int, summary: str, prepack: str | None = None) -> Kernel:
    return Kernel(
        id=f"sycl:{id_}", prepare=f"replay.kernels.sycl.moe:{function}", devices=("cpu", "xpu"), needs=NEEDS,
        launches=launches, summary=summary, prepack=prepack, rests_on=("sub_groups",), modes=of_stage(id_.partition(":")[0]),
    )  # fmt: skip


def _matrix(stage: str, function: str) -> Kernel:
    return Kernel(
        id=f"sycl:{stage}:matrix", prepare=f"replay.kernels.sycl.moe:{function}", devices=("xpu",),
        prepack="replay.kernels.sycl.moe:pack_matrix", needs=(*NEEDS, "aspect:matrix"), launches=1, rests_on=("matrix",),
        modes=of_stage(stage),
        summary="the matrix engine (dpas), weights packed four along K",
    )  # fmt: skip


def _wide(id_: str, function: str, launches: int, summary: str) -> Kernel:
    return Kernel(
        id=f"sycl:{id_}", prepare=f"replay.kernels.sycl.moe_wide:{function}", devices=("cpu", "xpu"), needs=NEEDS,
        launches=launches, summary=summary, rests_on=("sub_groups",), modes=(*WIDE, ("combine_fma", ("off",))), budgeted=True,
    )  # fmt: skip


def _gdn(id_: str, function: str, launches: int, summary: str) -> Kernel:
    return Kernel(
        id=f"sycl:{id_}", prepare=f"replay.kernels.sycl.gdn:{function}", devices=("cpu", "xpu"), needs=NEEDS, launches=launches,
        summary=summary, rests_on=("sub_groups",),
    )  # fmt: skip


def _topk(id_: str, function: str, summary: str) -> Kernel:
    return Kernel(
        id=f"sycl:{id_}", prepare=f"replay.kernels.sycl.topk:{function}", devices=("cpu", "xpu"), needs=NEEDS, launches=1,
        summary=summary, rests_on=("sub_groups",),
    )  # fmt: skip


KERNELS = (
    _kernel("moe.quantize:rows", "prepare_quantize", 1, "a work-group a row"),
    _kernel("moe.route:fused_prologue", "prepare_route_fused", 1, "one work-group counts, prefixes and places"),
    _kernel("moe.route:zero_remap", "prepare_route_zero_remap", 2, "zeroed counters, then arrival by atomics"),
    _kernel("moe.route:prefix_offsets", "prepare_route_prefix", 3, "an item an expert counts and places"),
    _kernel("moe.remap:rows", "prepare_remap", 1, "a work-group a (token, slot) pair"),
    _kernel("moe.gemm1:rows", "prepare_gemm1_rows", 1, "items over rows; the expert by bisection", _PACK),
    _kernel("moe.gemm1:offsets", "prepare_gemm1_offsets", 1, "items over all experts; idle ones leave", _PACK),
    _kernel("moe.gemm1:active_offsets", "prepare_gemm1_active_offsets", 2, "items over a list of active experts", _PACK),
    _kernel("moe.gemm1:topk_direct", "prepare_gemm1_topk_direct", 1, "items over pairs; the expert is the pair's id", _PACK),
    _matrix("moe.gemm1", "prepare_gemm1_matrix"),
    _kernel("moe.act_quant:fused", "prepare_act_quant", 1, "activation and quantisation in one pass"),
    _kernel("moe.act_quant:two_step", "prepare_act_quant_two_step", 2, "activation into f32 scratch, then quantisation"),
    _kernel("moe.gemm2:rows", "prepare_gemm2_rows", 1, "items over rows; the expert by bisection", _PACK),
    _kernel("moe.gemm2:offsets", "prepare_gemm2_offsets", 1, "items over all experts; idle ones leave", _PACK),
    _kernel("moe.gemm2:active_offsets", "prepare_gemm2_active_offsets", 2, "items over a list of active experts", _PACK),
    _kernel("moe.gemm2:topk_direct", "prepare_gemm2_topk_direct", 1, "items over pairs; the expert is the pair's id", _PACK),
    _matrix("moe.gemm2", "prepare_gemm2_matrix"),
    _kernel("moe.combine:rows", "prepare_combine", 1, "a work-group a token and 512 columns"),
    _kernel("moe.shared:staged", "prepare_shared", 5, "one expert for all tokens, staged, and its gate", _PACK),
    _kernel("moe.middle:staged", "prepare_middle_staged", 3, "gemm1, act_quant, gemm2", _PACK),
    _kernel("moe.middle:layerlet", "prepare_middle_layerlet", 1, "a work-group takes its rows through all three", _PACK),
    _kernel("moe.layer:staged", "prepare_layer_staged", 7, "every stage a launch", _PACK),
    _kernel(
        "moe.layer:fused_prologue_offsets", "prepare_layer_fused_prologue_offsets", 5, "one-launch prologue, staged middle", _PACK
    ),
    _kernel("moe.layer:active_offsets", "prepare_layer_active_offsets", 7, "one-launch prologue, active experts only", _PACK),
    _kernel("moe.layer:full_layerlet", "prepare_layer_full_layerlet", 2, "all up to the combine in one launch", _PACK),
    _wide("moe.layer:bf16", "prepare_layer", 2, "up to the activation, and the rest; nothing quantised"),
    _gdn("gdn.conv:channels", "prepare_conv", 1, "a work-group a sequence and 256 channels"),
    _gdn("gdn.recurrent:heads", "prepare_recurrent", 1, "a work-group a sequence and v-head"),
    _gdn("gdn.step:staged", "prepare_step_staged", 2, "conv, then recurrence"),
    _gdn("gdn.step:fused", "prepare_step_fused", 1, "a work-group a sequence and k-head does both, the state in registers"),
    _topk("topk.greedy:single_pass", "prepare_greedy", "a work-group a chunk of a row; the last one hands the token over"),
    _topk("topk.rows:select", "prepare_select", "a work-group selects of a chunk of a row; the last one joins them"),
)
