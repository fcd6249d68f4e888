"""Provider ``sycl``: our SYCL kernels, compiled at run time for the device at hand."""

from replay.model import Kernel

NEEDS = ("python:torch", "dist:intel-sycl-rt", "dist:dpctl", "command:g++")

KERNELS = (
    Kernel(
        id="sycl:moe.gemm1:rows",
        prepare="replay.kernels.sycl.moe:prepare_gemm1_rows",
        prepack="replay.kernels.sycl.moe:pack_rows",
        devices=("cpu", "xpu"),
        needs=NEEDS,
        launches=1,
        graph_safe=True,
        summary="one work-item (cpu) or sub-group (gpu) an output, weights packed [E, N, K]",
    ),
)
