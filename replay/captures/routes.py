"""Read route JSONL, the lab's form or our form v1, as a stream of checked batches.

The file is read in blocks of whole lines and memory stays flat whatever its size. Decoding is msgspec's; the checks
between fields are made on numpy arrays, a batch at a time, and only a batch that fails one is walked line by line to
say where. Nothing here selects or interprets rows.
"""

import contextlib
import gc
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.captures.explain import explain
from replay.captures.records import BAD_JSON, F32_MAX, LabRecord, Told, V1Record, check_lab, check_v1, short
from replay.errors import InputError

BLOCK_BYTES = 1 << 15  # a block's Python objects then stay in a core's cache; larger ones read at half the speed
COMPRESSED_BYTES = 1 << 10  # what one read of a frame may expand to is a multiple of this
MAX_LINE_BYTES = 64 << 20  # a 2048-token prefill call with 1024 counts is under 1 MiB; beyond this it is no route file


@dataclass(frozen=True)
class Batch:
    """Consecutive checked records of one shape; ``lines`` are their raw bytes, unknown fields and all.

    ``topk_ids`` int64 [records, tokens, k], or None where ids were not captured; ``topk_weights`` float64 of the same
    shape, or None; ``first_line`` counts from 1.
    """

    first_line: int
    block: bytes
    block_first_line: int
    layers: list[str]
    stages: list[str]
    ranks: list[str]
    num_tokens: int
    top_k: int
    num_experts: int
    topk_ids: NDArray[np.int64] | None
    topk_weights: NDArray[np.float64] | None
    padding: list[list[bool] | None] | None
    form: str

    def real_tokens(self, record: int) -> Sequence[int]:
        """The token rows of a record that are not padding."""
        flags = self.padding[record] if self.padding is not None else None
        return range(self.num_tokens) if flags is None else [t for t, padded in enumerate(flags) if not padded]

    @property
    def lines(self) -> list[bytes]:
        """The records as they stand in the file."""
        start = self.first_line - self.block_first_line
        return self.block.split(b"\n")[start : start + len(self.layers)]


