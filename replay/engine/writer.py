"""Writes a rank's journal on a thread of its own: the engine's thread hands over what it copied, and goes on.

A step that finds the buffer full is dropped and counted. Whatever stops the writer (a limit, a full disk) is said in the log and
in the journal; the server goes on either way.
"""

import itertools
import os
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from replay.captures import recording
from replay.captures.manifest import MANIFEST
from replay.captures.recording import COUNTERS, Call, End, Frame, Head, Part, Step, Weights
from replay.engine import log
from replay.engine.config import Record
from replay.engine.rows import Batch, Rows, select
from replay.errors import InputError

_AT = {name: place for place, name in enumerate(COUNTERS)}
_TORCH = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int32": "i32", "int64": "i64"}

Tensors = dict[str, Any]  # name → torch tensor
Routed = tuple[str, Any, Any]  # layer, ids, weights or None


class Seen(NamedTuple):
    """What one layer saw, copied. ``rows``: how its tensors' first axis is to be cut: all rows, decode rows, or requests."""

    what: str
    layer: str
    tensors: Tensors


class Offered(NamedTuple):
    """One step on its way to the writer; ``batch`` is who its rows belong to."""

    seq: int
    step: int
    at_ns: int
    batch: Batch
    routed: Sequence[Routed]
    calls: Sequence[Seen]
    nbytes: int
    ready: Any  # an event of the device that holds the tensors: until it has come they are not what was seen


class NotOurs(InputError):
    """A folder that somebody else records to, or has: nothing is to be left in it."""


