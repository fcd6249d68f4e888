"""Our own probe of the int8 peak: one expert's grouped GEMM over enough rows that arithmetic, not memory, takes the time."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from replay.devices import Device
from replay.kernels.sycl import moe
from replay.model import Geometry, Problem

if TYPE_CHECKING:
    from replay.kernels.probes import Probe

ROWS, HIDDEN, INTER = 64, 1024, 256


def probes(device: Device) -> Iterator["Probe"]:
    """The matrix engine's kernel where there is one, else the kernel of plain dot products."""
    import torch

    from replay.kernels.probes import Probe
    from replay.kernels.registry import missing

    geometry = Geometry.parse(f"qwen36:tp4:hidden={HIDDEN},experts=1,top_k=1,inter={INTER}")
    problem = Problem("moe.gemm1", geometry, ROWS, (("bias", "off"), ("epilogue", "row_then_col")))
    matrix = missing("aspect:matrix") is None
    pack, prepare = (moe.pack_matrix, "prepare_gemm1_matrix") if matrix else (moe.pack_rows, "prepare_gemm1_rows")

    def made(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=device.name)

    weights = pack(problem, {"w13": made((1, HIDDEN, 2 * INTER), torch.int8), "w13_scale": made((1, 2 * INTER), torch.float32)})
    tensors = {
        **weights, "a": made((ROWS, HIDDEN), torch.int8), "a_scale": made((ROWS,), torch.float32),
        "offsets": torch.tensor([0, ROWS], dtype=torch.int64, device=device.name),
        "gate_up": made((ROWS, 2 * INTER), torch.bfloat16),
    }  # fmt: skip
    run = getattr(moe, prepare)(problem, weights)
    yield Probe("int8", f"sycl {prepare.removeprefix('prepare_')}", 2 * ROWS * HIDDEN * 2 * INTER, 4, lambda: run(tensors))
