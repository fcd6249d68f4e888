"""Selection in Triton: greedy in one launch, top-k in four small ones.

A number and its column make one key, int64, larger for a larger number and, among equal ones, for a lower column: no two keys
of a row are alike, so the k largest are one set. What is no number, or past the columns that count, is NOTHING.

Of rows cut into groups, K have a key as large as the K-th largest of the groups' largest, so none below it is chosen. Those
that are not below are few, and each one's rank among them is its place. (A row that is all equal has runs of equal groups and
so tens of thousands of them, of which one program chooses: right, and slow.)
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replay.kernels.triton.device.arith import begin, exp_cr, folded, widened

NOTHING = tl.constexpr(-(1 << 63))
MANY = tl.constexpr(4096)  # keys that one program takes at once where there are too many to rank


@triton.jit
def keys_of(logits, row, stride, column, columns, BF16: tl.constexpr):
    """The keys of some columns of a row."""
    x = tl.load(logits + row * stride + column, column < columns, 0)
    if BF16:
        x = widened(x)
    return tl.where((x == x) & (column < columns), key_of(x, column), NOTHING)


@triton.jit
def key_of(x, column):
    """Of numbers and their columns."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # −0.0 is +0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)


@triton.jit
def column_of(key):
    """The column of a key; −1 of NOTHING."""
    return tl.where(key == NOTHING, -1, 0x7FFFFFFF - (key & 0xFFFFFFFF))


@triton.jit
def greedy(
    logits, stride, columns, slots, best, arrived, token, next_input_ids, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    BF16: tl.constexpr, CUDA: tl.constexpr,
):  # fmt: skip
    """Programs [chunk, row]; ``best`` is NOTHING and ``arrived`` 0 for every row, before and behind."""
    begin(CUDA)
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    found = tl.full((BLOCK,), NOTHING, tl.int64)
    for start in tl.static_range(0, CHUNK, BLOCK):
        column = chunk * CHUNK + start + tl.arange(0, BLOCK)
        found = tl.maximum(found, keys_of(logits, row, stride, column, columns, BF16))
    slot = tl.load(slots + row).to(tl.int64)
    tl.atomic_max(best + row, tl.max(found, 0), sem="relaxed", scope="gpu")
    before = tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        chosen = column_of(tl.atomic_max(best + row, tl.full((), NOTHING, tl.int64), sem="relaxed", scope="gpu"))
        tl.store(token + row, chosen.to(token.dtype.element_ty))
        if slot >= 0:
            tl.store(next_input_ids + slot, chosen)
        tl.store(best + row, tl.full((), NOTHING, tl.int64))
        tl.store(arrived + row, 0)