@contextlib.contextmanager
def _no_gc() -> Iterator[None]:
    """Decoding makes lists by the hundred thousand and no cycle: the collector would only walk them again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def read_batches(path: Path) -> Iterator[Batch]:
    """Yield the file's records as checked batches, in file order.

    Raises InputError naming file, line and field at the first record that breaks the form. An empty file is an error.
    """
    if path.is_dir():
        raise InputError(str(path), "path", "a route JSONL file, or a capture folder with a manifest", "a directory")
    try:
        with path.open("rb") as raw:
            yield from _read_open(path, _decompressed(raw, path))
    except FileNotFoundError:
        raise InputError(str(path), "path", "a readable file", "no such file") from None
    except PermissionError:
        raise InputError(str(path), "path", "a readable file", "permission denied") from None


def _decompressed(raw: io.BufferedReader, path: Path) -> Any:
    return _Frames(raw, path) if path.suffix == ".zst" else raw


class _Frames:
    """Reads the zstd frames of a file one after another; a last frame that is cut short is an error, not an end."""

    def __init__(self, raw: io.BufferedReader, path: Path) -> None:
        import zstandard

        self.raw, self.path = raw, path
        self.new = zstandard.ZstdDecompressor().decompressobj
        self.frame: Any = None
        self.ready = bytearray()

    def read(self, size: int) -> bytes:
        """Up to ``size`` bytes; none at the end."""
        import zstandard

        while len(self.ready) < size:
            data = self.raw.read(COMPRESSED_BYTES)
            if not data:
                if self.frame is not None:
                    raise InputError(str(self.path), "file", "a whole zstd stream", "one that is cut short")
                break
            try:
                while data:
                    self.frame = self.frame or self.new()
                    self.ready += self.frame.decompress(data)
                    data = self.frame.unused_data
                    if self.frame.eof:
                        self.frame = None
            except zstandard.ZstdError as error:
                raise InputError(str(self.path), "file", "a zstd stream", str(error)) from None
        out = bytes(self.ready[:size])
        del self.ready[:size]
        return out


def _read_open(path: Path, stream: Any) -> Iterator[Batch]:
    reader: _Form | None = None
    line_no = 1
    for block in _whole_lines(path, stream):
        if reader is None:
            reader = _form_of(path, block)
        with _no_gc():
            batches = reader.batches(block.removesuffix(b"\n"), line_no)
        yield from batches
        line_no += sum(len(batch.layers) for batch in batches)
    if reader is None:
        raise InputError(str(path), "file", "at least one record", "an empty file")


def read_lines(path: Path, places: Sequence[tuple[int, int]]) -> Iterator[Batch]:
    """Lines of a plain file by (number, offset), each checked as ``read_batches`` does; InputError as there."""
    with path.open("rb") as stream:
        form = _form_of(path, stream.readline())
        for number, offset in places:
            stream.seek(offset)
            yield from form.batches(stream.readline().removesuffix(b"\n"), number)


def _whole_lines(path: Path, stream: Any) -> Iterator[bytes]:
    """Blocks that end at a line's end; only the file's last line may lack its newline."""
    rest = b""
    while block := stream.read(BLOCK_BYTES):
        cut = block.rfind(b"\n") + 1
        if cut == 0:
            rest += block
            if len(rest) > MAX_LINE_BYTES:
                raise InputError(str(path), "line", f"at most {MAX_LINE_BYTES} bytes", "a longer one")
            continue
        yield rest + block[:cut]
        rest = block[cut:]
    if rest:
        yield rest


def _form_of(path: Path, block: bytes) -> "_Form":
    """The first line decides; a file that mixes forms fails at the line that differs."""
    first = block.split(b"\n", 1)[0]
    try:
        head = msgspec.json.decode(first)
    except BAD_JSON as error:
        raise InputError(f"{path}:1", "line", "a JSON object", short(str(error))) from None
    if isinstance(head, dict) and "v" in head:
        if head["v"] != 1:
            raise InputError(f"{path}:1", "v", "1", repr(head["v"]))
        return _Form(path, "v1", V1Record, check_v1)
    return _Form(path, "lab", LabRecord, check_lab)


class _Form:
    """Decodes lines of one form and checks them in bulk."""

    def __init__(self, path: Path, name: str, record: type[Any], check: Callable[[Any], Told]) -> None:
        self.path, self.name, self.record, self.check = path, name, record, check
        self.array_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(list[record])  # type: ignore[valid-type]  # a type held in a variable
        self.decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(record)

    def batches(self, block: bytes, first_line: int) -> list[Batch]:
        """Checked batches of a block of lines; runs of equal shape become one batch."""
        records = self._decode(block, first_line)
        shapes = list(map(_shape_of, records))
        if len(set(shapes)) == 1:
            return [self._batch(records, block, first_line, first_line)]
        found, start = [], 0
        for _, run in groupby(shapes):
            stop = start + len(list(run))
            found.append(self._batch(records[start:stop], block, first_line, first_line + start))
            start = stop
        return found

    def _decode(self, block: bytes, first_line: int) -> list[Any]:
        """The block's records, in one call where every line is one object, else line by line to say which is not."""
        joined = block.replace(b"}\n{", b"},{")
        if b"\n" not in joined:
            try:
                records: list[Any] = self.array_decoder.decode(b"[" + joined + b"]")
                if len(records) == block.count(b"\n") + 1:
                    return records
            except BAD_JSON:
                pass
        records = []
        for number, line in enumerate(block.split(b"\n"), first_line):
            try:
                records.append(self.decoder.decode(line))
            except BAD_JSON as error:
                raise explain(f"{self.path}:{number}", line, self.record, error) from None
        return records

    def _batch(self, records: list[Any], block: bytes, block_first_line: int, first_line: int) -> Batch:
        head = records[0]
        tokens, k, experts = head.num_tokens, head.top_k, head.num_experts
        try:
            if k < 1 or tokens < 1 or experts < 1:
                raise _Suspect
            ids = _dense(records, "topk_ids", tokens, k, np.int64)
            weights = _dense(records, "topk_weights", tokens, k, np.float64) if self.name == "v1" else None
            if not _bulk_ok(records, ids, weights, experts, self.name):
                raise _Suspect
        except _Suspect:
            for number, record in enumerate(records, first_line):
                if told := self.check(record):
                    raise InputError(f"{self.path}:{number}", *told) from None
            raise
        padding = list(map(attrgetter("padding"), records)) if self.name == "v1" else None
        return Batch(
            first_line, block, block_first_line, list(map(_layer, records)), list(map(_stage, records)),
            _ranks(records, self.name), tokens, k, experts, ids, weights, padding, self.name,
        )  # fmt: skip


class _Suspect(Exception):
    """A bulk check failed: walk the records one by one."""


_shape_of = attrgetter("num_tokens", "top_k", "num_experts")
_layer, _stage, _rank = attrgetter("layer"), attrgetter("stage"), attrgetter("rank")


