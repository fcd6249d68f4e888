"""From a recording to a capture: the ranks' journals compared, and written once in the form that everything here reads."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from replay.captures import recording
from replay.captures.gather import Made
from replay.captures.manifest import MANIFEST, Holds, Manifest, Recorded
from replay.captures.recording import Head, Journal, Step, Weights
from replay.errors import EnvironmentRefused, InputError

STOPPED = "the writer was stopped before it could say why"
# What is recorded → what the capture then holds.
_KINDS: dict[str, Holds] = {"routes": "routes", "hidden": "gates", "gdn": "states", "logits": "logits"}


@dataclass
class Survey:
    """What a folder's journals hold, by rank: whole steps, bytes of one that was cut short, and why each ended. Over all ranks:
    steps ``dropped``, steps ``lost`` with a process or behind a fault, and the ``faults``."""

    steps: dict[int, int] = field(default_factory=dict)
    torn: dict[int, int] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    dropped: int = 0
    lost: int = 0


def close(folder: Path, name: str | None = None, made_by: str = "", ended: str = "") -> Manifest:
    """Make a capture of a recording, and remove its journals; ``ended``: why it ended, where no writer could say. InputError
    where somebody still writes, nothing was recorded, a kind that was asked for is not there, a rank is missing or two chose
    different experts: the journals are then left as they are."""
    if (folder / MANIFEST).exists():
        raise InputError(str(folder), "path", "a recording that was not closed", "a capture")
    paths = recording.journals(folder)
    if not paths:
        raise InputError(str(folder), "path", "a recording", recording.refusal(folder) or "a folder without a journal")
    ranks = [Journal(path) for path in paths]
    heads = [journal.head for journal in ranks]
    _check_ranks(folder, heads)
    with _nobody_writes(folder, heads), _room(folder):
        made = Made(folder, heads)
        with made.open():
            for frames in steps_of_all(ranks):
                made.step(frames)
            for head, journal in zip(heads, ranks, strict=True):
                for frame, payload in journal.frames():
                    if isinstance(frame, Weights):
                        made.weights(head.rank, frame, payload)
            seen = survey(folder, ended)
            _check_kinds(folder, made, heads[0], seen)
        manifest = _manifest(folder, made, heads, seen, name, made_by)
        (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    for pattern in ("rank*.journal", "rank*.counters", "rank*.lock", recording.REFUSAL):
        for path in folder.glob(pattern):
            path.unlink()
    return manifest


def _check_ranks(folder: Path, heads: Sequence[Head]) -> None:
    there = [head.rank for head in heads]
    if sorted(there) != sorted(heads[0].expected):
        why = recording.refusal(folder)
        got = ", ".join(map(str, there)) + (f" ({why})" if why else "")
        raise InputError(str(folder), "ranks", f"journals of {', '.join(map(str, heads[0].expected))}", got)


@contextlib.contextmanager
def _nobody_writes(folder: Path, heads: Sequence[Head]) -> Iterator[None]:
    """Hold every rank's lock; InputError where a server does."""
    from filelock import FileLock, Timeout

    with contextlib.ExitStack() as held:
        for head in heads:
            lock = FileLock(recording.lock_path(folder, head.rank))
            try:
                held.enter_context(lock.acquire(timeout=0))
            except Timeout:
                expected = "a recording that no server writes any more"
                raise InputError(str(folder), "path", expected, f"rank {head.rank} is being written") from None
        yield


@contextlib.contextmanager
def _room(folder: Path) -> Iterator[None]:
    """EnvironmentRefused where the capture's files cannot be written; the journals are kept, and half a file is not."""
    before = set(folder.iterdir())
    try:
        yield
    except BaseException as error:
        for path in set(folder.iterdir()) - before:
            path.unlink()
        if not isinstance(error, OSError):
            raise
        got = (error.strerror or str(error)).lower()
        raise EnvironmentRefused(f"{folder}: close: expected room for the capture, got {got}; the journals are kept") from None


def _check_kinds(folder: Path, made: Made, head: Head, seen: Survey) -> None:
    """InputError where nothing was recorded, or nothing of something that was asked for."""
    if not made.rows:
        raise InputError(str(folder), "recording", "at least one recorded row", _why_empty(seen))
    there = {"routes"} if made.lines else set()
    there |= {table.holds for table in made.tables.values() if table.rows}
    for what, holds in _KINDS.items():
        if what in head.record.get("what", ()) and holds not in there:
            got = f"none in {made.steps} steps: no layer that matches, or none that the hooks see"
            raise InputError(str(folder), "recording", f"{holds}, since {what} was asked for", got)


def _manifest(folder: Path, made: Made, heads: Sequence[Head], seen: Survey, name: str | None, made_by: str) -> Manifest:
    head = heads[0]
    files = made.finish()
    return Manifest(
        form="b70-capture/1", name=name or folder.resolve().name, origin="recorded", made_by=made_by or "B70_ENGINE=… vllm serve",
        geometry=msgspec.structs.replace(head.geometry, vocab=made.vocab) if made.vocab else head.geometry, modes={}, files=files,
        recorded=Recorded(
            versions=head.versions, record={k: v for k, v in head.record.items() if k != "folder"}, ranks=len(heads),
            steps=made.steps, rows=made.rows, dropped=seen.dropped, lost=seen.lost, faults=seen.faults,
            ended=" / ".join(dict.fromkeys(seen.ended.values())),
        ),
    )  # fmt: skip


def survey(folder: Path, ended: str = "") -> Survey:
    """What a recording holds, none of it changed."""
    seen = Survey()
    for path in recording.journals(folder):
        journal = Journal(path)
        rank, end = journal.head.rank, None
        seen.steps[rank] = sum(isinstance(frame, Step) for frame, _ in journal.frames())
        seen.torn[rank], end = journal.torn, journal.end
        seen.ended[rank] = end.why if end else ended or STOPPED
        counted = recording.read_counters(path.with_suffix(".counters"))
        seen.dropped += counted["dropped"]
        if end is None or not end.ok:  # a limit leaves what came behind it, and loses nothing
            seen.lost += counted["offered"] - counted["dropped"] - counted["written"]
        if counted["ended"] and (end is None or not end.ok):
            seen.faults.append(f"rank {rank}: {end.why if end else recording.refusal(folder) or STOPPED}")
    return seen


def _why_empty(seen: Survey) -> str:
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
