"""Launch the GDN kernels in Triton: grids, strides and modes; the arithmetic is in ``device/gdn.py``."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from replay.kernels.triton.device import gdn as device
from replay.kernels.triton.launch import bits, floats, launched, once, prepared
from replay.model import Problem

if TYPE_CHECKING:
    import torch

    T = torch.Tensor
    Tensors = Mapping[str, T]

CONV_BLOCK = 256
ROWS, WARPS = 16, 2  # of V in a program: many small ones keep memory busy where there are few sequences
_TABLES = ("conv_state", "ssm_state")


class Steps:
    """The launches of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.p, self.g, self.modes = problem, problem.geometry, dict(problem.modes)
        if self.g.head_dim % 32:
            raise ValueError(f"head_dim: expected a multiple of 32, got {self.g.head_dim}")
        self.kept: dict[str, T] = {}

    def scratch(self, name: str, like: "T", width: int) -> "T":
        """bf16 [rows, width], kept."""
        import torch

        return once(self.kept, name, lambda: torch.empty((self.p.rows, width), dtype=torch.bfloat16, device=like.device))

    def conv(self, t: "Tensors", qkv: "T", b: "T", a: "T") -> None:
        """gdn.conv."""
        g, modes, state, weights = self.g, self.modes, t["conv_state"], t["conv_weights"]
        columns = g.conv_dim + g.v_heads * (g.head_dim + 2)
        bias = t.get("conv_bias", weights)
        launched(
            device.conv, (self.p.rows, -(-columns // CONV_BLOCK)), *(bits(x) for x in (t["qkvz"], t["ba"], weights, bias)),
            t["slots"], bits(state), state.stride(0), *(bits(x) for x in (qkv, t["z"], b, a)), g.k_heads, g.v_heads, g.head_dim,
            g.conv_width, modes["conv_bias"], modes["reorder_input"] == "interleaved", modes["padding_z"] == "written",
            CONV_BLOCK, )  # fmt: skip

    def recurrent(self, t: "Tensors", qkv: "T", b: "T", a: "T", rows: int = ROWS, warps: int = WARPS) -> None:
        """gdn.recurrent."""
        import numpy as np

        g, modes, state, dt_bias = self.g, self.modes, t["ssm_state"], t["dt_bias"]
        launched(
            device.recurrent, (g.head_dim // rows, g.v_heads, self.p.rows), *(bits(x) for x in (qkv, a, b)), t["A_log"],
            floats(dt_bias), t["slots"], floats(state), state.stride(0),
            bits(t["core_attn_out"]), g.k_heads, g.v_heads, g.head_dim, modes["l2norm"], modes["softplus"] == "softplus_log1p",
            modes["dt_bias"] == "bf16", modes["ssm_state"] == "bf16", modes["state_layout"] == "k_v", rows,
            float(np.float32(g.head_dim**-0.5)), warps=warps,
        )  # fmt: skip

    def step(self, t: "Tensors") -> None:
        """gdn.step in two launches."""
        like = t["qkvz"]
        qkv = self.scratch("qkv", like, self.g.conv_dim)
        b, a = self.scratch("b", like, self.g.v_heads), self.scratch("a", like, self.g.v_heads)
        self.conv(t, qkv, b, a)
        self.recurrent(t, qkv, b, a)


_prepare = partial(prepared, Steps, _TABLES)


prepare_conv_channels = _prepare(lambda s, t: s.conv(t, t["qkv"], t["b"], t["a"]))
prepare_recurrent_rows = _prepare(lambda s, t: s.recurrent(t, t["qkv"], t["b"], t["a"]))
prepare_step_staged = _prepare(Steps.step)
