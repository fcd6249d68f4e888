"""The GDN stages of decode in Triton, one token a sequence, in the contract's order.

bf16 tensors come as int16, their bits. Lane l of a sum over K adds k = l, l + 32, … in turn, and lanes fold by halves; so rows
are held in parts of 32 columns.
"""

import triton
import triton.language as tl

from replay.kernels.triton.device.arith import begin, bf16_bits, exp_cr, folded, folded_one, sigmoid, silu, widened

_EPS = tl.constexpr(1e-6)


@triton.jit
def source_column(
    c, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, DIM: tl.constexpr, CONV_DIM: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Where channel c of q|k|v|z lies in a row of projections."""
    if GROUPED:
        keys: tl.constexpr = K_HEADS * DIM
        ratio: tl.constexpr = V_HEADS // K_HEADS
        group: tl.constexpr = 2 * DIM + 2 * ratio * DIM
        of_values = tl.where(c < CONV_DIM, c - 2 * keys, c - CONV_DIM)
        value = (of_values // (ratio * DIM)) * group + 2 * DIM + of_values % (ratio * DIM)
        value += tl.where(c < CONV_DIM, 0, ratio * DIM)
        key = (c % keys) // DIM * group + c % DIM + tl.where(c < keys, 0, DIM)
        column = tl.where(c < 2 * keys, key, value)
    else:
        column = c
    return column


@triton.jit
def source_gate(head, of_a, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, GROUPED: tl.constexpr):
    """Where the b, or a, of a v-head lies in a row of [b|a]."""
    ratio: tl.constexpr = V_HEADS // K_HEADS
    if GROUPED:
        column = head // ratio * (2 * ratio) + head % ratio + tl.where(of_a, ratio, 0)
    else:
        column = head + tl.where(of_a, V_HEADS, 0)
    return column


@triton.jit
def conv(
    qkvz, ba, weights, bias, slots, state, state_stride, qkv, z, b, a, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr,
    DIM: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, GROUPED: tl.constexpr, PADDING_Z: tl.constexpr,
    BLOCK: tl.constexpr, CUDA: tl.constexpr,
):  # fmt: skip
    """Programs [token, block of the channels of q|k|v|z, and of b|a behind them]."""
    begin(CUDA)
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    conv_dim: tl.constexpr = (2 * K_HEADS + V_HEADS) * DIM
    values: tl.constexpr = V_HEADS * DIM
    width: tl.constexpr = conv_dim + values
    slot = tl.load(slots + row).to(tl.int64)
    held = state + tl.maximum(slot, 0) * state_stride + c
    through = c < tl.where(slot >= 0, conv_dim, 0)
    raw = tl.load(qkvz + row * width + source_column(c, K_HEADS, V_HEADS, DIM, conv_dim, GROUPED), c < width, 0)
    r = tl.zeros((BLOCK,), tl.float32)
    if BIAS == "bias_first":
        r = r + widened(tl.load(bias + c, through, 0))
    for tap in tl.static_range(TAPS - 1):
        r = r + widened(tl.load(held + tap * conv_dim, through, 0)) * widened(tl.load(weights + c * TAPS + tap, through, 0))
    r = r + widened(raw) * widened(tl.load(weights + c * TAPS + TAPS - 1, through, 0))
    if BIAS == "bias_last":
        r = r + widened(tl.load(bias + c, through, 0))
    tl.store(qkv + row * conv_dim + c, bf16_bits(silu(r)), through)
    for tap in tl.static_range(TAPS - 2):
        tl.store(held + tap * conv_dim, tl.load(held + (tap + 1) * conv_dim, through, 0), through)
    tl.store(held + (TAPS - 2) * conv_dim, raw, through)
    z_width = tl.where((slot >= 0) | PADDING_Z, width, 0)
    tl.store(z + row * values + c - conv_dim, raw, (c >= conv_dim) & (c < z_width))
    gate = c - width
    of_a = gate >= V_HEADS
    head = gate - tl.where(of_a, V_HEADS, 0)
    is_gate = (gate >= 0) & (gate < 2 * V_HEADS)
    value = tl.load(ba + row * (2 * V_HEADS) + source_gate(head, of_a, K_HEADS, V_HEADS, GROUPED), is_gate, 0)
    tl.store(b + row * V_HEADS + head, value, is_gate & (gate < V_HEADS))
    tl.store(a + row * V_HEADS + head, value, is_gate & of_a)


@triton.jit
def parts_of(x, DIM: tl.constexpr):
    """A row of bits [DIM] as f32, 32 elements a part."""
    parts = (widened(tl.load(x + tl.arange(0, 32))),)
    for start in tl.static_range(32, DIM, 32):
        parts = parts + (widened(tl.load(x + start + tl.arange(0, 32))),)
    return parts


@triton.jit
def normed(parts, DIM: tl.constexpr, NORM: tl.constexpr):
    """A row of q or k over its length."""
    lanes = tl.zeros((1, 32), tl.float32)
    for i in tl.static_range(DIM // 32):
        lanes = lanes + (parts[i] * parts[i])[None, :]
    total = folded_one(lanes)
    if NORM == "eps_out":
        length = tl.sqrt_rn(total) + _EPS
    elif NORM == "rsqrt_eps_in":
        # In f64, rounded once.
        length = (1.0 / tl.sqrt((total + _EPS).to(tl.float64))).to(tl.float32)
    else:
        length = tl.sqrt_rn(total + _EPS)
    over = (_over(parts[0], length, NORM),)
    for i in tl.static_range(1, DIM // 32):
        over = over + (_over(parts[i], length, NORM),)
    return over


@triton.jit
def _over(part, length, NORM: tl.constexpr):
    if NORM == "rsqrt_eps_in":
        result = part * length
    else:
        result = tl.div_rn(part, length)
    return result


@triton.jit
def decay_of(a, a_log, dt_bias, LOG1P: tl.constexpr):
    """exp(−exp(A_log)·softplus(a + dt_bias))."""
    x = a + dt_bias
    e = exp_cr(x)
    if LOG1P:
        # log1p by its own identity in f64: the quotient takes back what 1 + e lost. A few f64 ulp from the library's, which the
        # one rounding to f32 shows in 1e-8 of values or so.
        wide = e.to(tl.float64)
        one = 1.0 + wide
        low = tl.where(one == 1.0, wide, tl.log(one) * (wide / (one - 1.0))).to(tl.float32)
    else:
        low = tl.log((1.0 + e).to(tl.float64)).to(tl.float32)
    return exp_cr(-exp_cr(a_log) * tl.where(x > 20.0, x, low))


@triton.jit
def state_of(x, BF16: tl.constexpr):
    """A stored state as f32."""
    if BF16:
        wide = widened(x)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def recurrent(
    qkv, a, b, a_log, dt_bias, slots, state, state_stride, out, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, DIM: tl.constexpr,
    NORM: tl.constexpr, LOG1P: tl.constexpr, DT_BF16: tl.constexpr, STATE_BF16: tl.constexpr, K_V: tl.constexpr,
    ROWS: tl.constexpr, ROOT: tl.constexpr, CUDA: tl.constexpr,
):  # fmt: skip
    """Programs [block of ROWS of V, v-head, token]; ROOT is 1/√K in f32."""
    begin(CUDA)
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    v, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, 32)
    keys: tl.constexpr = K_HEADS * DIM
    channels: tl.constexpr = (2 * K_HEADS + V_HEADS) * DIM
    q_at = qkv + row * channels + head // (V_HEADS // K_HEADS) * DIM
    q_parts, k_parts = parts_of(q_at, DIM), parts_of(q_at + keys, DIM)
    value = widened(tl.load(qkv + row * channels + 2 * keys + head * DIM + v))[:, None]
    gate = row * V_HEADS + head
    a_gate, b_gate, log = widened(tl.load(a + gate)), widened(tl.load(b + gate)), tl.load(a_log + head)
    if DT_BF16:
        bias = widened(tl.load(dt_bias + head))
    else:
        bias = tl.load(dt_bias + head)
    if slot >= 0:
        along_v: tl.constexpr = 1 if K_V else DIM
        along_k: tl.constexpr = DIM if K_V else 1
        # A zero that hides how rows are aligned: a thread then holds one column, a warp a row, and lanes fold by shuffles of a
        # register. With vectors of four a fold would copy whole rows into every thread.
        hidden = tl.minimum(slot, 0)
        held = state + slot * state_stride + head * (DIM * DIM) + hidden + v[:, None] * along_v + k[None, :] * along_k
        # The state is asked for before anything is computed, and streams past the caches: nobody reads it again before long.
        stored = (tl.load(held, eviction_policy="evict_first"),)
        for start in tl.static_range(32, DIM, 32):
            stored = stored + (tl.load(held + start * along_k, eviction_policy="evict_first"),)
        decay, beta = decay_of(a_gate, log, bias, LOG1P), sigmoid(b_gate)
        q_over, k_over = normed(q_parts, DIM, NORM), normed(k_parts, DIM, NORM)
        lanes = tl.zeros((ROWS, 32), tl.float32)
        for i in tl.static_range(DIM // 32):
            lanes = lanes + state_of(stored[i], STATE_BF16) * decay * k_over[i][None, :]
        d = (value - folded(lanes)) * beta
        lanes = tl.zeros((ROWS, 32), tl.float32)
        for i in tl.static_range(DIM // 32):
            s = state_of(stored[i], STATE_BF16) * decay + d * k_over[i][None, :]
            if STATE_BF16:
                tl.store(held + i * (32 * along_k), bf16_bits(s), cache_modifier=".cs")
            else:
                tl.store(held + i * (32 * along_k), s.to(state.dtype.element_ty), cache_modifier=".cs")
            lanes = lanes + s * (q_over[i] * ROOT)[None, :]
        tl.store(out + (row * V_HEADS + head) * DIM + v, bf16_bits(tl.max(folded(lanes), 1)))
