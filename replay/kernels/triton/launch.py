"""What every launch in Triton asks: views that device code reads, sizes, and the one option that all results rest on."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def launched(kernel: Any, grid: Sequence[int], *args: object, warps: int = 4) -> None:
    """Launch without contraction of products and sums."""
    kernel[tuple(grid)](*args, num_warps=warps, enable_fp_fusion=False)


def bits(tensor: "torch.Tensor") -> "torch.Tensor":
    """A bf16 tensor as int16: device code widens and rounds bits by itself."""
    import torch

    return tensor.view(torch.int16)


def words(tensor: "torch.Tensor") -> "torch.Tensor":
    """An int8 tensor as words of four codes."""
    import torch

    return tensor.view(torch.int32)


def power_of_two(size: int) -> int:
    """The least power of two that holds so many."""
    return 1 << (size - 1).bit_length()


@functools.cache
def _processors(index: int) -> int:
    import torch

    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def processors(tensor: "torch.Tensor") -> int:
    """How many multiprocessors a tensor's CUDA device has."""
    return _processors(tensor.device.index)


