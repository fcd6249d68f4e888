"""Whose rows a step's tensors hold, and which of them are recorded. Arrays and no tensors: tested without an engine."""

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from replay.engine.config import Record


class Batch(NamedTuple):
    """One step's requests in the order of their rows: id, rows in the step, tokens computed before it, tokens of the prompt; and
    the rows that the layers' calls had, padding included."""

    requests: tuple[str, ...]
    rows: tuple[int, ...]
    computed: tuple[int, ...]
    prompts: tuple[int, ...]
    padded: int


@dataclass(frozen=True)
class Rows:
    """The rows that are recorded. ``kept`` are their places in the batch; ``owner`` and ``position`` as a recorded step has them;
    ``sampled``: (requests that sample a token, the rows that they do it from)."""

    requests: tuple[str, ...]
    prompts: tuple[int, ...]
    owner: tuple[int, ...]
    position: tuple[int, ...]
    kept: NDArray[np.int64]
    batch_rows: int
    sampled: tuple[NDArray[np.int64], NDArray[np.int32]]

    def decoded(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """(places, row numbers) of the first ``count`` rows of the batch, which decode, as far as they are recorded."""
        numbers = np.flatnonzero(self.kept < count)
        return self.kept[numbers], numbers.astype(np.int32)


def select(batch: Batch, record: Record) -> Rows:
    """The rows of a step that the phases and the requests asked for leave. Padding stays where no request is asked for."""
    owner = np.repeat(np.arange(len(batch.rows)), batch.rows)
    first = np.cumsum((0, *batch.rows))[:-1]
    position = np.arange(len(owner)) - first[owner] + np.asarray(batch.computed, np.int64)[owner] if len(owner) else owner
    prompts = np.asarray(batch.prompts, np.int64)
    keep = np.isin(np.where(position < prompts[owner], "prefill", "decode"), record.phases) if len(owner) else owner.astype(bool)
    chosen = np.array([re.search(record.requests, name) is not None for name in batch.requests], bool)
    keep &= chosen[owner]
    kept = np.flatnonzero(keep)
    padding = np.arange(len(owner), batch.padded) if not record.requests and len(kept) else np.arange(0)
    known = np.unique(owner[kept])
    place = np.full(len(batch.requests), -1)
    place[known] = np.arange(len(known))
    # A request whose prompt is done samples from its last row.
    last = first + np.asarray(batch.rows, np.int64) - 1 if len(batch.rows) else first
    done = np.flatnonzero(
        [bool(keep[at]) and c + r >= p for at, c, r, p in zip(last, batch.computed, batch.rows, batch.prompts, strict=True)]
    )
    numbers = np.searchsorted(kept, last[done]).astype(np.int32)
    return Rows(
        requests=tuple(batch.requests[i] for i in known), prompts=tuple(int(prompts[i]) for i in known),
        owner=(*place[owner[kept]].tolist(), *[-1] * len(padding)), position=(*position[kept].tolist(), *[0] * len(padding)),
        kept=np.concatenate([kept, padding]).astype(np.int64), batch_rows=max(batch.padded, len(owner)), sampled=(done, numbers),
    )  # fmt: skip
