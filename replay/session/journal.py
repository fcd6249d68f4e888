"""The journal: one append-only JSONL file a run, the only truth about it.

Each line holds a record and a seal, the sha256 over the line before and this record. A line that was cut off by a
crash is dropped on reading; a line in the middle that does not fit its seal is an error.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal

import msgspec

from replay.errors import EnvironmentRefused, InputError
from replay.model import Case, Ceilings, Finding, Kernel, MemoryRates, Outcome, Sample, Twin, Value, Work
from replay.timing.floors import drifted
from replay.timing.watch import Watched

NAME = "run.jsonl"


class Plan(Value, frozen=True, kw_only=True):
    """What a run will do: everything that a resumed run needs, captured rows included.

    ``hits``: token rows → records of the capture that have so many, where the run has several shapes to weigh.
    """

    capture: str
    capture_path: str
    capture_sha256: str
    origin: str
    cases: tuple[Case, ...]
    kernels: tuple[Kernel, ...]
    named: tuple[str, ...]
    baseline: str | None
    device: str
    cache: str
    launch: Literal["calls", "graph"]
    repeats: int
    blocks: int
    processes: int
    margin: float
    quick: bool
    seed: int
    require: str | None
    drawn: tuple[str, ...]
    selectors: tuple[str, ...]
    timeout_s: int
    hits: dict[int, int]

    def kernels_of(self, stage: str) -> list[Kernel]:
        """The plan's kernels of one stage, in order."""
        return [k for k in self.kernels if k.stage == stage]

    def load(self) -> tuple[str, ...]:
        """The user's files that its kernels come from."""
        return tuple(dict.fromkeys(k.file for k in self.kernels if k.file))

    def baseline_of(self, stage: str) -> str:
        """The baseline of a stage: the named one where it is of that stage, else its first kernel that may run here at all."""
        kernels = self.kernels_of(stage)
        if self.baseline in [k.id for k in kernels]:
            return self.baseline
        kind = self.device.partition(":")[0]
        able = [k for k in kernels if kind in k.devices and (self.launch == "calls" or k.graph_safe)]
        return (able or kernels)[0].id

    def stages(self) -> list[str]:
        """Stages in the order they run."""
        return list(dict.fromkeys(c.problem.stage for c in self.cases))


class Begun(Value, frozen=True, tag="begun", tag_field="record"):
    """The first record: plan and identity."""

    plan: Plan
    identity: dict[str, Any]


class Posed(Value, frozen=True, tag="posed", tag_field="record"):
    """What a case has to do at least, counted on its own routes, and whether it is one of its stage's edges."""

    case: str
    work: Work
    degenerate: bool


class Answer(Value, frozen=True):
    """What a call wrote: sha256 of its outputs in canonical form, and the byte they held before it."""

    poison: Annotated[int, msgspec.Meta(ge=0, le=255)]
    sha256: str


class Selftested(Value, frozen=True, tag="selftested", tag_field="record"):
    """What the device answered to its self-tests. ``unasked``: why it could not be asked; ``died``: how it died of it."""

    findings: tuple[Finding, ...]
    unasked: str | None = None
    died: str | None = None

    def doubt(self, names: Iterable[str]) -> str | None:
        """Why nothing that rests on these self-tests may claim its bits, or None."""
        wanted = set(names)
        if wanted and self.died:
            return f"the device's self-test died: {self.died}"
        wrong = [f for f in self.findings if f.key in wanted and f.wrong]
        told = ", ".join(f"{f.name} (wrong in {f.wrong:,} of {f.asked:,})" for f in wrong)
        return f"the device fails its self-test: {told}" if told else None

    def lacks(self, names: Iterable[str]) -> str | None:
        """What of these the device does not have, or None."""
        told = ", ".join(f.name for f in self.findings if f.key in set(names) and not f.asked)
        return f"the device has no {told}" if told else None


class Probed(Value, frozen=True, tag="probed", tag_field="record"):
    """Whether a stage's oracle can be judged by on this run's cases; ``mistrust`` says why not."""

    stage: str
    mistrust: str | None


class Judged(Value, frozen=True, tag="judged", tag_field="record"):
    """The exactness of one kernel on one case. A green one holds an answer a repeat, and those to the case's twins, so
    that whoever reads the journal can compute the oracle again and compare."""

    case: str
    kernel: str
    outcome: Outcome
    answers: tuple[Answer, ...] = ()
    twins: dict[Twin, Answer] = msgspec.field(default_factory=dict)


class Calibrated(Value, frozen=True, tag="calibrated", tag_field="record"):
    """Ceilings of the device, before and after the timing of a process."""

    process: int
    when: str
    ceilings: Ceilings


class Attended(Value, frozen=True, tag="attended", tag_field="record"):
    """What went on beside the samples of a process: one record for each stretch that it was timed in."""

    process: int
    watched: Watched


def ended(calibrated: Iterable[Calibrated]) -> set[int]:
    """The processes that came to their end: ceilings were measured before their samples and after."""
    seen: dict[int, set[str]] = {}
    for record in calibrated:
        seen.setdefault(record.process, set()).add(record.when)
    return {process for process, when in seen.items() if when == {"before", "after"}}


