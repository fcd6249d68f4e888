"""What every launch in Triton asks: views that device code reads, sizes, and the one option that all results rest on."""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from replay.kernels.gathered import gathered
from replay.model import Problem

if TYPE_CHECKING:
    import torch

    from replay.kernels.registry import Prepare, Run


EARLY = True  # a benchmark asks what it brings


def launched(kernel: Any, grid: Sequence[int], *args: Any, warps: int = 4) -> None:
    """Launch without contraction of products and sums. The last thing a kernel is told is whether it runs on CUDA: there it is
    launched while the one before still runs, for which it waits by itself (``device.arith.begin``)."""
    cuda = on_cuda(args[0])
    options = {"launch_pdl": True} if cuda and EARLY else {}
    kernel[tuple(grid)](*args, cuda, num_warps=warps, enable_fp_fusion=False, **options)


def prepared(
    steps: Callable[[Problem], Any], left: Container[str], step: "Callable[[Any, Mapping[str, torch.Tensor]], None]"
) -> "Prepare":
    """A kernel's prepare: what ``steps`` makes of a problem takes ``step`` in each call; inputs contiguous, but for ``left``."""

    def prepare(problem: Problem, weights: "Mapping[str, torch.Tensor]") -> "Run":
        made, strided = steps(problem), problem.layout != "contiguous"

        def run(tensors: "Mapping[str, torch.Tensor]") -> None:
            step(made, gathered(tensors, left) if strided else tensors)

        return run

    return prepare


def once(kept: "dict[str, torch.Tensor]", name: str, make: "Callable[[], torch.Tensor]") -> "torch.Tensor":
    """A buffer by name, made in the first call that asks for it."""
    if name not in kept:
        kept[name] = make()
    return kept[name]


def bits(tensor: "torch.Tensor") -> "torch.Tensor":
    """A bf16 tensor as int16: device code widens and rounds bits by itself."""
    import torch

    return tensor.view(torch.int16)


def floats(tensor: "torch.Tensor") -> "torch.Tensor":
    """Floats as device code reads them: bf16 by its bits."""
    import torch

    return bits(tensor) if tensor.dtype == torch.bfloat16 else tensor


def words(tensor: "torch.Tensor") -> "torch.Tensor":
    """An int8 tensor as words of four codes."""
    import torch

    return tensor.view(torch.int32)


def on_cuda(tensor: "torch.Tensor") -> bool:
    """Whether device code may use what CUDA alone has."""
    return tensor.is_cuda