@triton.jit
def valid_columns(seq_lens, row, columns, NEXT_N: tl.constexpr):
    """How many columns of a row count."""
    last = tl.load(seq_lens + row // NEXT_N) - NEXT_N + (row % NEXT_N).to(tl.int32) + 1
    return tl.minimum(tl.maximum(last, 0), columns)


@triton.jit
def group_maxima(
    logits, stride, columns, seq_lens, groups, LENGTH: tl.constexpr, OF: tl.constexpr, STEP: tl.constexpr, NEXT_N: tl.constexpr,
    BF16: tl.constexpr, CUDA: tl.constexpr,
):  # fmt: skip
    """Programs [chunk, row]: the largest key of each of OF groups of LENGTH columns, a column in OF, to int64 [rows, groups]."""
    begin(CUDA)
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    valid = valid_columns(seq_lens, row, columns, NEXT_N)
    group = tl.arange(0, OF)
    found = tl.full((OF,), NOTHING, tl.int64)
    for start in range(0, LENGTH, STEP):
        at = (start + tl.arange(0, STEP))[:, None] * OF + group[None, :]
        # A column of the next chunk is in a group of its own.
        key = keys_of(logits, row, stride, chunk * (LENGTH * OF) + at, valid, BF16)
        found = tl.maximum(found, tl.max(tl.where(at < LENGTH * OF, key, NOTHING), axis=0))
    tl.store(groups + row * (tl.num_programs(0) * OF) + chunk * OF + group, found)


@triton.jit
def ranks_in(mine, base, count, SPAN: tl.constexpr):
    """How many of the ``count`` keys at ``base`` are larger than each of ``mine``."""
    larger = tl.zeros((SPAN, mine.shape[0]), tl.int32)
    for start in range(0, count, SPAN):
        at = start + tl.arange(0, SPAN)
        other = tl.load(base + at, at < count, NOTHING)
        larger += (other[:, None] > mine[None, :]).to(tl.int32)
    return tl.sum(larger, axis=0)


@triton.jit
def least_of_groups(
    groups, least, found, K: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, CUDA: tl.constexpr,
):  # fmt: skip
    """Programs [block of groups, row]: the K-th largest of all, to int64 [rows]; NOTHING where fewer groups hold a number."""
    begin(CUDA)
    row, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(groups + row * GROUPS + at)
    # Groups without a number are alike: all of them have the rank that the first one has.
    rank = ranks_in(mine, groups + row * GROUPS, GROUPS, SPAN)
    nothing = tl.max((mine == NOTHING).to(tl.int32) * (rank < K).to(tl.int32), 0)
    tl.store(least + row + tl.zeros_like(at), mine, rank == K - 1)
    if nothing > 0:
        tl.store(least + row, tl.full((), NOTHING, tl.int64))
    if tl.program_id(0) == 0:
        tl.store(found + row, 0)


@triton.jit
def collect(
    logits, stride, columns, seq_lens, least, candidates, found, CHUNK: tl.constexpr, NEXT_N: tl.constexpr, BF16: tl.constexpr,
    CUDA: tl.constexpr,
):  # fmt: skip
    """Programs [chunk, row]: the keys that are not below ``least``, to int64 [rows, columns]; ``found`` counts them."""
    row, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    valid = valid_columns(seq_lens, row, columns, NEXT_N)
    key = keys_of(logits, row, stride, column, valid, BF16)
    if CUDA:
        gdc_launch_dependents()
        gdc_wait()
    chosen = ((key >= tl.load(least + row)) & (key != NOTHING)).to(tl.int32)
    count = tl.sum(chosen, 0)
    if count > 0:
        first = tl.atomic_add(found + row, count, sem="relaxed", scope="gpu")
        tl.store(candidates + row * columns + first + tl.cumsum(chosen, 0) - 1, key, chosen > 0)


@triton.jit
def place(
    candidates, columns, found, indices, K: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    CUDA: tl.constexpr,
):  # fmt: skip
    """Programs [block of candidates, row]: each of at most FEW candidates at its rank; of more, the first program chooses."""
    begin(CUDA)
    row, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    base, count, out = candidates + row * columns, tl.load(found + row), indices + row * K
    if count <= FEW:
        mine = tl.load(base + at, at < count, NOTHING)
        rank = ranks_in(mine, base, count, SPAN)
        tl.store(out + at, -1, (at >= count) & (at < K))
        tl.store(out + rank, column_of(mine).to(tl.int32), (at < count) & (rank < K))
    elif tl.program_id(0) == 0:
        choose_of_many(base, count, out, K, MANY)


@triton.jit
def at_least(base, count, threshold, SPAN: tl.constexpr):
    """How many of the keys at ``base`` are the threshold or more; unsigned, NOTHING being 0."""
    total = tl.zeros((), tl.int32)
    for start in range(0, count, SPAN):
        at = start + tl.arange(0, SPAN)
        key = tl.load(base + at, at < count, NOTHING) ^ NOTHING
        total += tl.sum(((at < count) & (key.to(tl.uint64, bitcast=True) >= threshold)).to(tl.int32), 0)
    return total


@triton.jit
def choose_of_many(base, count, indices, K: tl.constexpr, SPAN: tl.constexpr):
    """The K largest of any number of keys, in the order in which they lie: the K-th is found bit by bit."""
    threshold, bit = tl.zeros((), tl.uint64), tl.full((), NOTHING, tl.int64).to(tl.uint64, bitcast=True)
    for _ in range(64):
        if at_least(base, count, threshold | bit, SPAN) >= K:
            threshold = threshold | bit
        bit = bit >> 1
    written = tl.zeros((), tl.int32)
    for start in range(0, count, SPAN):
        at = start + tl.arange(0, SPAN)
        key = tl.load(base + at, at < count, NOTHING)
        chosen = ((at < count) & ((key ^ NOTHING).to(tl.uint64, bitcast=True) >= threshold)).to(tl.int32)
        tl.store(indices + written + tl.cumsum(chosen, 0) - 1, column_of(key).to(tl.int32), chosen > 0)
        written += tl.sum(chosen, 0)


@triton.jit
def router(
    gating, bias, is_padding, weights, ids, EXPERTS: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    BF16: tl.constexpr, BIASED: tl.constexpr, PADDED: tl.constexpr, RENORMALIZE: tl.constexpr, CUDA: tl.constexpr,
):  # fmt: skip
    """A program a row, its logits in PARTS of 32 lanes: the softmax, and then one of the k largest after the other."""
    begin(CUDA)
    row, lane, slot = tl.program_id(0).to(tl.int64), tl.arange(0, 32), tl.arange(0, BLOCK)
    column = tl.arange(0, PARTS)[:, None] * 32 + lane[None, :]
    there = column < EXPERTS
    x = tl.load(gating + row * EXPERTS + column, there, 0)
    if BF16:
        x = widened(x)
    largest = tl.max(tl.max(tl.where(there, x, float("-inf")), 1), 0)
    nan = tl.max(tl.max((x != x).to(tl.int32), 1), 0) > 0
    e = tl.where(there, exp_cr(x - largest), 0.0)
    lanes = tl.zeros((1, 32), tl.float32)
    for part in tl.static_range(PARTS):
        # One part's terms among zeros: their sum is they.
        mine = tl.arange(0, PARTS)[:, None] == part
        lanes = lanes + tl.sum(tl.where(mine, e, 0.0), axis=0)[None, :]
    p = e * tl.div_rn(1.0, tl.max(tl.max(folded(lanes), 1), 0))
    p = tl.where(nan, float("nan"), p)
    score = p
    if BIASED:
        score = p + tl.load(bias + column, there, 0.0)
    # A NaN is below all numbers, and among its like the lower id is first as well.
    lowest = (0x7FFFFFFF - column).to(tl.int64) - 0x7FFFFFFFFFFFFFFF
    key = tl.where(there, tl.where(score == score, key_of(score, column), lowest), NOTHING)
    chosen, found, total = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int32), tl.zeros((), tl.float32)
    for j in tl.static_range(K):
        best = tl.max(tl.max(key, 1), 0)
        at = key == best
        weight = tl.sum(tl.sum(tl.where(at, p, 0.0), 1), 0)
        id = tl.max(tl.max(tl.where(at, column, 0), 1), 0)
        chosen, found = tl.where(slot == j, weight, chosen), tl.where(slot == j, id, found)
        total = total + weight
        key = tl.where(at, NOTHING, key)
    if RENORMALIZE:
        chosen = tl.div_rn(chosen, total)
    if PADDED:
        padded = tl.load(is_padding + row) != 0
        chosen, found = tl.where(padded, 0.0, chosen), tl.where(padded, -1, found)
    tl.store(weights + row * K + slot, chosen, slot < K)
    tl.store(ids + row * K + slot, found, slot < K)
