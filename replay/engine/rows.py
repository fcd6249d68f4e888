"""Whose rows a step's tensors hold, and which of them are recorded. Arrays and no tensors: tested without an engine."""

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from replay.engine.config import Record


class Batch(NamedTuple):
    """One step's requests in the order of their rows: id, rows in the step, tokens computed before it, tokens of the prompt,
    tokens known (the prompt and the answer so far); and the rows that the layers' calls had, padding included."""

    requests: tuple[str, ...]
    rows: tuple[int, ...]
    computed: tuple[int, ...]
    prompts: tuple[int, ...]
    known: tuple[int, ...]
    padded: int


@dataclass(frozen=True)
class Rows:
    """The rows that are recorded. ``kept`` are their places in the batch; ``owner``, ``position`` and ``decodes`` as a recorded
    step has them; ``sampled``: (requests that sample a token, the rows that they do it from)."""

    requests: tuple[str, ...]
    owner: tuple[int, ...]
    position: tuple[int, ...]
    decodes: tuple[bool, ...]
    kept: NDArray[np.int64]
    batch_rows: int
    sampled: tuple[NDArray[np.int64], NDArray[np.int32]]

    def decoded(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """(places, row numbers) of the first ``count`` rows of the batch, which decode, as far as they are recorded."""
        numbers = np.flatnonzero(self.kept < count)
        return self.kept[numbers], numbers.astype(np.int32)


def select(batch: Batch, record: Record) -> Rows:
    """The rows of a step that the phases and the requests asked for leave. Padding stays where no request is asked for.

    A row decodes where it is the last token known of its request and none of its prompt: what a preempted request computes again
    is prefill, as its prompt was.
    """
    rows, computed, prompts, known = (np.array(v, np.int64) for v in (batch.rows, batch.computed, batch.prompts, batch.known))
    owner = np.repeat(np.arange(len(rows)), rows)
    first = np.cumsum(rows) - rows
    position = np.arange(len(owner)) - first[owner] + computed[owner]
    decodes = position >= np.maximum(prompts, known - 1)[owner]
    chosen = np.array([re.search(record.requests, name) is not None for name in batch.requests], bool)
    keep = np.isin(np.where(decodes, "decode", "prefill"), record.phases) & chosen[owner]
    kept = np.flatnonzero(keep)
    padding = np.arange(len(owner), batch.padded) if not record.requests and len(kept) else np.arange(0)
    there = np.unique(owner[kept])
    place = np.full(len(rows), -1)
    place[there] = np.arange(len(there))
    # A request samples from its last row, once everything that is known of it was computed.
    last = first + rows - 1
    done = np.flatnonzero((computed + rows >= known) & keep[last]) if len(rows) else last
    none = len(padding)
    return Rows(
        requests=tuple(batch.requests[i] for i in there), owner=(*place[owner[kept]].tolist(), *[-1] * none),
        position=(*position[kept].tolist(), *[0] * none), decodes=(*decodes[kept].tolist(), *[False] * none),
        kept=np.concatenate([kept, padding]).astype(np.int64), batch_rows=max(batch.padded, len(owner)),
        sampled=(done, np.searchsorted(kept, last[done]).astype(np.int32)),
    )  # fmt: skip
