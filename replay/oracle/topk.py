"""Top-k and greedy selection (semantics.md, "Top-k and greedy sampling").

NaN is never selected, ±inf are ordinary values, −0.0 counts as +0.0, and of equal values the lowest index comes first.
"""

import numpy as np

from replay.oracle.arith import F32, I32, I64, U16, bf16_to_f32

NONE = -1


def canonical(logits: U16 | F32) -> F32:
    """f32 of any shape, bf16 bits widened, −0.0 turned into +0.0."""
    wide: F32 = np.asarray(bf16_to_f32(logits.astype(np.uint16)) if logits.dtype == np.uint16 else logits, np.float32)
    return wide + np.float32(0)


def valid_columns(seq_lens: I32, next_n: int, rows: int, vocab: int) -> I64:
    """[rows]: how many columns of row r may be selected, seq_lens[r // next_n] − next_n + r % next_n + 1 within [0, vocab]."""
    row = np.arange(rows)
    last: I64 = seq_lens[row // next_n].astype(np.int64) - next_n + row % next_n + 1
    return np.clip(last, 0, vocab)


def greedy(values: F32) -> I64:
    """[rows]: the lowest index among the maxima of each row of canonical values, −1 for a row of NaN alone."""
    return np.array([top(row, 1)[0] for row in values], np.int64)


def top(row: F32, k: int) -> I64:
    """[k]: indices of the k largest, the largest first and of equals the lowest index first; −1 where fewer exist."""
    numbers = np.flatnonzero(~np.isnan(row))
    values = row[numbers]
    if len(numbers) > k:
        boundary = np.partition(values, -k)[-k]
        above = numbers[values > boundary]
        numbers = np.concatenate([above, numbers[values == boundary][: k - len(above)]])
    found = numbers[np.lexsort((numbers, -row[numbers]))]
    return np.concatenate([found, np.full(k - len(found), NONE, np.int64)])


def rows(values: F32, valid: I64, k: int) -> I32:
    """[rows, k]: ``top`` of each row's valid columns."""
    return np.array([top(row[:columns], k) for row, columns in zip(values, valid, strict=True)], np.int32).reshape(len(values), k)


def merge(values: list[F32], indices: list[I64], k: int) -> I64:
    """[k]: of what each rank selected (its values, and indices into the whole vocabulary, −1 for none) the k that count.

    Ranks in ascending order of their columns; each rank's selection holds its lowest indices first, so the whole's does.
    """
    whole, joined = np.concatenate(indices), np.concatenate(values)
    there = whole != NONE
    whole, joined = whole[there], joined[there]
    order = np.lexsort((whole, -joined))[:k]
    return np.concatenate([whole[order], np.full(k - len(order), NONE, np.int64)])


# ---------------------------------------------------------------- what a kernel selected


def is_selection(row: F32, chosen: I64, k: int) -> bool:
    """Whether k indices hold a right selection of a row of canonical values, whatever their order and whichever of equals.

    Distinct, in range and no NaN; as many as there are to select, −1 in the other places; and nothing that was left out is
    larger than anything chosen. So the multiset of values is that of the k largest.
    """
    there = chosen[chosen != NONE]
    if len(np.unique(there)) < len(there) or np.any((there < 0) | (there >= len(row))):
        return False
    values = row[there]
    if np.isnan(values).any() or len(there) != min(k, np.count_nonzero(~np.isnan(row))):
        return False
    least = values.min(initial=np.float32(np.inf))
    return bool(np.count_nonzero(row > least) == np.count_nonzero(values > least))


def in_order(row: F32, chosen: I64) -> I64:
    """A right selection with the largest first, of equals the lowest index first, and −1 last."""
    there = chosen[chosen != NONE]
    return np.concatenate([there[np.lexsort((there, -row[there]))], chosen[chosen == NONE]])


def lowest_first(row: F32, chosen: I64) -> I64:
    """A right selection in order, its boundary value taken at the lowest indices that have it."""
    ordered = in_order(row, chosen)
    there = ordered[ordered != NONE]
    if not len(there):
        return ordered
    least = row[there[-1]]
    above = np.count_nonzero(row[there] > least)
    ordered[above : len(there)] = np.flatnonzero(row == least)[: len(there) - above]
    return ordered
