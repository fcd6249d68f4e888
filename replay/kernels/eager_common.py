"""What the eager kernels of every family are made of: how one is registered, and the contract's arithmetic in torch's operations.

exp and roundings go through f64, since torch's own in f32 are not correctly rounded.
"""

from typing import TYPE_CHECKING

from replay.kernels.modes import Modes
from replay.model import Kernel

if TYPE_CHECKING:
    import torch

    T = torch.Tensor


def eager_kernel(stage: str, module: str, function: str, *, graph_safe: bool = False, modes: Modes = ()) -> Kernel:
    """One kernel of the provider, which runs wherever torch does."""
    return Kernel(
        id=f"eager:{stage}", prepare=f"{module}:{function}", devices=("cpu", "xpu", "cuda"), needs=("python:torch",),
        graph_safe=graph_safe, modes=modes, summary="plain torch operations",
    )  # fmt: skip


def round_half_away(x: "T") -> "T":
    """C ``roundf``; the half is added in f64."""
    import torch

    wide = x.double()
    return torch.copysign(torch.trunc(wide.abs() + 0.5), wide).float()


def exp_cr(x: "T") -> "T":
    """exp in f64, rounded once to f32."""
    return x.double().exp().float()


def sigmoid(x: "T") -> "T":
    """1 / (1 + exp(−x)); a tensor over a tensor, since torch turns a scalar over one into a product."""
    import torch

    return torch.ones_like(x) / (1 + exp_cr(-x))


def fma(a: "T", b: "T", c: "T") -> "T":
    """a·b + c rounded once: the exact f64 product, the f64 sum rounded to odd, then to f32."""
    import torch

    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    nudge = torch.isfinite(error) & (error != 0) & ((total.view(torch.int64) & 1) == 0)
    towards = torch.where(error > 0, torch.inf, -torch.inf).to(total.dtype)
    return torch.where(nudge, torch.nextafter(total, towards), total).float()


def strided32_tree(terms: "T") -> "T":
    """Sum f32 [R, K] over K: 32 lanes, each over every 32nd term in order, then folded by halves."""
    import torch

    rows, depth = terms.shape
    padded = torch.nn.functional.pad(terms, (0, -depth % 32)).reshape(rows, -1, 32)
    lanes = torch.zeros(rows, 32, dtype=torch.float32, device=terms.device)
    for step in range(padded.shape[1]):
        lanes = lanes + padded[:, step]
    for half in (16, 8, 4, 2, 1):
        lanes = lanes[:, :half] + lanes[:, half : 2 * half]
    return lanes[:, 0]
