"""A recording: what a rank of a running engine appends while it serves, one frame a step, until it is made a capture.

A journal is ``MAGIC`` and then frames: the length of a JSON head and of a payload, a CRC-32 over both, the two themselves. A
frame that a kill, a full disk or a limit cut short is therefore known, and everything before it holds. Beside each journal lie
its counters, in a file that the engine maps and that outlives it: what was offered, dropped and written, and what it cost.

Nothing here knows vLLM or torch; ``replay.engine`` writes these files, ``replay.captures.close`` reads them.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.errors import InputError
from replay.model import Geometry

FORM = "b70-recording/1"
MAGIC = b"B70REC1\n"
_LENGTHS = struct.Struct("<IIQ")  # head bytes, CRC-32 of head and payload, payload bytes
_HEAD_LIMIT = 64 << 20
NUMPY = {"bf16": "<u2", "f16": "<f2", "f32": "<f4", "i32": "<i4", "i64": "<i8"}


class Head(msgspec.Struct, frozen=True, tag="head", kw_only=True):
    """What a journal begins with: who writes it, and what it is told to write. ``expected``: the ranks that record beside it."""

    form: str
    rank: int
    expected: tuple[int, ...]
    pid: int
    versions: dict[str, str]
    model: str
    geometry: Geometry
    record: dict[str, Any]


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a call; the payload holds a frame's parts one behind the other. bf16 as bit patterns."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(NUMPY[self.dtype]).itemsize


class Call(msgspec.Struct, frozen=True, array_like=True):
    """What one layer saw in a step. ``what``: router, gate, gdn, gdn_z or lm_head."""

    what: str
    layer: str
    parts: tuple[Part, ...]


class Step(msgspec.Struct, frozen=True, tag="step", kw_only=True):
    """One step of a rank. ``seq`` counts the steps that were offered to the writer. ``at_ns``: unix time.

    ``requests`` are ids. A row is a token: ``owner`` is its request's place in ``requests``, −1 for padding; ``position`` its
    place in the sequence; ``decodes`` whether it is new, and none of a prompt or of what a preempted request computes again.
    ``batch_rows`` had the layers' calls, with those that a filter left out. The parts of router and gate are of all rows; those
    of gdn, gdn_z and lm_head say of which (``row``).
    """

    seq: int
    step: int
    at_ns: int
    requests: tuple[str, ...]
    owner: tuple[int, ...]
    position: tuple[int, ...]
    decodes: tuple[bool, ...]
    batch_rows: int
    calls: tuple[Call, ...]


class Weights(msgspec.Struct, frozen=True, tag="weights", kw_only=True):
    """What does not change from step to step, once a GDN layer. ``tables``: shape, stride and offset of what states are rows of;
    ``modes``: how they are to be read."""

    layer: str
    parts: tuple[Part, ...]
    tables: dict[str, Any]
    modes: dict[str, str]


class End(msgspec.Struct, frozen=True, tag="end", kw_only=True):
    """Why a writer stopped by itself."""

    why: str
    ok: bool


Frame = Head | Step | Weights | End
_decoder: msgspec.json.Decoder[Frame] = msgspec.json.Decoder(Frame)

# ---------------------------------------------------------------- counters

# The first five are the engine's thread's, and published together. ``hook_ns`` is what layer calls took of it, ``step_ns`` what
# steps did: to see whose rows they are and to hand them over.
COUNTERS = ("steps", "offered", "calls", "hook_ns", "step_ns", "dropped", "written", "ended", "tokens")


def open_counters(path: Path) -> NDArray[np.int64]:
    """Map a rank's counters, new and zero; whoever maps the file sees them, also after the process was killed."""
    return np.asarray(
        np.memmap(path, np.int64, "w+", shape=(len(COUNTERS),))
    )  # plain: to set an element takes a third of the time


def read_counters(path: Path) -> dict[str, int]:
    """A rank's counters by name; all zero where there are none."""
    values = np.fromfile(path, np.int64) if path.is_file() else np.zeros(0, np.int64)
    return dict(zip(COUNTERS, np.resize(values, len(COUNTERS)).tolist() if len(values) else [0] * len(COUNTERS), strict=True))


# ---------------------------------------------------------------- writing


