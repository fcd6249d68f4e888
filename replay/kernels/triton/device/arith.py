"""The contract's arithmetic in Triton, for kernels that are to be equal to the bit.

A kernel is launched with ``enable_fp_fusion=False``, or a product and a sum contract; divisions and roots are ``div_rn`` and
``sqrt_rn``, since ``/`` and ``tl.sqrt`` are not correctly rounded on every device; exp and log go through f64. A sum of two
operands may be any device's reduction, a sum of more only where every order is exact.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# 1.5 · 2^23: what is added to it and taken off again is rounded to an integer, half to even.
_TO_INTEGER = tl.constexpr(12582912.0)


@triton.jit
def begin(CUDA: tl.constexpr):
    """What kernels begin with: on CUDA one is launched while the one before still runs, waits for all earlier ones to end, and
    then lets the next be launched. One that reads before it waits finds what was written before its forerunner began."""
    if CUDA:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def exp_cr(x):
    """exp of f32, in f64 and rounded once."""
    return tl.exp(x.to(tl.float64)).to(tl.float32)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(−x))."""
    return tl.div_rn(1.0, 1.0 + exp_cr(-x))


@triton.jit
def silu(x):
    """x / (1 + exp(−x))."""
    return tl.div_rn(x, 1.0 + exp_cr(-x))


@triton.jit
def widened(bits):
    """The bits of bf16, int16 → f32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def bf16_bits(x):
    """f32 → the bits of bf16, int16, to nearest even; a NaN stays one. By integers, so that an interpreter has the same ones."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, (bits >> 16) | 0x40).to(tl.int16)


@triton.jit
def rounded_bf16(x):
    """f32 through bf16."""
    return widened(bf16_bits(x))


@triton.jit
def magnitude_bits(x):
    """The bits of |x|: integers that are ordered as the magnitudes are, a NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def round_half_away(x):
    """C's roundf; what is clamped to ±127 behind it may be off above 2^22."""
    low = tl.floor(tl.abs(x))
    up = low + tl.where(tl.abs(x) - low >= 0.5, 1.0, 0.0)
    return tl.where(x < 0, -up, up)


@triton.jit
def round_half_even(x):
    """rint of what is within ±2^22."""
    return (x + _TO_INTEGER) - _TO_INTEGER


@triton.jit
def scale_of(absmax_bits, quant: tl.constexpr):
    """(what codes are computed with: m, scale) of rows whose magnitudes' bits are at most ``absmax_bits``."""
    absmax = absmax_bits.to(tl.float32, bitcast=True)
    if quant == "rmsnorm_int8":
        m = absmax
        scale = tl.where(m > 0, tl.div_rn(m, 127.0), 1.0)
    else:
        m = tl.where(absmax > 1e-10, absmax, 1e-10)
        scale = tl.div_rn(m, 127.0)
    return m, tl.where(absmax_bits < 0x7F800000, scale, absmax)


@triton.jit
def codes(x, m, scale, quant: tl.constexpr):
    """int8 codes, as int32, of x; m and scale broadcast against it. A NaN or inf among a row makes all of it 0."""
    if quant == "div_half_even":
        y = tl.div_rn(x, scale)
    elif quant == "rmsnorm_int8":
        y = x * tl.div_rn(1.0, scale)
    else:
        y = x * tl.div_rn(127.0, m)
    # 0·inf, where 1/s of a denormal row overflows, is NaN and its code 0.
    right = (magnitude_bits(scale) < 0x7F800000) & (y == y)
    low: tl.constexpr = -128.0 if quant == "rmsnorm_int8" else -127.0
    y = tl.minimum(tl.maximum(tl.where(right, y, 0.0), low), 127.0)
    if quant == "recip_half_away":
        y = round_half_away(y)
    else:
        y = round_half_even(y)
    return y.to(tl.int32)


@triton.jit
def activated(gate, up, act: tl.constexpr):
    """f32 of silu(gate)·up, rounded in between as the mode says."""
    if act == "silu_round_twice":
        p = rounded_bf16(rounded_bf16(silu(gate)) * up)
    elif act == "silu_round_once":
        p = rounded_bf16(silu(gate) * up)
    else:
        tl.static_assert(act == "silu_f32")
        p = silu(gate) * up
    return p


@triton.jit
def scaled(acc, row, column, epilogue: tl.constexpr):
    """An exact s32 sum as f32, times its row's and its column's scale."""
    if epilogue == "row_then_col":
        y = (acc.to(tl.float32) * row) * column
    else:
        tl.static_assert(epilogue == "scales_first")
        y = acc.to(tl.float32) * (row * column)
    return y


@triton.jit
def folded(lanes):
    """[N, 32] → [N, 32]: in every lane the sum of its row's, folded by 16, 8, 4, 2, 1 (``strided32_tree``).

    From either side a sum of two is the same. Shuffled rather than reduced: where a row is one lane a thread, all of it stays
    in the registers in which it lies.
    """
    k = tl.arange(0, 32)[None, :] + tl.zeros((lanes.shape[0], 1), tl.int32)
    lanes = lanes + tl.gather(lanes, k ^ 16, 1)
    lanes = lanes + tl.gather(lanes, k ^ 8, 1)
    lanes = lanes + tl.gather(lanes, k ^ 4, 1)
    lanes = lanes + tl.gather(lanes, k ^ 2, 1)
    return lanes + tl.gather(lanes, k ^ 1, 1)


@triton.jit
def folded_one(lanes):
    """[1, 32] → the sum, a scalar."""
    return tl.max(tl.max(folded(lanes), 1), 0)
