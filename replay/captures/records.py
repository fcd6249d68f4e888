"""The records of route JSONL, the lab's form and ours, and what may be wrong with one, a record at a time."""

from typing import Any

import msgspec
import numpy as np

BAD_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
F32_MAX = float(np.finfo(np.float32).max)


class LabRecord(msgspec.Struct, frozen=True):
    """One line of the lab's form. ``counts`` stays raw: it is two thirds of the bytes, and is checked in bulk."""

    layer: str
    stage: str
    shape: tuple[int, int]
    num_tokens: int
    top_k: int
    num_experts: int
    assignments: int
    nonzero_experts: int
    max_rows_per_expert: int
    counts: msgspec.Raw
    topk_ids: list[list[int]] | None = None
    ts: float | None = None
    pid: int | None = None
    call: int | None = None
    rank: str | int | None = None
    local_rank: str | int | None = None


class V1Record(msgspec.Struct, frozen=True):
    """One line of form v1: what the lab's form has that cannot be derived, and what a replay wants besides."""

    v: int
    layer: str
    stage: str
    step: int
    phase: str
    num_tokens: int
    top_k: int
    num_experts: int
    topk_ids: list[list[int]]
    topk_weights: list[list[float]] | None = None
    requests: list[str] | None = None
    padding: list[bool] | None = None
    rank: str | int | None = None
    ts: float | None = None


class RecordedV1(V1Record, frozen=True):
    """A line that the recorder writes. ``positions``: each token's place in its sequence; ``call_rows``: rows of the call, those
    that a filter left out included."""

    positions: list[int] | None = None
    call_rows: int | None = None


Told = tuple[str, str, str] | None


def _check_common(r: Any) -> Told:
    for name in ("num_tokens", "top_k", "num_experts"):
        if getattr(r, name) < 1:
            return name, "a positive number", str(getattr(r, name))
    for name in ("topk_ids", "topk_weights"):
        rows = getattr(r, name, None)
        if rows is None:
            continue
        if len(rows) != r.num_tokens:
            return name, f"{r.num_tokens} rows, as num_tokens says", str(len(rows))
        for t, row in enumerate(rows):
            if len(row) != r.top_k:
                return f"{name}[{t}]", f"{r.top_k} values, as top_k says", str(len(row))
    for t, row in enumerate(r.topk_ids or ()):
        seen: set[int] = set()
        for j, expert in enumerate(row):
            if not -1 <= expert < r.num_experts:
                return f"topk_ids[{t}][{j}]", f"0 ≤ id < {r.num_experts}, or -1", str(expert)
            if expert >= 0 and expert in seen:
                return f"topk_ids[{t}][{j}]", "an id not used before in this token", str(expert)
            seen.add(expert)
    for t, weight_row in enumerate(getattr(r, "topk_weights", None) or ()):
        for j, weight in enumerate(weight_row):
            if not abs(weight) <= F32_MAX:
                return f"topk_weights[{t}][{j}]", "a finite f32", str(weight)
    return None


def check_v1(r: V1Record) -> Told:
    """(field, expected, got) of the first thing wrong with a record of form v1, or None."""
    if told := _check_common(r):
        return told
    for name in ("padding", "requests"):
        value = getattr(r, name)
        if value is not None and len(value) != r.num_tokens:
            return name, f"{r.num_tokens} values, as num_tokens says", str(len(value))
    return None


def check_lab(r: LabRecord) -> Told:
    """(field, expected, got) of the first thing wrong with a record of the lab's form, or None."""
    if tuple(r.shape) != (r.num_tokens, r.top_k):
        return "shape", f"[{r.num_tokens}, {r.top_k}], as num_tokens and top_k say", str(list(r.shape))
    if told := _check_common(r):
        return told
    try:
        counts = msgspec.json.decode(r.counts, type=list[int])
    except BAD_JSON as error:
        return "counts", "a list of integers", short(str(error))
    if len(counts) != r.num_experts:
        return "counts", f"{r.num_experts} values, as num_experts says", str(len(counts))
    for e, count in enumerate(counts):
        if count < 0:
            return f"counts[{e}]", "0 or more", str(count)
    if r.topk_ids is not None:
        want = np.bincount([e for row in r.topk_ids for e in row if e >= 0], minlength=r.num_experts).tolist()
        for e, (w, c) in enumerate(zip(want, counts, strict=True)):
            if w != c:
                return f"counts[{e}]", f"{w}, as topk_ids say", str(c)
    derived = {
        "assignments": sum(counts),
        "nonzero_experts": sum(c > 0 for c in counts),
        "max_rows_per_expert": max(counts),
    }
    for name, value in derived.items():
        if getattr(r, name) != value:
            return name, f"{value}, as counts say", str(getattr(r, name))
    if r.assignments > r.num_tokens * r.top_k:
        return "assignments", f"at most num_tokens·top_k = {r.num_tokens * r.top_k}", str(r.assignments)
    return None


def short(text: str) -> str:
    """At most 120 characters of a text."""
    return text if len(text) <= 120 else text[:117] + "…"
