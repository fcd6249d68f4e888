"""The MoE stages in Triton: a row-dot product a pair of token and slot, and everything around it to the bit.

bf16 tensors come as int16, their bits. Weights are [E, N, K]: a column is one run of K bytes, read four codes at a time. P is the
number of pairs.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replay.kernels.triton.device.arith import (
    activated,
    begin,
    bf16_bits,
    codes,
    folded_one,
    magnitude_bits,
    rounded_bf16,
    scale_of,
    scaled,
    sigmoid,
    widened,
)


@triton.jit
def dot4(a, b, CUDA: tl.constexpr):
    """Four products of the signed bytes in each word of a and b, summed; int32."""
    if CUDA:
        total = tl.inline_asm_elementwise("dp4a.s32.s32 $0, $1, $2, 0;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)
    else:
        total = (a << 24 >> 24) * (b << 24 >> 24) + (a << 16 >> 24) * (b << 16 >> 24)
        total += (a << 8 >> 24) * (b << 8 >> 24) + (a >> 24) * (b >> 24)
    return total


@triton.jit
def packed4(q):
    """Codes as int32 [..., 4] → words of four signed bytes [...]."""
    shift = tl.arange(0, 4) * 8
    if len(q.shape) == 2:
        words = tl.sum((q & 0xFF) << shift[None, :], axis=1)
    else:
        words = tl.sum((q & 0xFF) << shift[None, None, :], axis=2)
    return words


@triton.jit
def quantized_words(x, m, scale, QUANT: tl.constexpr):
    """f32 [..., N] → words of four codes [..., N/4]; m and scale are of the whole rows."""
    q = codes(x, m, scale, QUANT)
    if len(x.shape) == 1:
        words = packed4(tl.reshape(q, (x.shape[0] // 4, 4)))
    else:
        words = packed4(tl.reshape(q, (x.shape[0], x.shape[1] // 4, 4)))
    return words


# ---------------------------------------------------------------- stages


@triton.jit
def quantize(x, q, q_scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr, QUANT: tl.constexpr, CUDA: tl.constexpr):
    """A program a row of bf16."""
    begin(CUDA)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    value = widened(tl.load(x + row * WIDTH + at, at < WIDTH, 0))
    m, scale = scale_of(tl.max(magnitude_bits(value), 0), QUANT)
    tl.store(q + row * WIDTH + at, codes(value, m, scale, QUANT).to(tl.int8), at < WIDTH)
    tl.store(q_scale + row, scale)


@triton.jit
def route(
    topk_ids, expert_map, rows_per_expert, offsets, permuted, pairs, experts, MAPPED: tl.constexpr, BLOCK: tl.constexpr,
    CUDA: tl.constexpr,
):  # fmt: skip
    """The place of each pair is how many pairs are of a lower expert, or of the same and earlier. A program for BLOCK pairs, and
    behind those one for BLOCK experts."""
    begin(CUDA)
    number, lane = tl.program_id(0), tl.arange(0, BLOCK)
    blocks = tl.cdiv(pairs, BLOCK)
    mine = (number - tl.where(number < blocks, 0, blocks)) * BLOCK + lane
    # How many there are of what this program is for, and of the others none.
    my_pairs, my_experts = tl.where(number < blocks, pairs, 0), tl.where(number < blocks, 0, experts)
    own = tl.load(topk_ids + mine, mine < my_pairs, -1)
    if MAPPED:
        own = tl.where(own >= 0, tl.load(expert_map + own, own >= 0, -1), -1)
    own = tl.where(number < blocks, own, mine)
    before, same = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, pairs, BLOCK):
        at = start + lane
        other = tl.load(topk_ids + at, at < pairs, -1)
        if MAPPED:
            other = tl.where(other >= 0, tl.load(expert_map + other, other >= 0, -1), -1)
        lower = (other[None, :] >= 0) & (other[None, :] < own[:, None])
        alike = (other[None, :] >= 0) & (other[None, :] == own[:, None])
        earlier = alike & (at[None, :] < mine[:, None]) & (mine < my_pairs)[:, None]
        before += tl.sum((lower | earlier).to(tl.int32), axis=1)
        same += tl.sum(alike.to(tl.int32), axis=1)
    tl.store(permuted + mine, tl.where(own >= 0, before, -1), mine < my_pairs)
    tl.store(rows_per_expert + mine, same, mine < my_experts)
    tl.store(offsets + mine, before.to(tl.int64), mine < tl.where(number < blocks, 0, experts + 1))


@triton.jit
def remap(q, q_scale, permuted, a, a_scale, WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, CUDA: tl.constexpr):
    """A program a pair."""
    begin(CUDA)
    pair, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    place = tl.load(permuted + pair).to(tl.int64)
    if place >= 0:
        token = pair // TOP_K
        tl.store(a + place * WIDTH + at, tl.load(q + token * WIDTH + at, at < WIDTH), at < WIDTH)
        tl.store(a_scale + place, tl.load(q_scale + token))


@triton.jit
def gemm(
    a, a_scale, ids, permuted, w, w_scale, bias, out, DEPTH: tl.constexpr, WIDTH: tl.constexpr, ALIKE: tl.constexpr,
    BIAS: tl.constexpr, EPILOGUE: tl.constexpr, COLUMNS: tl.constexpr, WORDS: tl.constexpr, CUDA: tl.constexpr,
):  # fmt: skip
    """Programs [pair, block of columns]: the row at the pair's place against its expert; a and w are words of four codes. ALIKE
    places have one row of ``a``."""
    begin(CUDA)
    pair, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    expert, row = tl.load(ids + pair).to(tl.int64), tl.load(permuted + pair).to(tl.int64)
    if expert >= 0:
        depth: tl.constexpr = DEPTH // 4
        acc = tl.zeros((COLUMNS,), tl.int32)
        for start in range(0, depth, WORDS):
            k = start + tl.arange(0, WORDS)
            left = tl.load(a + row // ALIKE * depth + k, k < depth, 0)
            at = (expert * WIDTH + column[:, None]) * depth + k[None, :]
            right = tl.load(w + at, (column[:, None] < WIDTH) & (k[None, :] < depth), 0)
            acc += tl.sum(dot4(left[None, :] + tl.zeros_like(right), right, CUDA), axis=1)
        valid = column < WIDTH
        y = scaled(acc, tl.load(a_scale + row // ALIKE), tl.load(w_scale + expert * WIDTH + column, valid, 0.0), EPILOGUE)
        if BIAS:
            y += tl.load(bias + expert * WIDTH + column, valid, 0.0)
        tl.store(out + row * WIDTH + column, bf16_bits(y), valid)


@triton.jit
def act_quant(
    gate_up, offsets, last, h, h_scale, INTER: tl.constexpr, BLOCK: tl.constexpr, ACT: tl.constexpr, QUANT: tl.constexpr,
    CUDA: tl.constexpr,
):  # fmt: skip
    """A program a row; those behind ``offsets[last]`` are nobody's."""
    begin(CUDA)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if row < tl.load(offsets + last):
        gate = widened(tl.load(gate_up + row * (2 * INTER) + at, at < INTER, 0))
        up = widened(tl.load(gate_up + row * (2 * INTER) + INTER + at, at < INTER, 0))
        p = tl.where(at < INTER, activated(gate, up, ACT), 0.0)
        m, scale = scale_of(tl.max(magnitude_bits(p), 0), QUANT)
        tl.store(h + row * INTER + at, codes(p, m, scale, QUANT).to(tl.int8), at < INTER)
        tl.store(h_scale + row, scale)


