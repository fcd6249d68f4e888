"""Launch our GDN kernels: sizes, strides and modes as one structure; the arithmetic is in ``sycl/gdn.hpp``.

State tables are read by the stride from slot to slot that they have; a program is recorded for each pair of strides.
"""

import ctypes
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from replay.kernels.gathered import gathered
from replay.kernels.sycl.launch import device_kind
from replay.kernels.sycl.runtime import Program
from replay.model import Problem

if TYPE_CHECKING:
    import torch

    from replay.kernels.registry import Run

    Tensors = Mapping[str, torch.Tensor]

_NORMS = {"div_sqrt_eps_in": 0, "rsqrt_eps_in": 1, "eps_out": 2}
_SOFTPLUS = {"softplus_log": 0, "softplus_log1p": 1}
_STATES = {"f32": 0, "bf16": 1, "f16": 2}
_TABLES = ("conv_state", "ssm_state")
_CONV_BLOCK, _GPU_LANES = 256, 128  # gdn.cpp
_MOST_TAPS = 8
DIMS = (64, 128, 256)


class Sizes(ctypes.Structure):
    """``Gdn`` of gdn.hpp, field for field."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in (
            "k_heads", "v_heads", "ratio", "shift", "ratio_reciprocal", "width", "interleaved", "bias_first", "padding_z",
            "l2norm", "softplus", "state_type", "k_v",
        )),
        ("conv_stride", ctypes.c_int64), ("ssm_stride", ctypes.c_int64),
    )  # fmt: skip


def sizes_of(problem: Problem, strides: Mapping[str, int]) -> Sizes:
    """Everything a kernel is told; ``strides``: table → elements from slot to slot."""
    g, modes = problem.geometry, dict(problem.modes)
    if g.head_dim not in DIMS or g.conv_width > _MOST_TAPS:
        raise ValueError(
            f"head_dim, conv_width: expected one of {DIMS} and at most {_MOST_TAPS}, got {g.head_dim}, {g.conv_width}"
        )
    ratio = g.v_heads // g.k_heads
    return Sizes(
        k_heads=g.k_heads, v_heads=g.v_heads, ratio=ratio, shift=g.head_dim.bit_length() - 1, width=g.conv_width,
        ratio_reciprocal=-(-65536 // ratio), interleaved=modes.get("reorder_input") == "interleaved",
        bias_first=modes.get("conv_bias") == "bias_first", padding_z=modes.get("padding_z") == "written",
        l2norm=_NORMS[modes.get("l2norm", "div_sqrt_eps_in")], softplus=_SOFTPLUS[modes.get("softplus", "softplus_log")],
        state_type=_STATES[modes.get("ssm_state", "f32")], k_v=modes.get("state_layout") == "k_v",
        conv_stride=strides.get("conv_state", 0), ssm_stride=strides.get("ssm_state", 0),
    )  # fmt: skip


class Launches:
    """A program under construction for one problem, pair of strides and body (``cpu`` or ``gpu``)."""

    def __init__(self, problem: Problem, kind: str, body: str, strides: Mapping[str, int]) -> None:
        self.p, self.g, self.kind, self.body = problem, problem.geometry, kind, body
        self.modes = dict(problem.modes)
        self.batch = problem.rows if self.modes["batch"] == "decode" else int(self.modes["batch"])
        self.sizes = sizes_of(problem, strides)
        self.program = Program(kind)

    def _add(self, kernel: str, columns: int, lanes: int, *args: object) -> None:
        """Work-groups [sequences, columns], of one item on a CPU."""
        lanes = 1 if self.body == "cpu" else lanes
        source = "gdn" if self.body == "cpu" else "gdn_gpu"
        self.program.add(source, f"{kernel}_{self.body}", (self.batch, columns * lanes), (1, lanes), *args)

    def _bias(self) -> str | None:
        return None if self.modes["conv_bias"] == "off" else "conv_bias"

    def _scratch(self, width: int) -> "torch.Tensor":
        import torch

        return torch.empty((self.p.rows, width), dtype=torch.bfloat16, device=self.kind)

    def _by_dim(self, kernel: str) -> str:
        return kernel if self.body == "cpu" else f"{kernel}_{self.g.head_dim}"

    def _dt_bf16(self) -> ctypes.c_int32:
        return ctypes.c_int32(self.modes["dt_bias"] == "bf16")

    def conv(self, qkv: object = "qkv", b: object = "b", a: object = "a") -> None:
        """gdn.conv."""
        columns = self.g.conv_dim + self.g.v_heads * (self.g.head_dim + 2)
        args = ("qkvz", "ba", "conv_weights", self._bias(), "slots", "query_start_loc", "conv_state", qkv, "z", b, a, self.sizes)
        self._add("conv", -(-columns // _CONV_BLOCK), _CONV_BLOCK, *args)

    def recurrent(self, qkv: object = "qkv", b: object = "b", a: object = "a") -> None:
        """gdn.recurrent."""
        tensors = (qkv, a, b, "A_log", "dt_bias", "slots", "query_start_loc", "ssm_state", "core_attn_out")
        self._add(self._by_dim("recurrent"), self.g.v_heads, _GPU_LANES, *tensors, self.sizes, self._dt_bf16())

    def step_staged(self) -> None:
        """gdn.step in two launches."""
        qkv, b, a = self._scratch(self.g.conv_dim), self._scratch(self.g.v_heads), self._scratch(self.g.v_heads)
        self.conv(qkv, b, a)
        self.recurrent(qkv, b, a)

    def step_fused(self) -> None:
        """gdn.step in one."""
        args = (
            "qkvz", "ba", "conv_weights", self._bias(), "A_log", "dt_bias", "slots", "query_start_loc", "conv_state", "ssm_state",
            "z", "core_attn_out", self._scratch(self.g.conv_dim), self.sizes, self._dt_bf16(),
        )  # fmt: skip
        self._add(self._by_dim("step"), self.g.k_heads, _GPU_LANES, *args)


def _prepare(step: Callable[[Launches], None]) -> Callable[..., "Run"]:
    def prepare(problem: Problem, weights: "Tensors", body: str | None = None) -> "Run":
        kind = device_kind(weights)
        programs: dict[tuple[int, ...], Program] = {}
        tables = [t for t in _TABLES if problem.stage != ("gdn.recurrent" if t == "conv_state" else "gdn.conv")]

        def run(tensors: "Tensors") -> None:
            strides = tuple(tensors[t].stride(0) for t in tables)
            if strides not in programs:
                launches = Launches(
                    problem, kind, body or ("cpu" if kind == "cpu" else "gpu"), dict(zip(tables, strides, strict=True))
                )
                step(launches)
                programs[strides] = launches.program
            given = tensors if problem.layout == "contiguous" else gathered(tensors, tables)
            programs[strides].run(given)

        return run

    return prepare


prepare_conv = _prepare(Launches.conv)
prepare_recurrent = _prepare(Launches.recurrent)
prepare_step_staged = _prepare(Launches.step_staged)
prepare_step_fused = _prepare(Launches.step_fused)