class Timed(Value, frozen=True, tag="timed", tag_field="record"):
    """All samples of one case in one process, and the kernels that were wrong in it (kernel → what).

    ``within``: kernels judged better that needed their budget here (kernel → what for); their grade is WITHIN_ULP.
    ``answers``: arm → what one of its timed calls wrote; ``second``: the same on the second case's bytes, after timing.
    ``memory`` are the memory ceilings before the samples and behind them. Where those moved, the case may be timed again in the
    same process: the last record is the one that counts.
    """

    process: int
    case: str
    samples: tuple[Sample, ...]
    wrong: dict[str, str]
    answers: dict[str, Answer]
    second: dict[str, Answer]
    memory: tuple[MemoryRates, MemoryRates]
    within: dict[str, str] = msgspec.field(default_factory=dict)

    def moved(self, margin: float) -> list[str]:
        """The memory ceilings that were not the same before and behind."""
        return drifted(*self.memory, margin)


class Loaded(Value, frozen=True, tag="loaded", tag_field="record"):
    """Files that a child had loaded when its work was done (path → sha256): libraries, device binaries, user modules.

    Only what no record before it holds already, so a file that was built again in mid-run has two hashes.
    """

    where: str
    files: dict[str, str]


class Dropped(Value, frozen=True, tag="dropped", tag_field="record"):
    """An arm that died while it was timed; the process was run again without it."""

    process: int
    case: str
    kernel: str
    status: Literal["CRASHED", "TIMEOUT", "DEVICE_LOST"]
    detail: str


class Finished(Value, frozen=True, tag="finished", tag_field="record"):
    """The last record of a run that came to its end."""

    rows: int


Record = Begun | Selftested | Probed | Posed | Judged | Calibrated | Attended | Timed | Loaded | Dropped | Finished


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seal: str
    record: msgspec.Raw


_encoder = msgspec.json.Encoder()
_lines = msgspec.json.Decoder(_Line)
_records: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def _seal(before: str, record: bytes) -> str:
    return hashlib.sha256(before.encode() + record).hexdigest()


class Journal:
    """Appends records; each is on disk before ``write`` returns. Use as a context manager."""

    def __init__(self, path: Path, seal: str = "") -> None:
        self.path, self.seal = path, seal
        self.stream = path.open("ab")

    def write(self, record: Record) -> None:
        """Append one record."""
        encoded = _encoder.encode(record)
        self.seal = _seal(self.seal, encoded)
        self.stream.write(b'{"seal":"' + self.seal.encode() + b'","record":' + encoded + b"}\n")
        self.stream.flush()
        os.fsync(self.stream.fileno())

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stream.close()


def read(path: Path) -> list[Record]:
    """All whole records of a journal. InputError where a line in the middle is damaged or was edited."""
    return [record for record, _, _ in _walk(path)]


def resume(path: Path) -> tuple[list[Record], Journal]:
    """The records so far, and the journal opened behind the last whole one; a cut line is removed."""
    records: list[Record] = []
    seal, end = "", 0
    for record, seal, end in _walk(path):  # noqa: B007  # the last seal and end are used below
        records.append(record)
    if not records or not isinstance(records[0], Begun):
        raise InputError(str(path), "journal", "a run that had begun", "none")
    with path.open("r+b") as stream:
        stream.truncate(end)
    return records, Journal(path, seal)


class Examined(msgspec.Struct, frozen=True):
    """A journal as it is: the records that parse, what is wrong with its lines, whether its last line was cut off (which is
    what a killed run leaves behind), and the sha256 of the file."""

    records: list[Record]
    faults: list[str]
    cut: bool
    sha256: str


def examine(path: Path) -> Examined:
    """Read a journal whatever its seals say, so that every fault can be told."""
    records: list[Record] = []
    faults: list[str] = []
    seal = ""
    data = _read(path)
    lines = data.split(b"\n")
    for number, raw in enumerate(lines[:-1], 1):
        try:
            line, record = _decoded(raw)
            records.append(record)
            if not fits(line, seal):
                faults.append(f"line {number}: its seal does not fit")
            seal = line.seal
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            faults.append(f"line {number}: {error}")
    return Examined(records, faults, bool(lines[-1]), hashlib.sha256(data).hexdigest())


def _decoded(raw: bytes) -> tuple[_Line, Record]:
    line = _lines.decode(raw)
    return line, _records.decode(line.record)


def fits(line: _Line, before: str) -> bool:
    """Whether a line carries the seal that follows from its record and the seal of the line before."""
    return line.seal == _seal(before, bytes(line.record))


def untouched(raw: bytes, before: str) -> bool:
    """Whether one line of a journal is as it was written, behind a line with the seal ``before``."""
    try:
        line, _ = _decoded(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return fits(line, before)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        got = (error.strerror or str(error)).lower()
        raise InputError(str(path.parent), "run", f"a run folder with a readable {NAME}", got) from None


def _walk(path: Path) -> Iterator[tuple[Record, str, int]]:
    seal, end = "", 0
    lines = _read(path).split(b"\n")
    for number, raw in enumerate(lines[:-1], 1):  # what follows the last newline was cut off
        try:
            line, record = _decoded(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path}:{number}", "record", "a journal record", str(error)) from None
        if not fits(line, seal):
            raise EnvironmentRefused(f"{path}:{number}: seal: got {line.seal[:12]}…, which does not fit: the journal was edited")
        seal = line.seal
        end += len(raw) + 1
        yield record, seal, end


def sha256(path: Path) -> str:
    """sha256 of the journal file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
