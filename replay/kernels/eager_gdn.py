"""Provider ``eager``, the GDN stages: plain torch operations in the contract's order, one token of every sequence at a time.

exp, log and square roots go through f64, since torch's own in f32 are not correctly rounded; a square root in f64 rounds to the
right f32. What is long in a sequence is asked of the device, so no graph of it can be captured.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from replay.kernels.eager_common import eager_kernel, exp_cr, sigmoid, strided32_tree
from replay.model import Geometry, Problem

if TYPE_CHECKING:
    import torch

    from replay.kernels.registry import Run

    T = torch.Tensor
    Tensors = Mapping[str, T]

EPS = 1e-6
SOFTPLUS_LINEAR = 20


KERNELS = (
    eager_kernel("gdn.conv", __name__, "prepare_conv"),
    eager_kernel("gdn.recurrent", __name__, "prepare_recurrent"),
    eager_kernel("gdn.step", __name__, "prepare_step"),
)


# ---------------------------------------------------------------- sequences


def live(slots: "T", starts: "T") -> "T":
    """The sequences that have a slot and any token, as indices."""
    return ((slots >= 0) & (starts[1:] > starts[:-1])).nonzero()[:, 0]


def turns(starts: "T", sequences: "T") -> "Iterator[tuple[T, T]]":
    """(which of ``sequences`` have an n-th token, its row) for n = 0, 1, …"""
    first, length = starts[:-1][sequences].long(), (starts[1:] - starts[:-1])[sequences]
    for n in range(int(length.max()) if len(length) else 0):
        chosen = (length > n).nonzero()[:, 0]
        yield chosen, first[chosen] + n


# ---------------------------------------------------------------- operations


def split_qkvz(qkvz: "T", g: Geometry, order: str) -> "tuple[T, T]":
    """[T, conv_dim + Hv·V] → (q|k|v [T, conv_dim], z [T, Hv, V])."""
    import torch

    rows = len(qkvz)
    if order == "contiguous":
        return qkvz[:, : g.conv_dim], qkvz[:, g.conv_dim :].reshape(rows, g.v_heads, g.head_dim)
    width = g.v_heads // g.k_heads * g.head_dim
    parts = torch.split(qkvz.reshape(rows, g.k_heads, -1), [g.head_dim, g.head_dim, width, width], dim=2)
    q, k, v, z = (part.reshape(rows, -1) for part in parts)
    return torch.cat([q, k, v], dim=1), z.reshape(rows, g.v_heads, g.head_dim)


def split_ba(ba: "T", g: Geometry, order: str) -> "tuple[T, T]":
    """[T, 2·Hv] → (b, a) [T, Hv]."""
    if order == "contiguous":
        return ba[:, : g.v_heads], ba[:, g.v_heads :]
    grouped = ba.reshape(len(ba), g.k_heads, 2, -1)
    return grouped[:, :, 0].reshape(len(ba), -1), grouped[:, :, 1].reshape(len(ba), -1)


def softplus(x: "T", mode: str) -> "T":
    """x above 20, else the log in f64."""
    import torch

    e = exp_cr(x)
    low = (1 + e).double().log().float() if mode == "softplus_log" else e.double().log1p().float()
    return torch.where(x > SOFTPLUS_LINEAR, x, low)


def l2norm(x: "T", mode: str) -> "T":
    """x f32 [..., K] over its length."""
    import torch

    total = _over_k(x * x)[..., None]
    if mode == "rsqrt_eps_in":
        root = (total + EPS).double().sqrt()
        return x * (torch.ones_like(root) / root).float()
    if mode == "div_sqrt_eps_in":
        return x / (total + EPS).double().sqrt().float()
    return x / (total.double().sqrt().float() + EPS)


def conv(x: "T", weight: "T", bias: "T | None", state: "T", slots: "T", starts: "T", out: "T", bias_order: str) -> None:
    """x [T, D] through the states of its sequences into ``out``, both written in place."""
    import torch

    w = weight.float()
    sequences = live(slots, starts)
    at = slots[sequences].long()
    window = state[at]  # [n, W−1, D], the oldest first
    for chosen, rows in turns(starts, sequences):
        held = torch.cat([window[chosen], x[rows][:, None]], dim=1)
        r = torch.zeros_like(held[:, 0], dtype=torch.float32)
        if bias is not None and bias_order == "bias_first":
            r = r + bias.float()
        for tap in range(w.shape[1]):
            r = r + held[:, tap].float() * w[:, tap]
        if bias is not None and bias_order == "bias_last":
            r = r + bias.float()
        out[rows] = (r / (1 + exp_cr(-r))).bfloat16()
        window[chosen] = held[:, 1:]
    state[at] = window


def recurrent(qkv: "T", a: "T", b: "T", t: "Tensors", state: "T", out: "T", g: Geometry, modes: Mapping[str, str]) -> None:
    """qkv [T, conv_dim] through the states of its sequences into ``out``, both written in place."""
    import torch

    width = g.k_heads * g.head_dim
    parts = torch.split(qkv, [width, width, g.v_heads * g.head_dim], dim=1)
    q, k, v = (part.reshape(len(qkv), -1, g.head_dim).float() for part in parts)
    ratio = g.v_heads // g.k_heads
    q = of_v_heads(l2norm(q, modes["l2norm"]) * g.head_dim**-0.5, ratio)
    k = of_v_heads(l2norm(k, modes["l2norm"]), ratio)
    spread = softplus(a.float() + t["dt_bias"].float(), modes["softplus"])
    keep, beta = exp_cr(-exp_cr(t["A_log"]) * spread), sigmoid(b.float())
    sequences = live(t["slots"], t["query_start_loc"])
    at = t["slots"][sequences].long()
    v_k = modes["state_layout"] == "v_k"
    held = state[at].float() if v_k else state[at].float().transpose(2, 3)
    for chosen, rows in turns(t["query_start_loc"], sequences):
        s = held[chosen] * keep[rows][:, :, None, None]
        d = (v[rows] - _over_k(s * k[rows][:, :, None, :])) * beta[rows][:, :, None]
        s = outer_sum(s, d, k[rows])
        out[rows] = _over_k(s * q[rows][:, :, None, :]).bfloat16()
        held[chosen] = s
    state[at] = (held if v_k else held.transpose(2, 3)).to(state.dtype)


def of_v_heads(x: "T", ratio: int) -> "T":
    """[T, Hk, K] → [T, Hv, K]: v-head h has k-head h // ratio."""
    return x.repeat_interleave(ratio, dim=1)


