"""From a recording to a capture: the ranks' journals compared, and written once in the form that everything here reads.

``python -m replay.captures.close FOLDER`` does what ``b70-replay capture close`` does; a writer that reached a limit starts it.
"""

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.captures import recording
from replay.captures.manifest import MANIFEST, FileEntry, Holds, Manifest, Recorded, file_sha256
from replay.captures.recording import Call, Head, Journal, Step, Weights, arrays, calls_of
from replay.captures.records import RecordedV1
from replay.captures.select import layer_label
from replay.captures.tensors import FORMS, save_tensors
from replay.errors import InputError

Arrays = dict[str, NDArray[Any]]
STOPPED = "the writer was stopped before it could say why"


@dataclass
class Seen:
    """What a folder's journals hold: whole steps of each rank, and what is wrong with them."""

    steps: dict[int, int] = field(default_factory=dict)
    torn: dict[int, int] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    dropped: int = 0
    lost: int = 0


def close(folder: Path, name: str | None = None, made_by: str = "", ended: str = "") -> Manifest:
    """Make a capture of a recording, and remove its journals; ``ended``: why it ended, where no writer could say. InputError
    where nothing was recorded, or where two ranks chose different experts: the journals are then left as they are."""
    paths = recording.journals(folder)
    if not paths:
        raise InputError(str(folder), "path", "a recording", recording.refusal(folder) or "a folder without a journal")
    ranks = [Journal(path) for path in paths]
    heads = [journal.head for journal in ranks]
    made = _Made(folder, heads)
    with made.open():
        for frames in steps_of_all(ranks):
            made.step(frames)
        for rank, journal in enumerate(ranks):
            for frame, payload in journal.frames():
                if isinstance(frame, Weights):
                    made.weights(rank, frame, payload)
    seen = survey(folder, ended)
    if not made.rows:
        raise InputError(str(folder), "recording", "at least one recorded row", _why_empty(seen))
    files = made.finish()
    head = heads[0]
    geometry = msgspec.structs.replace(head.geometry, vocab=made.vocab) if made.vocab else head.geometry
    manifest = Manifest(
        form="b70-capture/1", name=name or folder.resolve().name, origin="recorded", made_by=made_by or "B70_ENGINE=… vllm serve",
        geometry=geometry, modes={}, files=files,
        recorded=Recorded(
            versions=head.versions, record={k: v for k, v in head.record.items() if k != "folder"}, ranks=len(ranks),
            steps=made.steps, rows=made.rows, dropped=seen.dropped, lost=seen.lost,
            ended=" / ".join(dict.fromkeys(seen.ended.values())),
        ),
    )  # fmt: skip
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    for pattern in ("rank*.journal", "rank*.counters", "rank*.lock", recording.REFUSAL):
        for path in folder.glob(pattern):
            path.unlink()
    return manifest


def survey(folder: Path, ended: str = "") -> Seen:
    """What a recording holds, none of it changed."""
    seen = Seen()
    for rank, path in enumerate(recording.journals(folder)):
        journal = Journal(path)
        numbers = [frame.seq for frame, _ in journal.frames() if isinstance(frame, Step)]
        counted = recording.read_counters(path.with_suffix(".counters"))
        seen.steps[rank] = len(numbers)
        seen.torn[rank] = journal.torn
        seen.ended[rank] = journal.end.why if journal.end else ended or STOPPED
        seen.dropped = max(seen.dropped, counted["dropped"])
        seen.lost = max(seen.lost, counted["offered"] - counted["dropped"] - counted["written"] if not journal.end else 0)
    return seen


def _why_empty(seen: Seen) -> str:
    dropped = f", {seen.dropped} steps dropped" if seen.dropped else ""
    return f"none in {max(seen.steps.values(), default=0)} steps{dropped} ({'; '.join(dict.fromkeys(seen.ended.values()))})"


def steps_of_all(ranks: Sequence[Journal]) -> Iterator[list[tuple[Step, memoryview]]]:
    """The steps that every rank has, side by side; one that some rank dropped, or did not come to, is left out."""

    def steps(journal: Journal) -> Iterator[tuple[Step, memoryview]]:
        return ((frame, payload) for frame, payload in journal.frames() if isinstance(frame, Step))

    streams = [steps(journal) for journal in ranks]
    now = [next(stream, None) for stream in streams]
    while all(now):
        here = [frame for frame in now if frame is not None]
        latest = max(frame.seq for frame, _ in here)
        if all(frame.seq == latest for frame, _ in here):
            yield here
            latest += 1
        now = [next(s, None) if frame[0].seq < latest else frame for s, frame in zip(streams, here, strict=True)]