@triton.jit
def combine(y, ids, permuted, weights, out, WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, CUDA: tl.constexpr):
    """Programs [token, block of columns]: slots in their order, but for those whose id, or place, is −1."""
    begin(CUDA)
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in range(TOP_K):
        place = tl.load(permuted + token * TOP_K + slot).to(tl.int64)
        if tl.load(ids + token * TOP_K + slot) >= 0:
            value = widened(tl.load(y + place * WIDTH + column, column < WIDTH, 0))
            total = total + value * tl.load(weights + token * TOP_K + slot)
    tl.store(out + token * WIDTH + column, bf16_bits(total), column < WIDTH)


@triton.jit
def shared_out(x, gate, y, routed, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CUDA: tl.constexpr):
    """A program a token: its gate, and the shared expert's output added to the routed one."""
    begin(CUDA)
    token, lane = tl.program_id(0).to(tl.int64), tl.arange(0, 32)
    lanes = tl.zeros((1, 32), tl.float32)
    for start in range(0, WIDTH, 32):
        k = start + lane
        product = widened(tl.load(x + token * WIDTH + k, k < WIDTH, 0)) * widened(tl.load(gate + k, k < WIDTH, 0))
        lanes = lanes + tl.where(k < WIDTH, product, 0.0)[None, :]
    s = rounded_bf16(sigmoid(rounded_bf16(folded_one(lanes))))
    for start in range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        p = rounded_bf16(s * widened(tl.load(y + token * WIDTH + at, at < WIDTH, 0)))
        total = widened(tl.load(routed + token * WIDTH + at, at < WIDTH, 0)) + p
        tl.store(out + token * WIDTH + at, bf16_bits(total), at < WIDTH)


# ---------------------------------------------------------------- a layer in two parts


