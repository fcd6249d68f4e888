"""GDN decode (gated delta net), one rank: causal conv, gates, l2 norm and the recurrence (semantics: GDN).

bf16 tensors are uint16 bit patterns. A *sequence* is a run of tokens that shares a slot of the state tables; slot −1 and a
run of no tokens touch nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.oracle.arith import F32, I32, U16, bf16_to_f32, exp_cr, log1p_cr, log_cr, rn_bf16, sigmoid, silu, strided32_tree

EPS = np.float32(1e-6)
SOFTPLUS_LINEAR = 20.0


def widen(stored: NDArray[Any]) -> F32:
    """A state as it is stored (f32, f16, or bf16 bits) → f32, exact."""
    return bf16_to_f32(stored) if stored.dtype == np.uint16 else stored.astype(np.float32)


def narrow(values: F32, like: NDArray[Any]) -> NDArray[Any]:
    """f32 → the dtype a state is stored in, round to nearest even; past the range of f16 to infinity."""
    with np.errstate(over="ignore"):
        return rn_bf16(values) if like.dtype == np.uint16 else values.astype(like.dtype)


def sequences(slots: I32, query_start_loc: I32) -> Iterator[tuple[int, range]]:
    """(slot, its token rows) of every sequence that has any, padding left out."""
    for i, slot in enumerate(slots.tolist()):
        rows = range(int(query_start_loc[i]), int(query_start_loc[i + 1]))
        if slot >= 0 and rows:
            yield slot, rows


# ---------------------------------------------------------------- conv


@dataclass(frozen=True)
class Heads:
    """Head counts and dims of one rank: q and k have ``k_heads`` of ``k_dim``, v and z ``v_heads`` of ``v_dim``."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int

    @property
    def ratio(self) -> int:
        """v-heads that share a k-head."""
        return self.v_heads // self.k_heads

    @property
    def conv_dim(self) -> int:
        """Channels of q, k and v together."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim


def split_qkvz(qkvz: NDArray[Any], heads: Heads, order: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """[T, conv_dim + Hv·V] → (q|k|v [T, conv_dim], z [T, Hv, V]).

    ``contiguous``: q, k, v, z one behind the other. ``interleaved``: a k-head's q, k, the v of its v-heads, their z; and so on.
    """
    tokens, hk, hv = len(qkvz), heads.k_heads, heads.v_heads
    if order == "contiguous":
        return qkvz[:, : heads.conv_dim], qkvz[:, heads.conv_dim :].reshape(tokens, hv, heads.v_dim)
    group = qkvz.reshape(tokens, hk, -1)
    width = heads.ratio * heads.v_dim
    q, k, v, z = np.split(group, np.cumsum([heads.k_dim, heads.k_dim, width]), axis=2)
    mixed = np.concatenate([part.reshape(tokens, -1) for part in (q, k, v)], axis=1)
    return mixed, z.reshape(tokens, hv, heads.v_dim)


def split_ba(ba: NDArray[Any], heads: Heads, order: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """[T, 2·Hv] → (b [T, Hv], a [T, Hv]); ``interleaved``: a k-head's b, then its a."""
    if order == "contiguous":
        return ba[:, : heads.v_heads], ba[:, heads.v_heads :]
    group = ba.reshape(len(ba), heads.k_heads, 2, heads.ratio)
    return group[:, :, 0].reshape(len(ba), -1), group[:, :, 1].reshape(len(ba), -1)


def conv(
    x: U16, weight: U16, bias: U16 | None, state: U16, slots: I32, starts: I32, out: U16, bias_order: str = "bias_last"
) -> tuple[U16, U16]:
    """x [T, D], weight [D, W], bias [D], state [slots, W−1, D] with row 0 the oldest → (out [T, D], state).

    r = Σ state[i]·w[i], oldest first, + x·w[W−1]; the bias before (``bias_first``) or behind; SiLU; bf16. The state shifts by one
    and takes the raw x. Rows that belong to no sequence keep what ``out`` held.
    """
    out, state = out.copy(), state.copy()
    w, width = bf16_to_f32(weight), weight.shape[1]
    added = None if bias is None else bf16_to_f32(bias)
    for slot, rows in sequences(slots, starts):
        for t in rows:
            window = bf16_to_f32(np.concatenate([state[slot], x[t : t + 1]]))
            with np.errstate(over="ignore", invalid="ignore"):
                r = np.zeros(x.shape[1], np.float32) if added is None or bias_order == "bias_last" else added
                for i in range(width):
                    r = r + window[i] * w[:, i]
                if added is not None and bias_order == "bias_last":
                    r = r + added
                out[t] = rn_bf16(silu(r))
            state[slot] = np.concatenate([state[slot, 1:], x[t : t + 1]])
    return out, state


# ---------------------------------------------------------------- gates and norm


def softplus(x: F32, mode: str) -> F32:
    """x above 20; below log(1 + exp x), the sum in f32 (``softplus_log``) or inside one log1p (``softplus_log1p``)."""
    e = exp_cr(x)
    low = log_cr(np.float32(1) + e) if mode == "softplus_log" else log1p_cr(e)
    return np.where(x > SOFTPLUS_LINEAR, x, low)


