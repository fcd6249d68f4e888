"""Provider ``triton``: kernels in Triton for CUDA and XPU. Where TRITON_INTERPRET=1 is set, a CPU interprets them: right, and
slow."""

import os
from collections.abc import Iterator

from replay.kernels.modes import W8A8, Modes
from replay.model import Kernel

NEEDS = ("python:torch", "python:triton")
_PACK = "replay.kernels.triton.moe:pack"
_INT8: Modes = (("combine_fma", ("off",)), *W8A8)
_DECODE: Modes = (("batch", ("decode",)),)


def kernels() -> tuple[Kernel, ...]:
    """The provider's kernels; asked for rather than kept, since an interpreter adds a device."""
    interpreted = ("cpu",) if os.environ.get("TRITON_INTERPRET") == "1" else ()
    return tuple(_kernels(("cuda", "xpu", *interpreted)))


def _kernels(devices: tuple[str, ...]) -> Iterator[Kernel]:
    def kernel(id_: str, launches: int, summary: str, modes: Modes = (), prepack: str | None = None) -> Kernel:
        family, _, rest = id_.partition(".")
        return Kernel(
            id=f"triton:{id_}", prepare=f"replay.kernels.triton.{family}:prepare_{rest.replace(':', '_')}", devices=devices,
            needs=NEEDS, launches=launches, summary=summary, prepack=prepack, graph_safe=True, modes=modes,
        )  # fmt: skip

    yield kernel("moe.quantize:rows", 1, "a program a row", _INT8)
    yield kernel("moe.route:count", 1, "a pair's place is how many others come before it", _INT8)
    yield kernel("moe.remap:pairs", 1, "a program a pair", _INT8)
    yield kernel("moe.gemm1:row_dot", 1, "a program a pair and some columns; four codes a word", _INT8, _PACK)
    yield kernel("moe.act_quant:rows", 1, "a program a row", _INT8)
    yield kernel("moe.gemm2:row_dot", 1, "a program a pair and some columns; four codes a word", _INT8, _PACK)
    yield kernel("moe.combine:columns", 1, "a program a token and some columns", _INT8)
    yield kernel("moe.middle:staged", 3, "gemm1, act_quant, gemm2", _INT8, _PACK)
    yield kernel("moe.shared:staged", 5, "one expert for all tokens, staged, and its gate", _INT8, _PACK)
    yield kernel("moe.layer:staged", 5, "quantise, gemm1, act_quant, gemm2, combine; no permutation", _INT8, _PACK)
    yield kernel("moe.layer:halves", 2, "up to the activation, and the rest; each program quantises for itself", _INT8, _PACK)
    yield kernel("gdn.conv:channels", 1, "a program a token and some channels", _DECODE)
    yield kernel("gdn.recurrent:rows", 1, "a program a token, v-head and some rows of its state", _DECODE)
    yield kernel("gdn.step:staged", 2, "conv, then recurrence", _DECODE)
    yield kernel("topk.greedy:single_pass", 1, "a program a chunk of a row; the last one hands the token over")
    yield kernel("topk.router:rows", 1, "a program a row: softmax, then one of the k largest after the other")
    yield kernel("topk.rows:groups", 4, "no key below the k-th of the groups' largest is chosen")
