"""A sidecar of a route file: where each record begins and whose rows it has, so that a few cases of a large one are read at once.

``routes.jsonl.index.npz`` is made by ``b70-replay capture index``, from a reading with every check on, and holds the file's
sha256: where the file changed since, it is refused. Without one everything works as well, in two readings of the file.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.captures.manifest import Capture
from replay.captures.routes import Batch, read_batches, read_lines
from replay.errors import InputError

SUFFIX = ".index.npz"
Key = tuple[str, str, str]  # layer, stage, rank


@dataclass(frozen=True)
class Index:
    """Of each record: where its line begins, whose it is, its token rows and how many of them are no padding."""

    path: Path
    keys: list[Key]
    sizes: list[tuple[int, int]]  # (num_experts, top_k) that occur
    offset: NDArray[np.int64]
    key: NDArray[np.int32]
    tokens: NDArray[np.int32]
    real: NDArray[np.int32]

    def rows_of(self, key: Key, passes: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(records of a key that pass, the number of the first row behind each)."""
        found = np.flatnonzero(passes & (self.key == self.keys.index(key)))
        return found, np.cumsum(self.real[found], dtype=np.int64)

    def batches(self, records: NDArray[np.int64]) -> Iterator[Batch]:
        """These records, each read and checked by itself."""
        yield from read_lines(self.path, [(int(r) + 1, int(self.offset[r])) for r in records])


def sidecar(path: Path) -> Path:
    """Where the index of a route file lies."""
    return path.with_name(path.name + SUFFIX)


def build(capture: Capture, say: Callable[[str], None] = lambda text: None) -> Index:
    """Read a route file and write its index. InputError for a file that is compressed, or without ids."""
    path = capture.routes
    if path.suffix == ".zst":
        raise InputError(str(path), "path", "a plain JSONL file", "a compressed one")
    keys: dict[Key, int] = {}
    sizes: dict[tuple[int, int], None] = {}
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in ("offset", "key", "tokens", "real")}
    at, records = 0, 0
    for batch in read_batches(path):
        if batch.topk_ids is None:
            raise InputError(f"{path}:{batch.first_line}", "topk_ids", "captured expert ids", "none")
        count = len(batch.layers)
        lengths = np.array([len(line) + 1 for line in batch.lines], np.int64)
        whose = zip(batch.layers, batch.stages, batch.ranks, strict=True)
        columns["offset"].append(at + np.cumsum(lengths) - lengths)
        columns["key"].append(np.array([keys.setdefault(key, len(keys)) for key in whose], np.int32))
        columns["tokens"].append(np.full(count, batch.num_tokens, np.int32))
        columns["real"].append(np.array([len(batch.real_tokens(i)) for i in range(count)], np.int32))
        sizes.setdefault((batch.num_experts, batch.top_k))
        at += int(lengths.sum())
        records += count
        say(f"{records:,} records, {at / 1e6:,.0f} MB of {path.stat().st_size / 1e6:,.0f}")
    arrays = {name: np.concatenate(parts) for name, parts in columns.items()}
    meta = msgspec.json.encode({"sha256": capture.sha256, "keys": list(keys), "sizes": list(sizes)})
    with sidecar(path).open("wb") as stream:
        np.savez(stream, **{"meta": np.frombuffer(meta, np.uint8), **arrays})  # type: ignore[arg-type]  # savez takes arrays by any name
    return Index(path, list(keys), list(sizes), **arrays)


class _Meta(msgspec.Struct, frozen=True):
    sha256: str
    keys: list[Key]
    sizes: list[tuple[int, int]]


def load(capture: Capture) -> Index | None:
    """The index of a capture's routes, None where there is none. InputError for one of another file."""
    path = sidecar(capture.routes)
    if not path.is_file():
        return None
    try:
        held = np.load(path, allow_pickle=False)
        meta = msgspec.json.decode(held["meta"].tobytes(), type=_Meta)
        arrays = {name: held[name] for name in ("offset", "key", "tokens", "real")}
    except (OSError, ValueError, KeyError, msgspec.DecodeError) as error:
        raise InputError(str(path), "index", "one that `b70-replay capture index` made", str(error)) from None
    if meta.sha256 != capture.sha256:
        expected = f"that of the routes, {capture.sha256} (`b70-replay capture index` makes it again)"
        raise InputError(str(path), "sha256", expected, meta.sha256)
    return Index(capture.routes, meta.keys, meta.sizes, **arrays)
