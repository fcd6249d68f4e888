"""Selection in Triton: greedy in one launch, top-k in two.

A number and its column make one key, int64, larger for a larger number and, among equal ones, for a lower column: no two keys of a
row are alike, so the k largest are one set. What is no number, or past the columns that count, is NOTHING. Programs of a row add to
what the row has found; the last one to arrive looks at it and leaves all counters as they were.
"""

import triton
import triton.language as tl

from replay.kernels.triton.arith_device import widened

NOTHING = tl.constexpr(-(1 << 63))


@triton.jit
def keys_of(logits, row, stride, column, columns, BF16: tl.constexpr):
    """The keys of some columns of a row."""
    x = tl.load(logits + row * stride + column, column < columns, 0)
    if BF16:
        x = widened(x)
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # −0.0 is +0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)
    return tl.where((x == x) & (column < columns), key, NOTHING)


@triton.jit
def column_of(key):
    """The column of a key; −1 of NOTHING."""
    return tl.where(key == NOTHING, -1, 0x7FFFFFFF - (key & 0xFFFFFFFF))


@triton.jit
def greedy(
    logits, stride, columns, slots, best, arrived, token, next_input_ids, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    BF16: tl.constexpr,
):  # fmt: skip
    """Programs [chunk, row]; ``best`` is NOTHING and ``arrived`` 0 for every row, before and behind."""
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    found = tl.full((BLOCK,), NOTHING, tl.int64)
    for start in tl.static_range(0, CHUNK, BLOCK):
        column = chunk * CHUNK + start + tl.arange(0, BLOCK)
        found = tl.maximum(found, keys_of(logits, row, stride, column, columns, BF16))
    tl.atomic_max(best + row, tl.max(found, 0), sem="relaxed", scope="gpu")
    before = tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        chosen = column_of(tl.atomic_max(best + row, tl.full((), NOTHING, tl.int64), sem="relaxed", scope="gpu"))
        tl.store(token + row, chosen.to(token.dtype.element_ty))
        slot = tl.load(slots + row).to(tl.int64)
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
    BF16: tl.constexpr,
):  # fmt: skip
    """Programs [chunk, row]: the largest key of each of OF groups of LENGTH columns, a column in OF, to int64 [rows, groups]."""
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    valid = valid_columns(seq_lens, row, columns, NEXT_N)
    group = tl.arange(0, OF)
    found = tl.full((OF,), NOTHING, tl.int64)
    for start in range(0, LENGTH, STEP):
        column = chunk * (LENGTH * OF) + (start + tl.arange(0, STEP))[:, None] * OF + group[None, :]
        found = tl.maximum(found, tl.max(keys_of(logits, row, stride, column, valid, BF16), axis=0))
    tl.store(groups + row * (tl.num_programs(0) * OF) + chunk * OF + group, found)


@triton.jit
def ranks_in(mine, base, count, SPAN: tl.constexpr):
    """How many of the ``count`` keys at ``base`` are larger than each of ``mine``."""
    rank = tl.zeros(mine.shape, tl.int32)
    for start in range(0, count, SPAN):
        at = start + tl.arange(0, SPAN)
        other = tl.load(base + at, at < count, NOTHING, cache_modifier=".cg")
        rank += tl.sum((other[None, :] > mine[:, None]).to(tl.int32), axis=1)
    return rank


@triton.jit
def at_least(base, count, threshold, SPAN: tl.constexpr):
    """How many of the keys at ``base`` are the threshold or more; unsigned, NOTHING being 0."""
    total = tl.zeros((), tl.int32)
    for start in range(0, count, SPAN):
        at = start + tl.arange(0, SPAN)
        key = tl.load(base + at, at < count, NOTHING, cache_modifier=".cg") ^ NOTHING
        total += tl.sum(((at < count) & (key.to(tl.uint64, bitcast=True) >= threshold)).to(tl.int32), 0)
    return total


@triton.jit
def choose_few(base, count, indices, K: tl.constexpr, FEW: tl.constexpr, SPAN: tl.constexpr):
    """The K largest of at most FEW keys, each at its rank."""
    at = tl.arange(0, FEW)
    mine = tl.load(base + at, at < count, NOTHING, cache_modifier=".cg")
    rank = ranks_in(mine, base, count, SPAN)
    tl.store(indices + at, -1, (at >= count) & (at < K))
    tl.store(indices + rank, column_of(mine).to(tl.int32), (at < count) & (rank < K))


@triton.jit
def choose_many(base, count, indices, K: tl.constexpr, SPAN: tl.constexpr):
    """The K largest of any number of keys, in the order in which they lie: the K-th is found bit by bit."""
    threshold = tl.zeros((), tl.uint64)
    for bit in range(64):
        higher = threshold | (tl.full((), 1, tl.uint64) << (63 - bit).to(tl.uint64))
        if at_least(base, count, higher, SPAN) >= K:
            threshold = higher
    written = tl.zeros((), tl.int32)
    for start in range(0, count, SPAN):
        at = start + tl.arange(0, SPAN)
        key = tl.load(base + at, at < count, NOTHING, cache_modifier=".cg")
        chosen = ((at < count) & ((key ^ NOTHING).to(tl.uint64, bitcast=True) >= threshold)).to(tl.int32)
        place = written + tl.cumsum(chosen, 0) - 1
        tl.store(indices + place, column_of(key).to(tl.int32), chosen > 0)
        written += tl.sum(chosen, 0)


@triton.jit
def select(
    logits, stride, columns, seq_lens, groups, candidates, found, arrived, indices, K: tl.constexpr, GROUPS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr, SPAN: tl.constexpr, NEXT_N: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """Programs [chunk, row]. K groups have a key as large as the K-th largest of the groups' largest, so none below it is chosen;
    the others of all chunks are candidates, int64 [rows, columns], of which the last program to arrive chooses."""
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    valid = valid_columns(seq_lens, row, columns, NEXT_N)
    group = tl.arange(0, GROUPS)
    largest = tl.load(groups + row * GROUPS + group)
    rank = ranks_in(largest, groups + row * GROUPS, GROUPS, SPAN)
    # Alike are only groups without a number.
    least = tl.max(tl.where(rank >= K - 1, largest, NOTHING), 0)
    base = candidates + row * columns
    for start in range(0, CHUNK, BLOCK):
        column = chunk * CHUNK + start + tl.arange(0, BLOCK)
        key = keys_of(logits, row, stride, column, valid, BF16)
        chosen = ((key >= least) & (key != NOTHING)).to(tl.int32)
        count = tl.sum(chosen, 0)
        if count > 0:
            first = tl.atomic_add(found + row, count, sem="relaxed", scope="gpu")
            tl.store(base + first + tl.cumsum(chosen, 0) - 1, key, chosen > 0)
    tl.debug_barrier()  # every thread's candidates are written before one of them says so
    before = tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        tl.debug_barrier()
        count = tl.atomic_add(found + row, 0, sem="relaxed", scope="gpu")
        if count <= FEW:
            choose_few(base, count, indices + row * K, K, FEW, SPAN)
        else:
            choose_many(base, count, indices + row * K, K, SPAN)
        tl.store(found + row, 0)
        tl.store(arrived + row, 0)