@triton.jit
def layer_first(
    x, ids, w13, w13_scale, p, HIDDEN: tl.constexpr, INTER: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, QUANT: tl.constexpr, EPILOGUE: tl.constexpr, ACT: tl.constexpr, CUDA: tl.constexpr,
):  # fmt: skip
    """A program a pair and some columns of gate and up, activated, into p f32 [P, I]. Each quantises the token's row for
    itself, and asks for its weights before it computes anything."""
    begin(CUDA)
    blocks: tl.constexpr = (INTER + COLUMNS - 1) // COLUMNS
    depth: tl.constexpr = HIDDEN // 4
    words: tl.constexpr = BLOCK // 4
    item = tl.program_id(0)
    pair, column = item // blocks, (item % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    expert = tl.load(ids + pair).to(tl.int64)
    if expert >= 0:
        k, valid = tl.arange(0, words), column < INTER
        at = (expert * (2 * INTER) + column[:, None]) * depth + k[None, :]
        mask = valid[:, None] & (k[None, :] < depth)
        gates, ups = tl.load(w13 + at, mask, 0), tl.load(w13 + at + INTER * depth, mask, 0)
        gate_scale = tl.load(w13_scale + expert * (2 * INTER) + column, valid, 0.0)
        up_scale = tl.load(w13_scale + expert * (2 * INTER) + INTER + column, valid, 0.0)
        h = tl.arange(0, BLOCK)
        value = widened(tl.load(x + (pair // TOP_K).to(tl.int64) * HIDDEN + h, h < HIDDEN, 0))
        m, scale = scale_of(tl.max(magnitude_bits(value), 0), QUANT)
        a = quantized_words(value, m, scale, QUANT)[None, :]
        gate = tl.sum(dot4(a + tl.zeros_like(gates), gates, CUDA), axis=1)
        up = tl.sum(dot4(a + tl.zeros_like(ups), ups, CUDA), axis=1)
        g = rounded_bf16(scaled(gate, scale, gate_scale, EPILOGUE))
        u = rounded_bf16(scaled(up, scale, up_scale, EPILOGUE))
        tl.store(p + pair.to(tl.int64) * INTER + column, activated(g, u, ACT), valid)


@triton.jit
def layer_second(
    p, ids, w2, w2_scale, weights, out, HIDDEN: tl.constexpr, INTER: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, QUANT: tl.constexpr, EPILOGUE: tl.constexpr, CUDA: tl.constexpr,
):  # fmt: skip
    """Programs [block of columns, token]: the activations of the token's pairs quantised, against the columns' weights of the
    experts in all slots, combined in order. It waits for the first half with its weights in registers: that had begun before
    this was launched, and so all that is read up to there had been written."""
    if CUDA:
        gdc_launch_dependents()
    token, column = tl.program_id(1), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth: tl.constexpr = INTER // 4
    slot, i, k = tl.arange(0, SLOTS), tl.arange(0, BLOCK), tl.arange(0, BLOCK // 4)
    expert = tl.load(ids + token * TOP_K + slot, slot < TOP_K, -1).to(tl.int64)
    here = expert >= 0
    valid = here[:, None] & (column[None, :] < HIDDEN)
    at = (expert[:, None, None] * HIDDEN + column[None, :, None]) * depth + k[None, None, :]
    w = tl.load(w2 + at, valid[:, :, None] & (k[None, None, :] < depth), 0)
    column_scale = tl.load(w2_scale + expert[:, None] * HIDDEN + column[None, :], valid, 0.0)
    pair = (token * TOP_K + slot).to(tl.int64)
    weight = tl.load(weights + pair, slot < TOP_K, 0.0)
    if CUDA:
        gdc_wait()
    value = tl.load(p + pair[:, None] * INTER + i[None, :], here[:, None] & (i[None, :] < INTER), 0.0)
    m, scale = scale_of(tl.max(magnitude_bits(value), 1), QUANT)
    a = quantized_words(value, m[:, None], scale[:, None], QUANT)[:, None, :]
    acc = tl.sum(dot4(a + tl.zeros_like(w), w, CUDA), axis=2)
    y = rounded_bf16(scaled(acc, scale[:, None], column_scale, EPILOGUE))
    total = tl.zeros((COLUMNS,), tl.float32)
    for j in tl.static_range(TOP_K):
        mine = (slot == j) & here
        # One slot's values among zeros: their sum is they, but for a −0.0, which the total turns into +0.0 anyway.
        of_slot = tl.sum(tl.where(mine[:, None], y, 0.0), axis=0)
        share = tl.sum(tl.where(mine, weight, 0.0), axis=0)
        total = tl.where(tl.max(mine.to(tl.int32), 0) > 0, total + of_slot * share, total)
    tl.store(out + token.to(tl.int64) * HIDDEN + column, bf16_bits(total), column < HIDDEN)
