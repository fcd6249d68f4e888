"""Kernels that are not the contract's, to see what a chain makes of them: honest ones of another order, and a rounded beta.

    b70-replay chain --state qwen36-states-generated --stage gdn.recurrent --load bench/self/gdn_orders.py --kernel 'other:*'

Each is the eager kernel with one function changed.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from replay.kernels import eager_common, eager_gdn
from replay.model import Kernel, Problem

if TYPE_CHECKING:
    import torch

    T = torch.Tensor

SIGMOID = eager_common.sigmoid


def _changed(name: str, function: Callable[..., "T"]) -> Callable[..., Any]:
    def prepare(problem: Problem, weights: Any) -> Any:
        setattr(eager_gdn, name, function)  # in this child alone, which runs no other kernel
        return eager_gdn.prepare_recurrent(problem, weights)

    return prepare


def _serial(terms: "T") -> "T":
    """From the first term to the last."""
    return terms.cumsum(dim=-1)[..., -1]


def _fused(s: "T", d: "T", k: "T") -> "T":
    """S + d·k with one rounding."""
    return eager_common.fma(d[..., None].expand_as(s).contiguous(), k[:, :, None, :].expand_as(s).contiguous(), s)


def _rounded(b: "T") -> "T":
    return SIGMOID(b).bfloat16().float()


serial, fused, rounded = _changed("_over_k", _serial), _changed("outer_sum", _fused), _changed("sigmoid", _rounded)
KERNELS = [
    Kernel(id=f"other:gdn.recurrent:{name}", prepare=f":{prepare}", budgeted=True)
    for name, prepare in (("serial_sums", "serial"), ("fused_update", "fused"), ("beta_bf16", "rounded"))
]
