"""What a capture looks like in numbers: rows, skew, repeats, overlap of routes; shapes, strides and ranges of states;
ties of logits."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from replay.captures.gates import open_gates
from replay.captures.logits import open_logits
from replay.captures.manifest import Capture
from replay.captures.routes import read_batches
from replay.captures.select import layer_label
from replay.captures.states import open_states
from replay.captures.tensors import TensorFile, holds_of


def gini(counts: NDArray[np.int64]) -> float:
    """Gini coefficient of tokens per expert: 0 = all experts alike, towards 1 = few experts do it all."""
    n = len(counts)
    return float((2 * np.arange(1, n + 1) - n - 1) @ np.sort(counts) / (n * max(int(counts.sum()), 1)))


def repeat_rate(rows: list[tuple[int, ...]]) -> float:
    """Share of tokens whose set of experts occurred before in the layer."""
    seen: set[frozenset[int]] = set()
    repeats = 0
    for row in rows:
        ids = frozenset(row)
        repeats += ids in seen
        seen.add(ids)
    return repeats / max(len(rows), 1)


def overlap(rows: list[tuple[int, ...]]) -> float:
    """Mean number of experts that neighbouring tokens share."""
    return float(np.mean([len(set(a) & set(b)) for a, b in itertools.pairwise(rows)])) if len(rows) > 1 else 0.0


@dataclass
class LayerSummary:
    """Running figures of one (layer, stage, rank); memory grows with distinct expert sets, not with tokens."""

    counts: NDArray[np.int64]
    records: int = 0
    tokens: int = 0
    repeats: int = 0
    shared: int = 0
    neighbours: int = 0
    seen: set[bytes] = field(default_factory=set)
    last: set[int] | None = None
    per_call: Counter[int] = field(default_factory=Counter)

    def add(self, ids: NDArray[np.int64]) -> None:
        """One token row."""
        key = np.sort(ids).astype(np.int16).tobytes()
        self.repeats += key in self.seen
        self.seen.add(key)
        row = set(ids[ids >= 0].tolist())
        if self.last is not None:
            self.shared += len(row & self.last)
            self.neighbours += 1
        self.last = row
        self.tokens += 1

    def figures(self) -> list[str]:
        """Cells of the summary's table, in the order of ``HEADERS``."""
        if not self.tokens:
            return [str(self.records), "0", *["–"] * (len(HEADERS) - 5)]
        return [
            str(self.records),
            str(self.tokens),
            f"{self.tokens / self.records:.2f}, {max(self.per_call)}",
            str(int(np.count_nonzero(self.counts))),
            f"{gini(self.counts):.3f}",
            str(len(self.seen)),
            f"{self.repeats / self.tokens:.3f}",
            f"{self.shared / max(self.neighbours, 1):.2f}",
        ]


HEADERS = [
    "layer", "stage", "rank", "records", "token rows", "a call: mean, most", "experts seen", "gini", "distinct sets",
    "repeat rate", "overlap",
]  # fmt: skip


def summarise(capture: Capture) -> dict[tuple[str, str, str], LayerSummary]:
    """Figures per (layer label, stage, rank), in order of first appearance."""
    found: dict[tuple[str, str, str], LayerSummary] = {}
    for batch in read_batches(capture.routes):
        for i, key in enumerate(zip(map(layer_label, batch.layers), batch.stages, batch.ranks, strict=True)):
            layer = found.setdefault(key, LayerSummary(np.zeros(batch.num_experts, np.int64)))
            layer.records += 1
            if batch.topk_ids is None:
                continue
            ids = batch.topk_ids[i][list(batch.real_tokens(i))]
            layer.per_call[len(ids)] += 1
            layer.counts += np.bincount(ids[ids >= 0], minlength=len(layer.counts))
            for row in ids:
                layer.add(row)
    return found


STATE_HEADERS = ["layer", "tensor", "dtype", "shape", "table", "least", "largest"]


def summarise_tensors(path: Path) -> Iterator[list[str]]:
    """A line a tensor of a state or gate file: where it was a row of a table, that table's shape and stride."""
    states = holds_of(path) == "states"
    file: TensorFile = open_states(path) if states else open_gates(path)
    caches = open_states(path).caches if states else {}
    for name in file.entries:
        array = file.tensor(name)
        values = (array.astype(np.uint32) << 16).view(np.float32) if file.dtype(name) == "bf16" else array
        table = caches.get(name)
        of = f"{list(table.shape)} by {list(table.stride)} + {table.storage_offset}" if table else ""
        ends = [f"{end:.4g}" for end in (values.min(), values.max())] if values.size else ["", ""]
        yield [layer_label(file.layer), name, file.dtype(name), str(list(array.shape)), of, *ends]


TIES_AT = (1, 20)
LOGIT_HEADERS = ["layer", "dtype", "shape", "requests", "least", "largest", *(f"ties at {k}" for k in TIES_AT)]


def summarise_logits(path: Path) -> list[str]:
    """One line: shape and range, and in what share of rows the k-th largest logit ties with the next, so that k of them are no
    one selection. Row by row, since a file may be large."""
    file = open_logits(path)
    held = file.tensor("logits")
    least, largest, ties = np.inf, -np.inf, dict.fromkeys((k for k in TIES_AT if k < held.shape[1]), 0)
    for row in held:
        values = (row.astype(np.uint32) << 16).view(np.float32) if held.dtype == np.uint16 else np.asarray(row)
        least, largest = min(least, float(values.min())), max(largest, float(values.max()))
        for k in ties:
            top = np.partition(values, [-k - 1, -k])
            ties[k] += int(top[-k] == top[-k - 1])
    requests = len(np.unique(file.tensor("request")))
    shares = [f"{ties[k] / len(held):.0%}" if k in ties else "" for k in TIES_AT]
    return [file.layer, file.dtype("logits"), str(list(held.shape)), str(requests), f"{least:.4g}", f"{largest:.4g}", *shares]
