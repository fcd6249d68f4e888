"""Launch our kernels of selection: chunks, strides and modes as one structure; the work is in ``sycl/topk*.cpp``.

Rows are read by the stride that they have, as a vocabulary that was padded leaves them.
"""

import ctypes
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from replay.kernels.sycl.launch import device_kind
from replay.kernels.sycl.runtime import Program
from replay.model import Problem

if TYPE_CHECKING:
    import torch

    from replay.kernels.registry import Run

    Tensors = Mapping[str, torch.Tensor]

_TYPES = {"f32": 0, "bf16": 1}
_GPU_LANES = 256  # topk_gpu.cpp
_KEYS = 8192  # of a chunk, which a GPU keeps in local memory: 32 KiB
_DIGITS = 256
_GREEDY_COLUMNS = 4096
_COLUMNS_A_CANDIDATE = 16  # of a CPU's chunk at least, or joining the chunks outweighs what they save
i32 = ctypes.c_int32


class Selection(ctypes.Structure):
    """``Selection`` of topk.hpp, field for field."""

    _fields_ = (
        ("stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("columns", "chunk", "chunks", "kept", "type", "next_n")),
    )


def selection_of(problem: Problem, stride: int, columns: int, chunk: int) -> Selection:
    """Rows of ``columns`` logits, ``stride`` apart, in chunks."""
    modes = dict(problem.modes)
    chunk = min(chunk, columns)
    return Selection(
        stride=stride, columns=columns, chunk=chunk, chunks=-(-columns // chunk), kept=int(modes.get("k", "1")),
        type=_TYPES[modes["logits"]], next_n=int(modes.get("next_n", "1")),
    )  # fmt: skip


def _cpu_chunk(rows: int, columns: int, k: int) -> int:
    """Columns of a chunk: a chunk a core, fewer where each leaves many candidates."""
    chunks = min(len(os.sched_getaffinity(0)) // rows, columns // (_COLUMNS_A_CANDIDATE * k))
    return -(-columns // max(chunks, 1))


class Launches:
    """One program for a problem, a stride and a body (``cpu`` or ``gpu``)."""

    def __init__(self, problem: Problem, kind: str, body: str, logits: "torch.Tensor") -> None:
        self.p, self.kind, self.body = problem, kind, body
        self.rows, self.columns = logits.shape
        self.stride = logits.stride(0)
        self.program = Program(kind)

    def _add(self, kernel: str, gpu_chunk: int, tensors: tuple[object, ...], *args: object) -> None:
        """Work-groups [rows, chunks], of one item on a CPU."""
        import torch

        cpu = self.body == "cpu"
        chunk = _cpu_chunk(self.rows, self.columns, int(dict(self.p.modes).get("k", "1"))) if cpu else gpu_chunk
        s = selection_of(self.p, self.stride, self.columns, chunk)
        found = torch.empty(self.rows * s.chunks * s.kept, dtype=torch.int64, device=self.kind)
        arrived = torch.zeros(self.rows, dtype=torch.int32, device=self.kind)
        lanes = 1 if cpu else _GPU_LANES
        source = "topk" if cpu else "topk_gpu"
        self.program.add(
            source, f"{kernel}_{self.body}", (self.rows, s.chunks * lanes), (1, lanes), *tensors, found, arrived, s, *args
        )

    def greedy(self) -> None:
        """topk.greedy."""
        tensors = ("logits", "slots", "token", "next_input_ids")
        self._add("greedy", _GREEDY_COLUMNS, tensors, i32(self.p.mode("index") == "i64"))

    def select(self) -> None:
        """topk.rows."""
        local = () if self.body == "cpu" else (range(4 * (_DIGITS + _KEYS)),)
        self._add("select", _KEYS, ("logits", "seq_lens", "indices"), *local)


def _prepare(step: Callable[[Launches], None]) -> Callable[..., "Run"]:
    def prepare(problem: Problem, weights: "Tensors", body: str | None = None) -> "Run":
        kind = device_kind(weights)
        programs: dict[int, Program] = {}

        def run(tensors: "Tensors") -> None:
            stride = tensors["logits"].stride(0)
            if stride not in programs:
                launches = Launches(problem, kind, body or ("cpu" if kind == "cpu" else "gpu"), tensors["logits"])
                step(launches)
                programs[stride] = launches.program
            programs[stride].run(tensors)

        return run

    return prepare


prepare_greedy = _prepare(Launches.greedy)
prepare_select = _prepare(Launches.select)
