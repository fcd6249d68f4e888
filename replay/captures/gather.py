"""The files of a capture while a recording's steps are read: routes written as they come, tensors gathered by layer."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.captures.manifest import FileEntry, Holds, file_sha256
from replay.captures.recording import Call, Head, Step, Weights, arrays, calls_of
from replay.captures.records import RecordedV1
from replay.captures.select import layer_label
from replay.captures.tensors import FORMS, save_tensors
from replay.errors import InputError

Arrays = dict[str, NDArray[Any]]
Routed = list[tuple[Call, Arrays]]
PARTIAL = ".routes.jsonl"


class Made:
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
        with (self.folder / PARTIAL).open("wb") as self.routes:
            yield

    def step(self, frames: Sequence[tuple[Step, memoryview]]) -> None:
        """One step of every rank."""
        self.steps += 1
        first = frames[0][0]
        self.rows += sum(owner >= 0 for owner in first.owner)
        for name in first.requests:
            self.requests.setdefault(name, len(self.requests))
        read = [list(calls_of(step, payload)) for step, payload in frames]
        routes, *others = map(_of_routers, read)
        for head, (step, _), theirs in zip(self.heads[1:], frames[1:], others, strict=True):
            _same_routes(self.folder, head.rank, (first, routes), (step, theirs))
        for call, held in routes:
            self.routes.write(self.encoder.encode(_record(first, call, held, self.heads[0])) + b"\n")
            self.lines += 1
        for head, calls, (step, _) in zip(self.heads, read, frames, strict=True):
            self._tensors(head.rank, step, calls)

    def _tensors(self, rank: int, step: Step, calls: Sequence[tuple[Call, Arrays]]) -> None:
        routed = {call.layer: held for call, held in calls if call.what == "router"}
        for call, held in calls:
            if call.what in ("gdn", "gdn_z"):
                table = self._table("states", call.layer, rank)
                table.add_states(step, held, self.requests) if call.what == "gdn" else table.add({"z": held["z"]})
            elif call.what == "lm_head" and rank == self.heads[0].rank:
                self.vocab = held["logits"].shape[1]
                table = self._table("logits", "lm_head", rank)
                table.add({"logits": held["logits"], **_whose(step, held["row"], self.requests, "request")})
            elif call.what == "gate" and rank == self.heads[0].rank:
                self._gate(step, call, held, routed.get(call.layer, {}))

    def _gate(self, step: Step, call: Call, held: Arrays, routed: Arrays) -> None:
        real = np.flatnonzero(np.asarray(step.owner) >= 0)
        chosen = {"topk_ids": routed["ids"][real].astype(np.int32)} if "ids" in routed else {}
        if "weights" in routed:
            chosen["topk_weights"] = routed["weights"][real].astype(np.float32)
        tensors = {"hidden": held["hidden"][real], "router_logits": held["logits"][real], **chosen}
        self._table("gates", call.layer, self.heads[0].rank).add({**tensors, **_whose(step, real, self.requests, "request")})

    def _table(self, holds: Holds, layer: str, rank: int) -> "_Table":
        # The GDN heads of another rank are a layer of their own to whoever replays them.
        named = layer if rank == 0 or holds != "states" else f"rank{rank}.{layer}"
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
            (self.folder / PARTIAL).replace(self.folder / "routes.jsonl")
            entries.append(_entry(self.folder / "routes.jsonl", "routes"))
        else:
            (self.folder / PARTIAL).unlink()
        names = list(self.requests)
        for table in self.tables.values():
            if table.rows:
                path = self.folder / f"{table.holds}-{layer_label(table.layer)}.safetensors"
                table.save(path, names)
                entries.append(_entry(path, table.holds))
        return entries


def _entry(path: Path, holds: Holds) -> FileEntry:
    return FileEntry(path.name, holds, file_sha256(path), path.stat().st_size)


def _of_routers(calls: Sequence[tuple[Call, Arrays]]) -> Routed:
    return [(call, held) for call, held in calls if call.what == "router"]


def _same_routes(folder: Path, rank: int, mine: tuple[Step, Routed], theirs: tuple[Step, Routed]) -> None:
    """InputError where a rank's routes, or whose they are, differ from the first rank's by a bit."""
    (step, routes), (other, got) = mine, theirs
    where = f"step {step.step}"
    if (step.requests, step.owner, step.position) != (other.requests, other.owner, other.position):
        raise InputError(str(folder), where, f"the same requests and rows on rank {rank}", "others")
    if (layers := [call.layer for call, _ in routes]) != (their_layers := [call.layer for call, _ in got]):
        raise InputError(str(folder), where, f"the same layers on rank {rank}: {', '.join(layers)}", ", ".join(their_layers))
    for (call, held), (_, their) in zip(routes, got, strict=True):
        for name, array in held.items():
            bytes_of, of_theirs = ([row.tobytes() for row in t.get(name, ())] for t in (held, their))
            if bytes_of != of_theirs:
                row = next((i for i, (a, b) in enumerate(zip(bytes_of, of_theirs, strict=False)) if a != b), len(of_theirs))
                expected = f"the routes of the first rank on rank {rank}"
                raise InputError(str(folder), f"{where}, {call.layer}", expected, f"other {name} at row {row} of {len(array)}")


def _record(step: Step, call: Call, held: Arrays, head: Head) -> RecordedV1:
    owners = step.owner
    phases = {"decode" if new else "prefill" for o, new in zip(owners, step.decodes, strict=True) if o >= 0}
    ids = held["ids"]
    return RecordedV1(
        v=1, layer=call.layer, stage="router", step=step.step, phase=phases.pop() if len(phases) == 1 else "mixed",
        num_tokens=len(ids), top_k=ids.shape[1], num_experts=head.geometry.experts, topk_ids=ids.tolist(),
        topk_weights=[[float(str(w)) for w in row] for row in held["weights"].astype(np.float32)] if "weights" in held else None,
        requests=[step.requests[o] if o >= 0 else "" for o in owners], padding=[o < 0 for o in owners], rank=str(head.rank),
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