# ---------------------------------------------------------------- one capture being made


class _Made:
    """The files of a capture while its steps are read. Tensors are gathered, routes written as they come."""

    def __init__(self, folder: Path, heads: Sequence[Head]) -> None:
        self.folder, self.heads = folder, heads
        self.steps = self.rows = self.vocab = 0
        self.requests: dict[str, int] = {}
        self.tables: dict[str, _Table] = {}
        self.routes: Any = None
        self.encoder = msgspec.json.Encoder()
        self.lines = 0

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """While steps are read."""
        with (self.folder / ".routes.jsonl").open("wb") as self.routes:
            yield

    def step(self, frames: Sequence[tuple[Step, memoryview]]) -> None:
        """One step of every rank."""
        self.steps += 1
        first = frames[0][0]
        self.rows += sum(owner >= 0 for owner in first.owner)
        for name in first.requests:
            self.requests.setdefault(name, len(self.requests))
        read = [list(calls_of(step, payload)) for step, payload in frames]
        for (call, held), *others in zip(*map(_of_routers, read), strict=True):
            for rank, (other, theirs) in enumerate(others, 1):
                _same_routes(self.folder, first, rank, (call, held), (other, theirs))
            self.routes.write(self.encoder.encode(_record(first, call, held, self.heads[0].geometry.experts)) + b"\n")
            self.lines += 1
        for rank, (calls, (step, _)) in enumerate(zip(read, frames, strict=True)):
            self._tensors(rank, step, calls)

    def _tensors(self, rank: int, step: Step, calls: Sequence[tuple[Call, Arrays]]) -> None:
        routed = {call.layer: held for call, held in calls if call.what == "router"}
        for call, held in calls:
            if call.what in ("gdn", "gdn_z"):
                table = self._table("states", call.layer, rank)
                table.add_states(step, held, self.requests) if call.what == "gdn" else table.add({"z": held["z"]})
            elif call.what == "lm_head" and rank == 0:
                self.vocab = held["logits"].shape[1]
                table = self._table("logits", "lm_head", rank)
                table.add({"logits": held["logits"], **_whose(step, held["row"], self.requests, "request")})
            elif call.what == "gate" and rank == 0:
                self._gate(step, call, held, routed.get(call.layer, {}))

    def _gate(self, step: Step, call: Call, held: Arrays, routed: Arrays) -> None:
        real = np.flatnonzero(np.asarray(step.owner) >= 0)
        chosen = {"topk_ids": routed["ids"][real].astype(np.int32)} if "ids" in routed else {}
        if "weights" in routed:
            chosen["topk_weights"] = routed["weights"][real].astype(np.float32)
        tensors = {"hidden": held["hidden"][real], "router_logits": held["logits"][real], **chosen}
        self._table("gates", call.layer, 0).add({**tensors, **_whose(step, real, self.requests, "request")})

    def _table(self, holds: Holds, layer: str, rank: int) -> "_Table":
        # The heads of the other ranks are layers of their own to whoever replays them.
        named = layer if rank == 0 else f"rank{rank}.{layer}"
        return self.tables.setdefault(f"{holds}/{named}", _Table(holds, named))

    def weights(self, rank: int, frame: Weights, payload: memoryview) -> None:
        """What a layer holds from step to step."""
        table = self._table("states", frame.layer, rank)
        table.fixed, _ = arrays(frame.parts, payload)
        table.modes = frame.modes
        table.caches = {name: {**table_, "shape": tuple(table_["shape"])} for name, table_ in frame.tables.items()}

    def finish(self) -> list[FileEntry]:
        """Write what was gathered; the files' entries."""
        entries = []
        if self.lines:
            (self.folder / ".routes.jsonl").replace(self.folder / "routes.jsonl")
            entries.append(_entry(self.folder / "routes.jsonl", "routes"))
        else:
            (self.folder / ".routes.jsonl").unlink()
        names = list(self.requests)
        for table in self.tables.values():
            if table.rows:
                path = self.folder / f"{table.holds}-{layer_label(table.layer)}.safetensors"
                table.save(path, names)
                entries.append(_entry(path, table.holds))
        return entries


