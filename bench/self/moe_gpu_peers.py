"""vLLM's fused MoE kernel in Triton, W8A8, as a kernel of ours on CUDA: judged to the bit, timed like any other.

    VLLM_FUSED_MOE=…/vllm/model_executor/layers/fused_moe/fused_moe.py
    b70-replay run --load bench/self/moe_gpu_peers.py --device cuda --launch graph …
    python bench/self/moe_gpu_peers.py    # which tiles are best on this device, of 72

The kernel is taken out of the file that the variable names, so vLLM itself need not be installed. Around it stand our own
kernels for what vLLM does in others (quantisation, activation, the sum over slots); they are launched early, and vLLM's is not:
it would have to wait by itself. Each pair is a block of its own, as vLLM has it where pairs are sparse among experts.
"""

import ast
import functools
import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from replay import cache
from replay.errors import InputError
from replay.kernels.registry import import_file
from replay.model import Kernel, Problem

if TYPE_CHECKING:
    import torch

    T = torch.Tensor
    Tensors = Mapping[str, T]
    Run = Callable[[Tensors], None]

KERNELS = (
    Kernel(
        id="vllm:moe.layer:triton", prepare=":prepare_layer", devices=("cuda",),
        needs=("python:triton", "variable:VLLM_FUSED_MOE"),
        modes=(("epilogue", ("row_then_col",)), ("combine_fma", ("off",)), ("shared", ("off",))), layouts=("contiguous",),
        graph_safe=True, prepack="replay.kernels.triton.moe:pack",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Tile:
    """How vLLM's kernel cuts a product."""

    columns: int
    depth: int
    warps: int
    stages: int


SPARSITY = 4  # pairs are sparse where so many times their number are no more than there are experts
SEARCHED = tuple(Tile(*t) for t in itertools.product((32, 64, 128), (64, 128, 256), (4, 8), (2, 3, 4, 5)))
# (depth, width) of a product → the best of SEARCHED on an H200, as this file's command found them; others take the first.
BEST: dict[tuple[int, int], Tile] = {
    (2048, 256): Tile(columns=32, depth=256, warps=4, stages=4),  # 5.41 µs, the worst of 72 30.3
    (128, 2048): Tile(columns=32, depth=64, warps=4, stages=3),  # 3.68 µs, the worst of 48 4.8
    (2048, 1024): Tile(columns=32, depth=256, warps=4, stages=4),  # 7.73 µs, the worst of 72 30.5
    (512, 2048): Tile(columns=64, depth=64, warps=4, stages=5),  # 5.53 µs, the worst of 72 9.8
}


@functools.cache
def fused_moe_kernel() -> Any:
    """vLLM's kernel, from its own file: what that imports is not asked for, only functions for the device are taken.

    InputError where the variable names no such file.
    """
    file, wanted = os.environ.get("VLLM_FUSED_MOE", ""), ("write_zeros_to_output", "fused_moe_kernel")
    try:
        source = Path(file).read_text()
    except OSError:
        raise InputError("VLLM_FUSED_MOE", "value", "vLLM's file fused_moe.py", repr(file)) from None
    if any(f"def {name}(" not in source for name in wanted):
        raise InputError(file, "VLLM_FUSED_MOE", f"a file with {' and '.join(wanted)}", "none")
    parts = [
        ast.get_source_segment(source, node)
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name in wanted
    ]
    module = cache.folder() / "peers" / "vllm_fused_moe_kernel.py"
    module.parent.mkdir(parents=True, exist_ok=True)
    jitted = "\n\n".join(f"@triton.jit\n{part}" for part in parts)
    cache.write(module, f"import triton\nimport triton.language as tl\n\n{jitted}\n".encode())
    return import_file(str(module)).fused_moe_kernel


def product(a: "T", a_scale: "T", ids: "T", w: "T", w_scale: "T", out: "T", alike: int, tile: Tile, count: "T") -> None:
    """Each pair's row, ``alike`` of them the same one, against its expert's weights [E, N, K] → bf16 [P, N]."""
    import triton
    import triton.language as tl

    pairs, (_, width, depth), rows = ids.numel(), w.shape, 16
    fused_moe_kernel()[(pairs * triton.cdiv(width, tile.columns),)](
        a, w, out, None, a_scale, w_scale, None, None, ids, count, width, depth, pairs * rows, pairs, a.stride(0), 1, w.stride(0),
        1, w.stride(1), out.stride(0), 1, 1, 0, w_scale.stride(0), 0, 1, 0, 0, group_n=0, group_k=0, naive_block_assignment=True,
        BLOCK_SIZE_M=rows, BLOCK_SIZE_N=tile.columns, BLOCK_SIZE_K=tile.depth, GROUP_SIZE_M=1, SPLIT_K=1, MUL_ROUTED_WEIGHT=False,
        top_k=alike, compute_type=tl.bfloat16, use_fp8_w8a8=False, use_int8_w8a8=True, use_int8_w8a16=False,
        per_channel_quant=True, HAS_BIAS=False, SWAP_AB=False, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def prepare_layer(problem: Problem, weights: "Tensors") -> "Run":
    """moe.layer in five launches: our staged one, with vLLM's kernel for both products."""
    from replay.kernels.triton.moe import Steps

    class Theirs(Steps):
        """Pairs stay where they are, so a place is a pair's number."""

        def gemm(
            self, a: "T", a_scale: "T", ids: "T", permuted: "T", t: "Tensors", weight: str, out: "T", alike: int = 1
        ) -> None:
            """The best tile that is known."""
            w, count = t[weight], self.whole(a, ids.numel() * 16)  # blocks: vLLM's kernel reads their number from memory
            product(a, a_scale, ids, w, t[f"{weight}_scale"], out, alike, BEST.get((w.shape[2], w.shape[1]), SEARCHED[0]), count)

    steps = Theirs(problem)
    return lambda t: steps.layer_staged(t, t["out"])


# ---------------------------------------------------------------- which tiles are best


def main(experts: int = 256, top_k: int = 8) -> None:
    """The products of one token at TP4 and TP1 over 32 disjoint sets of experts; a line each, as ``BEST`` wants it.

    A tile deeper than the product is none.
    """
    import torch

    from bench.self.gpu import graph_us

    count = torch.tensor([top_k * 16], device="cuda")
    for depth, width in ((2048, 256), (128, 2048), (2048, 1024), (512, 2048)):
        w = torch.randint(-127, 128, (experts, width, depth), dtype=torch.int8, device="cuda")
        scale = torch.rand(experts, width, device="cuda")
        a, a_scale = torch.randint(-127, 128, (top_k, depth), dtype=torch.int8, device="cuda"), torch.rand(top_k, device="cuda")
        out = torch.empty(top_k, width, dtype=torch.bfloat16, device="cuda")
        sets = torch.arange(experts, dtype=torch.int32, device="cuda").view(-1, top_k)
        times = {
            tile: median(graph_us([partial(product, a, a_scale, ids, w, scale, out, 1, tile, count) for ids in sets], 10))
            for tile in SEARCHED
            if tile.depth <= depth
        }
        best = min(times, key=lambda tile: times[tile])
        print(
            f"    ({depth}, {width}): {best},  # {times[best]:.2f} µs, the worst of {len(times)} {max(times.values()):.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