def outer_sum(s: "T", d: "T", k: "T") -> "T":
    """S + d·k, a product and a sum that round apart: s [n, Hv, V, K], d [n, Hv, V], k [n, Hv, K]."""
    return s + d[..., None] * k[:, :, None, :]


def _over_k(terms: "T") -> "T":
    return strided32_tree(terms.reshape(-1, terms.shape[-1])).reshape(terms.shape[:-1])


# ---------------------------------------------------------------- stages


def prepare_conv(problem: Problem, weights: "Tensors") -> "Run":
    """gdn.conv."""
    front = _front(problem)

    def run(t: "Tensors") -> None:
        b, a = front(t, t["qkv"])
        t["b"].copy_(b)
        t["a"].copy_(a)

    return run


def _front(problem: Problem) -> "Callable[[Tensors, T], tuple[T, T]]":
    """The conv into a given q|k|v, and z; returns b and a."""
    g, order, bias, padding = problem.geometry, *(problem.mode(m) for m in ("reorder_input", "conv_bias", "padding_z"))

    def front(t: "Tensors", qkv: "T") -> "tuple[T, T]":
        mixed, z = split_qkvz(t["qkvz"], g, order)
        slots, starts = t["slots"], t["query_start_loc"]
        conv(mixed, t["conv_weights"], t.get("conv_bias"), t["conv_state"], slots, starts, qkv, bias)
        if padding == "written":
            t["z"].copy_(z)
        else:
            for _, rows in turns(starts, live(slots, starts)):
                t["z"][rows] = z[rows]
        return split_ba(t["ba"], g, order)

    return front


def prepare_recurrent(problem: Problem, weights: "Tensors") -> "Run":
    """gdn.recurrent."""
    modes = dict(problem.modes)

    def run(t: "Tensors") -> None:
        recurrent(t["qkv"], t["a"], t["b"], t, t["ssm_state"], t["core_attn_out"], problem.geometry, modes)

    return run


def prepare_step(problem: Problem, weights: "Tensors") -> "Run":
    """gdn.step."""
    front, modes = _front(problem), dict(problem.modes)

    def run(t: "Tensors") -> None:
        # Rows of no sequence stay empty: nothing reads them.
        qkv = t["qkvz"].new_empty(problem.rows, problem.geometry.conv_dim)
        b, a = front(t, qkv)
        recurrent(qkv, a, b, t, t["ssm_state"], t["core_attn_out"], problem.geometry, modes)

    return run