def gates(a: F32, b: F32, a_log: F32, dt_bias: F32, softplus_mode: str) -> tuple[F32, F32]:
    """a, b [T, Hv], A_log, dt_bias [Hv] → (g, beta) [T, Hv]: g = exp(−exp(A_log)·softplus(a + dt_bias)), beta = sigmoid(b)."""
    with np.errstate(over="ignore", invalid="ignore"):
        return exp_cr(-exp_cr(a_log) * softplus(a + dt_bias, softplus_mode)), sigmoid(b)


def l2norm(x: F32, mode: str) -> F32:
    """x [R, K] over its length, the sum of squares in ``strided32_tree``."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        total = strided32_tree(x * x)[:, None]
        if mode == "rsqrt_eps_in":  # one rounding, from f64
            root = np.sqrt((total + EPS).astype(np.float64))
            return x * (1 / root).astype(np.float32)
        length: F32 = np.sqrt(total + EPS) if mode == "div_sqrt_eps_in" else np.sqrt(total) + EPS
        return x / length


# ---------------------------------------------------------------- recurrence


@dataclass(frozen=True)
class Modes:
    """Named choices of the recurrence."""

    l2norm: str = "div_sqrt_eps_in"
    softplus: str = "softplus_log"
    state_layout: str = "v_k"


def recurrent(
    qkv: U16, a: U16, b: U16, a_log: F32, dt_bias: NDArray[Any], state: NDArray[Any], slots: I32, starts: I32, out: U16,
    heads: Heads, modes: Modes,
) -> tuple[U16, NDArray[Any]]:  # fmt: skip
    """qkv [T, conv_dim], a, b [T, Hv], state [slots, Hv, V, K] (``k_v``: [slots, Hv, K, V]) → (out bf16 [T, Hv, V], state).

    T = S·g; m = Σ_K T·k; d = (v − m)·beta; S' = T + d·k; o = Σ_K S'·q, each line rounding per operation, sums in
    ``strided32_tree``. The state goes through its own dtype once a sequence. Rows of no sequence keep what ``out`` held.
    """
    out, state = out.copy(), state.copy()
    for token in tokens(qkv, a, b, a_log, dt_bias, state, slots, starts, heads, modes):
        out[token.row] = rn_bf16(token.out)
        if token.last:
            s = token.state if modes.state_layout == "v_k" else token.state.swapaxes(1, 2)
            state[token.slot] = narrow(s, state)
    return out, state


@dataclass(frozen=True)
class Token:
    """One token that has gone through the recurrence: q [Hv, K], the state behind it [Hv, V, K] in f32, out [Hv, V]; ``last`` of
    its sequence."""

    row: int
    slot: int
    last: bool
    q: F32
    state: F32
    out: F32


def tokens(
    qkv: U16, a: U16, b: U16, a_log: F32, dt_bias: NDArray[Any], state: NDArray[Any], slots: I32, starts: I32, heads: Heads,
    modes: Modes,
) -> Iterator[Token]:  # fmt: skip
    """Every token of every sequence in turn; a sequence reads its state where it begins."""
    q, k, v = split_heads(qkv, heads, modes.l2norm)
    g, beta = gates(bf16_to_f32(a), bf16_to_f32(b), a_log, widen(dt_bias), modes.softplus)
    for slot, rows in sequences(slots, starts):
        s = widen(state[slot] if modes.state_layout == "v_k" else state[slot].swapaxes(1, 2))
        for t in rows:
            s, o = _step(s, q[t], k[t], v[t], g[t], beta[t])
            yield Token(t, slot, t == rows[-1], q[t], s, o)


def split_heads(qkv: U16, heads: Heads, norm: str) -> tuple[F32, F32, F32]:
    """(q, k [T, Hv, K], v [T, Hv, V]) in f32: q and k normalised, q times rn(1/√K), v-head h with k-head h // ratio."""
    tokens, width = len(qkv), heads.k_heads * heads.k_dim
    q, k, v = np.split(bf16_to_f32(qkv), [width, 2 * width], axis=1)

    def normed(x: F32) -> F32:
        rows = l2norm(x.reshape(-1, heads.k_dim), norm)
        return np.repeat(rows.reshape(tokens, heads.k_heads, heads.k_dim), heads.ratio, axis=1)

    scale = np.float32(1 / np.sqrt(np.float64(heads.k_dim)))
    return normed(q) * scale, normed(k), v.reshape(tokens, heads.v_heads, heads.v_dim)


def _step(s: F32, q: F32, k: F32, v: F32, g: F32, beta: F32) -> tuple[F32, F32]:
    """One token: s [Hv, V, K] → (s, o [Hv, V])."""
    with np.errstate(over="ignore", invalid="ignore"):
        decayed = s * g[:, None, None]
        m = _over_k(decayed * k[:, None, :])
        d = (v - m) * beta[:, None]
        s = decayed + d[:, :, None] * k[:, None, :]
        return s, _over_k(s * q[:, None, :])


def _over_k(terms: F32) -> F32:
    return strided32_tree(terms.reshape(-1, terms.shape[-1])).reshape(terms.shape[:-1])