def _ranks(records: list[Any], form: str) -> list[str]:
    """The lab's launcher left ``rank`` empty and filled ``local_rank``."""
    ranks = list(map(_rank, records))
    if form == "lab" and ("" in ranks or None in ranks):
        ranks = [r.local_rank if r.rank in (None, "") else r.rank for r in records]
    names = {r: "" if r is None else str(r) for r in set(ranks)}
    return [names[r] for r in ranks]


def _dense(records: list[Any], field: str, tokens: int, k: int, dtype: type[Any]) -> NDArray[Any] | None:
    """One nested field of all records as [records, tokens, k], or None where no record has it."""
    nested = list(map(attrgetter(field), records))
    if None in nested:
        if any(value is not None for value in nested):
            raise _Suspect
        return None
    rows = list(chain.from_iterable(nested))
    if len(rows) != len(nested) * tokens or set(map(len, rows)) != {k} or set(map(len, nested)) != {tokens}:
        raise _Suspect
    try:
        flat = np.fromiter(chain.from_iterable(rows), dtype, len(rows) * k)
    except OverflowError:  # an integer beyond 64 bits
        raise _Suspect from None
    return flat.reshape(len(nested), tokens, k)


def _bulk_ok(records: list[Any], ids: Any, weights: Any, experts: int, form: str) -> bool:
    if weights is not None and not (np.abs(weights) <= F32_MAX).all():
        return False
    if ids is not None:
        if ids.min() < -1 or ids.max() >= experts:
            return False
        ordered = np.sort(ids, axis=-1)
        if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any():
            return False
    if form == "v1":
        tokens = records[0].num_tokens
        listed = chain(map(attrgetter("padding"), records), map(attrgetter("requests"), records))
        return set(map(len, [v for v in listed if v is not None])) <= {tokens}
    return _lab_counts_ok(records, ids, experts)


def _lab_counts_ok(records: list[Any], ids: Any, experts: int) -> bool:
    """counts, assignments, nonzero_experts and max_rows_per_expert against one another and against the ids."""
    head = records[0]
    if set(map(_shape, records)) != {(head.num_tokens, head.top_k)}:
        return False
    n = len(records)
    counts = _counts(records, experts)
    try:
        told = np.fromiter(chain.from_iterable(map(_told, records)), np.int64, 3 * n).reshape(-1, 3)
    except OverflowError:  # an integer beyond 64 bits
        return False
    total = counts.sum(1, dtype=np.int64 if counts.dtype == np.int64 else np.uint32)
    if (total != told[:, 0]).any():
        return False
    if ids is not None and head.num_tokens == 1:
        # The ids of one token are distinct: a 1 at each of them and nothing beside is all there is to count.
        flat = ids[:, 0, :]
        valid = np.count_nonzero(flat >= 0, axis=1)
        ones = counts[np.arange(n)[:, None], flat] == 1
        return bool(
            (ones | (flat < 0)).all() and (total == valid).all() and (told[:, 1] == valid).all()
            and (told[:, 2] == (valid > 0)).all()
        )  # fmt: skip
    if counts.min() < 0 or (counts.max(1) != told[:, 2]).any() or (np.count_nonzero(counts, axis=1) != told[:, 1]).any():
        return False
    if ids is None:
        return bool((told[:, 0] <= head.num_tokens * head.top_k).all())
    cell = (np.arange(n)[:, None] * experts + ids.reshape(n, -1))[ids.reshape(n, -1) >= 0]
    return bool((np.bincount(cell, minlength=n * experts).reshape(n, experts) == counts).all())


_told = attrgetter("assignments", "nonzero_experts", "max_rows_per_expert")
_shape = attrgetter("shape")


def _counts(records: list[Any], experts: int) -> NDArray[Any]:
    """Counts as [records, experts]. One-digit counts, the rule in decode, are read straight from the bytes."""
    raws = list(map(attrgetter("counts"), records))
    width = 2 * experts + 1
    if set(map(len, raws)) == {width}:
        text = np.frombuffer(b"".join(raws), np.uint8).reshape(len(raws), width)
        digits = text[:, 1::2] - np.uint8(ord("0"))  # wraps past 9 for anything that is no digit
        if digits.max() <= 9 and (text[:, 2:-1:2] == ord(",")).all():
            return digits
    try:
        rows = msgspec.json.decode(b"[" + b",".join(raws) + b"]", type=list[list[int]])
    except BAD_JSON:
        raise _Suspect from None
    if set(map(len, rows)) != {experts}:
        raise _Suspect
    try:
        return np.array(rows, np.int64)
    except OverflowError:
        raise _Suspect from None
