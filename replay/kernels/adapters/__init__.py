"""Operations of vllm-xpu-kernels and the stages that they run: one table of arguments, read from either side.

The provider ``xpu_kernels`` calls operations by it; an engine that calls one can be given a kernel of ours by the same table.
"""

from collections.abc import Mapping

from replay.kernels.adapters import gdn, moe, topk
from replay.kernels.adapters.binding import Binding, Is, arguments_of

__all__ = ["BINDINGS", "Binding", "Is", "arguments_of"]

BINDINGS: Mapping[str, Binding] = {b.name: b for b in (*moe.BINDINGS, *gdn.BINDINGS, *topk.BINDINGS)}
