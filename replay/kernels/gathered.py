"""Inputs as device code reads them: contiguous, and aligned."""

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
