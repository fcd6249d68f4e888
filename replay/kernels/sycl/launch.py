"""What every launch of ours asks: which device, and whether its inputs lie as device code reads them."""

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_ALIGN = 64  # bytes: a cache line, and the widest vector


def gathered(tensors: "Mapping[str, torch.Tensor]", left: Container[str]) -> "dict[str, torch.Tensor]":
    """Contiguous, aligned copies of the inputs that are not: device code reads rows without a stride, in vectors. Those named in
    ``left`` stay as they are: weights, which are contiguous in every layout, and tables, whose stride a kernel is told."""
    import torch

    return {
        n: t
        if n in left or (t.is_contiguous() and t.data_ptr() % _ALIGN == 0)
        else t.clone(memory_format=torch.contiguous_format)
        for n, t in tensors.items()
    }


def device_kind(weights: "Mapping[str, torch.Tensor]") -> str:
    """The kind of device to launch on: that of the weights; a stage without weights takes what this process began."""
    import torch

    if weights:
        return next(iter(weights.values())).device.type
    began = torch.xpu.is_initialized()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return "xpu" if began else "cpu"