class Writer:
    """One rank's journal: open until a limit, a fault or ``close``. InputError where the folder is not to be had."""

    def __init__(self, record: Record, head: Head) -> None:
        from filelock import FileLock, Timeout

        self.record, self.folder = record, Path(record.folder)
        self.path = recording.journal_path(self.folder, head.rank)
        try:
            _make(self.folder)
            if (self.folder / MANIFEST).exists():
                raise FileExistsError(17, "file exists", str(self.folder / MANIFEST))
            self.lock = FileLock(recording.lock_path(self.folder, head.rank))
            self.lock.acquire(timeout=0)
            self.fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            self.counters = recording.open_counters(recording.counters_path(self.folder, head.rank))
        except Timeout:
            got = f"rank {head.rank} is being written"
            raise NotOurs(record.folder, "folder", "one that no other server writes to", got) from None
        except FileExistsError as error:
            raise NotOurs(record.folder, "folder", "one without a recording", Path(error.filename).name) from None
        except OSError as error:
            expected = "a folder that can be written"
            raise InputError(record.folder, "folder", expected, (error.strerror or str(error)).lower()) from None
        self.limit = record.buffer_mib << 20
        self.given = self.seq = 0  # of the engine's thread alone
        self.taken = self.length = self.lines = self.tokens = 0  # of the writer's
        self.stopped = self.failed = ""
        self.on_cpu = False  # until the first tensor was seen
        self.queue: queue.SimpleQueue[Offered | Weights | tuple[Weights, Tensors] | None] = queue.SimpleQueue()
        try:
            self._append([recording.MAGIC, *recording.encoded(head)])
        except OSError as error:
            self.path.unlink()
            raise InputError(record.folder, "folder", "room to write", (error.strerror or str(error)).lower()) from None
        self.thread = threading.Thread(target=self._work, name="b70-record", daemon=True)
        self.thread.start()

    # ------------------------------------------------------------ the engine's thread

    def offer(self, step: int, batch: Batch, routed: Sequence[Routed], calls: Sequence[Seen], nbytes: int) -> None:
        """Hand over a step of so many bytes; dropped and counted where the buffer is full. The last thing that a step does: the
        writer's thread then wants the interpreter."""
        ready = None if self.on_cpu else self._event(routed, calls)
        offered = Offered(self.seq, step, time.time_ns(), batch, routed, calls, nbytes, ready)
        self.seq += 1
        if self.given - self.taken + nbytes > self.limit:
            self.counters[_AT["dropped"]] += 1
            return
        self.given += nbytes
        self.queue.put(offered)

    def _event(self, routed: Sequence[Routed], calls: Sequence[Seen]) -> Any:
        """An event behind what made the tensors, None on a CPU: on a device the writer's thread has another stream."""
        import torch

        device = routed[0][1].device if routed else next(iter(calls[0].tensors.values())).device
        self.on_cpu = device.type == "cpu"
        return None if self.on_cpu else torch.accelerator.current_stream(device.index).record_event()

    def weights(self, weights: Weights, tensors: Tensors) -> None:
        """Hand over what a layer holds from step to step."""
        self.queue.put((weights, tensors))

    def count(self, steps: int, offered: int, calls: int, hook_ns: int, step_ns: int) -> None:
        """Publish what the hooks counted."""
        self.counters[:5] = steps, offered, calls, hook_ns, step_ns

    def fail(self, why: str) -> None:
        """Write what waits, and that a hook failed."""
        self.failed = why
        self.queue.put(None)

    def close(self, timeout_s: float = 30) -> None:
        """Write what waits, and an end."""
        self.queue.put(None)
        self.thread.join(timeout_s)

    # ------------------------------------------------------------ the writer's thread

    def _work(self) -> None:
        while (item := self.queue.get()) is not None:
            if not self.stopped:
                try:
                    self._take(item)
                except OSError as error:
                    self._stop(f"the disk: {(error.strerror or str(error)).lower()}", ok=False)
                except Exception as error:  # whatever it is, the server goes on and the capture says why it ends
                    self._stop(f"{type(error).__name__}: {error}", ok=False)
            if isinstance(item, Offered):
                self.taken += item.nbytes
        if not self.stopped:
            self._stop(self.failed or "the server stopped", ok=not self.failed)

    def _take(self, item: Any) -> None:
        if isinstance(item, Offered):
            if item.ready is not None:
                item.ready.synchronize()
            self._step(item)
            return
        weights, tensors = item
        held = {name: numpy_of(tensor) for name, tensor in on_host(tensors).items()}
        self._append(recording.encoded(_with_parts(weights, held), [bytes_of(a) for _, a in held.values()]))

    def _step(self, offered: Offered) -> None:
        rows = select(offered.batch, self.record)
        if not len(rows.kept):
            self._written(offered, 0, 0)
            return
        calls, payload = [], []
        for alike in _alike(offered.routed):
            made, data = _routers(alike, rows)
            calls += made
            payload.append(data)
        for seen in offered.calls:
            held = _cut(seen, {name: numpy_of(tensor) for name, tensor in on_host(seen.tensors).items()}, rows)
            if held is None:
                continue
            calls.append(Call(seen.what, seen.layer, tuple(Part(n, d, a.shape) for n, (d, a) in held.items())))
            payload += [bytes_of(a) for _, a in held.values()]
        step = Step(
            seq=offered.seq, step=offered.step, at_ns=offered.at_ns, requests=rows.requests, owner=rows.owner,
            position=rows.position, decodes=rows.decodes, batch_rows=rows.batch_rows, calls=tuple(calls),
        )  # fmt: skip
        self._append(recording.encoded(step, payload))
        self._written(offered, sum(call.what == "router" for call in calls), sum(o >= 0 for o in rows.owner))

    def _written(self, offered: Offered, lines: int, tokens: int) -> None:
        """Count a step that is on its way to the disk, and stop where a limit is reached."""
        self.lines += lines
        self.tokens += tokens
        self.counters[_AT["written"]] += 1
        self.counters[_AT["tokens"]] = self.tokens
        for name, value in (("max_tokens", self.tokens), ("max_lines", self.lines), ("max_bytes", self.length)):
            limit = getattr(self.record, name)
            if limit and value >= limit:
                self._stop(f"{name} = {limit:,} is reached", ok=True)
                return

    def _append(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Append a frame whole, or leave the journal as it was."""
        data = b"".join(pieces)
        try:
            done = 0
            while done < len(data):
                done += os.write(self.fd, memoryview(data)[done:])
        except OSError:
            os.ftruncate(self.fd, self.length)
            raise
        self.length += len(data)

    def _stop(self, why: str, *, ok: bool) -> None:
        self.stopped = why
        self.counters[_AT["ended"]] = 1
        (log.info if ok else log.error)("recording ends: %s; the server goes on", why)
        try:
            self._append(recording.encoded(End(why=why, ok=ok)))
        except OSError:
            if not ok:  # the disk is full: the end is told by the log and by a file of a few bytes, if one fits
                _try_refuse(self.folder, why)


def _make(folder: Path) -> None:
    """The folder; NotADirectoryError where something else is in its place."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(20, "not a directory", str(folder))
    folder.mkdir(parents=True, exist_ok=True)


def _try_refuse(folder: Path, why: str) -> None:
    try:
        recording.refuse(folder, why)
    except OSError:
        log.error("not even that could be written to %s", folder)


def on_host(tensors: Tensors) -> Tensors:
    """The tensors on the CPU: those of a device come in one copy."""
    import torch

    away = {name: t for name, t in tensors.items() if t.device.type != "cpu"}
    if not away:
        return tensors
    flat = torch.cat([t.contiguous().reshape(-1).view(torch.uint8) for t in away.values()]).cpu()
    found, at = dict(tensors), 0
    for name, t in away.items():
        found[name] = flat[at : at + t.nbytes].view(t.dtype).reshape(t.shape)
        at += t.nbytes
    return found


def numpy_of(tensor: Any) -> tuple[str, NDArray[Any]]:
    """(dtype by our name, the elements) of a torch tensor on the CPU; bf16 as bit patterns."""
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    tensor = tensor.detach().contiguous()
    array = tensor.view(torch.int16).numpy().view(np.uint16) if name == "bfloat16" else tensor.numpy()
    return _TORCH[name], array


def _alike(routed: Sequence[Routed]) -> list[list[Routed]]:
    """Routes in runs of one shape and dtype: a model whose layers are alike has one run a step."""

    def shape(one: Routed) -> Any:
        _, ids, weights = one
        return ids.shape, ids.dtype, weights is None or weights.dtype

    return [list(run) for _, run in itertools.groupby(routed, key=shape)]


def _routers(routed: Sequence[Routed], rows: Rows) -> tuple[list[Call], memoryview]:
    """The calls of routers that are alike, and their payload: a layer's ids, then its weights. All layers at once, since while
    this thread works in Python the engine's waits."""
    import torch

    tensors = {"ids": torch.stack([ids for _, ids, _ in routed])}
    if routed[0][2] is not None:
        tensors["weights"] = torch.stack([weights for _, _, weights in routed])
    held = {name: numpy_of(tensor) for name, tensor in on_host(tensors).items()}
    cut = {name: (dtype, np.ascontiguousarray(array[:, rows.kept])) for name, (dtype, array) in held.items()}
    parts = tuple(Part(name, dtype, array.shape[1:]) for name, (dtype, array) in cut.items())
    flat = np.concatenate([array.view(np.uint8).reshape(len(routed), -1) for _, array in cut.values()], axis=1)
    return [Call("router", layer, parts) for layer, _, _ in routed], bytes_of(flat)


def bytes_of(array: NDArray[Any]) -> memoryview:
    """An array's elements as bytes, in order."""
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))  # type: ignore[arg-type]  # an array is a buffer


def _with_parts(weights: Weights, held: dict[str, tuple[str, NDArray[Any]]]) -> Frame:
    import msgspec

    return msgspec.structs.replace(weights, parts=tuple(Part(n, d, a.shape) for n, (d, a) in held.items()))


def _cut(seen: Seen, held: dict[str, tuple[str, NDArray[Any]]], rows: Rows) -> dict[str, tuple[str, NDArray[Any]]] | None:
    """A call's tensors, cut to the rows that are recorded; None where none is left."""
    if seen.what == "gate":
        return {name: (d, a[rows.kept]) for name, (d, a) in held.items()} if len(rows.kept) else None
    if seen.what == "lm_head":
        kept, numbers = rows.sampled
    else:
        count = len(next(iter(held.values()))[1])
        kept, numbers = rows.decoded(count)
    if not len(kept):
        return None
    return {"row": ("i32", numbers), **{name: (d, a[kept]) for name, (d, a) in held.items()}}