def _entry(path: Path, holds: Holds) -> FileEntry:
    return FileEntry(path.name, holds, file_sha256(path), path.stat().st_size)


def _of_routers(calls: Sequence[tuple[Call, Arrays]]) -> list[tuple[Call, Arrays]]:
    return [(call, held) for call, held in calls if call.what == "router"]


def _same_routes(folder: Path, step: Step, rank: int, mine: tuple[Call, Arrays], other: tuple[Call, Arrays]) -> None:
    """InputError where a rank's routes are not those of rank 0, to the bit."""
    (call, held), (theirs, got) = mine, other
    where = f"step {step.step}, {call.layer}"
    if theirs.layer != call.layer:
        raise InputError(str(folder), where, f"the same layer on rank {rank}", theirs.layer)
    for name, array in held.items():
        if name not in got or array.tobytes() != got[name].tobytes():
            other_rows = got[name] if name in got and got[name].shape == array.shape else ~array.view(np.int32)
            row = int(np.flatnonzero((array != other_rows).any(axis=1))[0])
            raise InputError(str(folder), where, f"the routes of rank 0 on rank {rank}", f"other {name} at row {row}")


def _record(step: Step, call: Call, held: Arrays, experts: int) -> RecordedV1:
    owners = step.owner
    phases = {"prefill" if p < step.prompts[o] else "decode" for o, p in zip(owners, step.position, strict=True) if o >= 0}
    ids = held["ids"]
    return RecordedV1(
        v=1, layer=call.layer, stage="router", step=step.step, phase=phases.pop() if len(phases) == 1 else "mixed",
        num_tokens=len(ids), top_k=ids.shape[1], num_experts=experts, topk_ids=ids.tolist(),
        topk_weights=[[float(str(w)) for w in row] for row in held["weights"].astype(np.float32)] if "weights" in held else None,
        requests=[step.requests[o] if o >= 0 else "" for o in owners], padding=[o < 0 for o in owners], rank="0",
        ts=step.at_ns / 1e9, positions=list(step.position), call_rows=step.batch_rows,
    )  # fmt: skip


def _whose(step: Step, rows: NDArray[Any], requests: dict[str, int], owner: str) -> Arrays:
    """step, request and position of the rows with these numbers, as int32."""
    numbers = np.array([requests[step.requests[step.owner[row]]] for row in rows.tolist()], np.int32)
    positions = np.asarray(step.position, np.int32)[rows]
    return {"step": np.full(len(rows), step.step, np.int32), owner: numbers, "position": positions}


class _Table:
    """The tensors of one file while they are gathered."""

    def __init__(self, holds: Holds, layer: str) -> None:
        self.holds, self.layer = holds, layer
        self.parts: dict[str, list[NDArray[Any]]] = {}
        self.fixed: Arrays = {}
        self.modes: dict[str, str] = {}
        self.caches: dict[str, Any] = {}
        self.states = 0

    @property
    def rows(self) -> int:
        """Rows gathered."""
        return sum(len(part) for part in self.parts.get("step", ()))

    def add(self, tensors: Arrays) -> None:
        """More rows."""
        for name, array in tensors.items():
            self.parts.setdefault(name, []).append(array)

    def add_states(self, step: Step, held: Arrays, requests: dict[str, int]) -> None:
        """The rows of a GDN layer; where their states came too, each row says which is its."""
        count = len(held["row"])
        has = "ssm_state" in held
        own = np.arange(self.states, self.states + count) if has else np.full(count, -1)
        self.states += count if has else 0
        whose = _whose(step, held["row"], requests, "sequence")
        rest = {name: array for name, array in held.items() if name not in ("row", "slot")}
        self.add({**rest, **whose, "slot": held["slot"].astype(np.int32), "state_row": own.astype(np.int32)})

    def save(self, path: Path, requests: Sequence[str]) -> None:
        """Write the file; bf16 is uint16."""
        tensors = {name: np.concatenate(parts) for name, parts in self.parts.items()} | self.fixed
        meta = {
            "form": FORMS[self.holds], "layer": self.layer, "modes": msgspec.json.encode(self.modes).decode(),
            "caches": msgspec.json.encode(self.caches).decode(), "requests": msgspec.json.encode(requests).decode(),
        }  # fmt: skip
        save_tensors(path, meta, tensors)


if __name__ == "__main__":
    print(*itertools.islice((entry.path for entry in close(Path(sys.argv[1])).files), 8))