def encoded(frame: Frame, payload: Sequence[bytes | memoryview] = ()) -> list[bytes | memoryview]:
    """The pieces of a frame, to be written one behind the other."""
    head = msgspec.json.encode(frame)
    crc = zlib.crc32(head)
    for piece in payload:
        crc = zlib.crc32(piece, crc)
    return [_LENGTHS.pack(len(head), crc, sum(len(piece) for piece in payload)), head, *payload]


# ---------------------------------------------------------------- reading


@dataclass
class Journal:
    """One rank's journal, mapped. ``whole`` and ``torn`` count bytes once ``frames`` has come to its end."""

    path: Path
    end: End | None = None
    whole: int = 0
    torn: int = 0
    data: memoryview = field(default_factory=lambda: memoryview(b""))

    def __post_init__(self) -> None:
        if self.path.stat().st_size:
            self.data = memoryview(np.memmap(self.path, np.uint8, "r"))  # type: ignore[arg-type]  # a memmap is a buffer
        if bytes(self.data[: len(MAGIC)]) != MAGIC:
            raise InputError(str(self.path), "file", f"a journal ({FORM})", "something else")

    @property
    def head(self) -> Head:
        """The first frame; InputError where the writer was stopped before it."""
        for frame, _ in self.frames():
            if isinstance(frame, Head):
                return frame
            break
        raise InputError(str(self.path), "head", "a whole first frame", "none: the writer was stopped before it")

    def frames(self) -> Iterator[tuple[Frame, memoryview]]:
        """Each whole frame and its payload; the first that is cut short or damaged ends it."""
        at = len(MAGIC)
        while (found := self._frame(at)) is not None:
            frame, payload, at = found
            self.whole = at
            if isinstance(frame, End):
                self.end = frame
            yield frame, payload
        self.whole, self.torn = at, len(self.data) - at

    def _frame(self, at: int) -> tuple[Frame, memoryview, int] | None:
        if at + _LENGTHS.size > len(self.data):
            return None
        head_bytes, crc, payload_bytes = _LENGTHS.unpack_from(self.data, at)
        begin = at + _LENGTHS.size
        end = begin + head_bytes + payload_bytes
        if head_bytes > _HEAD_LIMIT or end > len(self.data) or zlib.crc32(self.data[begin:end]) != crc:
            return None
        try:
            frame = _decoder.decode(self.data[begin : begin + head_bytes])
        except msgspec.DecodeError as error:  # whole to its CRC: what is wrong is not that it was cut short
            raise InputError(str(self.path), f"byte {at}", f"a frame of {FORM}", str(error)) from None
        return frame, self.data[begin + head_bytes : end], end


def arrays(parts: Iterable[Part], payload: memoryview, at: int = 0) -> tuple[dict[str, NDArray[Any]], int]:
    """(parts by name, as views of the payload; where the next begins)."""
    found = {}
    for part in parts:
        found[part.name] = np.frombuffer(payload[at : at + part.nbytes], NUMPY[part.dtype]).reshape(part.shape)
        at += part.nbytes
    return found, at


def calls_of(step: Step, payload: memoryview) -> Iterator[tuple[Call, dict[str, NDArray[Any]]]]:
    """Each call of a step with its tensors."""
    at = 0
    for call in step.calls:
        held, at = arrays(call.parts, payload, at)
        yield call, held


# ---------------------------------------------------------------- the folder of a recording


def journal_path(folder: Path, rank: int) -> Path:
    """Where a rank writes."""
    return folder / f"rank{rank}.journal"


def counters_path(folder: Path, rank: int) -> Path:
    """Where a rank counts."""
    return folder / f"rank{rank}.counters"


def lock_path(folder: Path, rank: int) -> Path:
    """What a rank holds while it writes."""
    return folder / f"rank{rank}.lock"


def journals(folder: Path) -> list[Path]:
    """The journals in a folder, by rank."""
    return sorted(folder.glob("rank*.journal"), key=lambda path: int(path.stem.removeprefix("rank")))


REFUSAL = "refused.json"


def refuse(folder: Path, why: str) -> None:
    """Leave in the folder why nothing is recorded, for the command that waits for a capture."""
    path = folder / f"{REFUSAL}.{os.getpid()}"
    path.write_text(json.dumps({"refused": why}))
    path.replace(folder / REFUSAL)


def refusal(folder: Path) -> str | None:
    """Why a plugin refused to record, where it did."""
    path = folder / REFUSAL
    return str(json.loads(path.read_text())["refused"]) if path.is_file() else None
