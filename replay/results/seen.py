"""A journal's records by kind: what the documents, and a promotion, are made of."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from replay.errors import InputError
from replay.model import NULL, Exact, Inexact, NotRun, Outcome, Sample, Work
from replay.session.journal import (
    Attended,
    Begun,
    Calibrated,
    Dropped,
    Finished,
    Judged,
    Loaded,
    Plan,
    Posed,
    Record,
    Selftested,
    Timed,
)
from replay.timing import estimate
from replay.timing.clocks import DISAGREES, WAITED
from replay.timing.dropped import THROTTLED, causes, too_many
from replay.timing.telemetry import Machine
from replay.timing.watch import busy, clocks_agree


class Seen:
    """The records of a run that has begun; ``records[0]`` must be its Begun."""

    def __init__(self, records: Sequence[Record]) -> None:
        first = records[0] if records else None
        if not isinstance(first, Begun):
            raise InputError("run", "journal", "a run that had begun", "none")
        self.plan: Plan = first.plan
        self.identity: dict[str, Any] = first.identity
        self.work: dict[str, Work] = {}
        self.degenerate: set[str] = set()
        self.selftested: Selftested | None = None
        self.attended: list[Attended] = []
        self.judged: dict[tuple[str, str], Judged] = {}
        self.timed: dict[str, dict[int, Timed]] = {}
        self.in_order: list[Timed] = []
        self.wrong: dict[tuple[str, str], str] = {}
        self.within: dict[tuple[str, str], str] = {}
        self.dropped: dict[tuple[str, str], NotRun] = {}
        self.calibrated: list[Calibrated] = []
        self.loaded: list[Loaded] = []
        self.finished = False
        self._kept: Callable[[str], dict[int, tuple[Sample, ...]]] = functools.cache(self._kept_of)
        for record in records[1:]:
            self._see(record)

    def _see(self, record: Record) -> None:
        if isinstance(record, Posed):
            self.work[record.case] = record.work
            if record.degenerate:
                self.degenerate.add(record.case)
        elif isinstance(record, Selftested):
            self.selftested = record
        elif isinstance(record, Attended):
            self.attended.append(record)
        elif isinstance(record, Judged):
            self.judged[record.case, record.kernel] = record
        elif isinstance(record, Timed):
            self.timed.setdefault(record.case, {})[record.process] = record
            self.in_order.append(record)
            self.wrong.update({(record.case, kernel): what for kernel, what in record.wrong.items()})
            self.within.update({(record.case, kernel): what for kernel, what in record.within.items()})
        elif isinstance(record, Dropped):
            self.dropped[record.case, record.kernel] = NotRun(record.status, record.detail)
        elif isinstance(record, Calibrated):
            self.calibrated.append(record)
        elif isinstance(record, Loaded):
            self.loaded.append(record)
        elif isinstance(record, Finished):
            self.finished = True

    def outcome(self, case: str, kernel: str) -> Outcome:
        """The outcome after both phases: a green row turns red when a timed call was wrong or died, and falls
        to WITHIN_ULP when one needed its budget."""
        found = self.judged[case, kernel].outcome
        if not isinstance(found, Exact):
            return found
        if wrong := self.wrong.get((case, kernel)):
            return Inexact("FAIL", -1, wrong)
        if dropped := self.dropped.get((case, kernel)):
            return dropped
        if within := self.within.get((case, kernel)):
            found = msgspec.structs.replace(found, grade="WITHIN_ULP", detail=within)
        return msgspec.structs.replace(found, timing=estimate.timing(self.samples([case]), kernel))

    def samples(self, cases: Sequence[str]) -> dict[int, list[tuple[Sample, ...]]]:
        """process → the samples of each of these cases, without blocks that were dropped."""
        found: dict[int, list[tuple[Sample, ...]]] = {}
        for case in cases:
            kept = self._kept(case)
            for process, samples in kept.items():
                found.setdefault(process, []).append(samples)
        return found

    def _taken(self, case: str) -> dict[int, tuple[Sample, ...]]:
        """process → all samples of a case."""
        return {p: timed.samples for p, timed in self.timed.get(case, {}).items()}

    def _kept_of(self, case: str) -> dict[int, tuple[Sample, ...]]:
        taken, gone = self._taken(case), self._causes(case)
        if self.spoilt(case):
            return taken  # told with their times, as INVALID
        return {p: tuple(s for s in samples if s.block not in gone[p]) for p, samples in taken.items()}

    def _causes(self, case: str) -> dict[int, dict[int, str]]:
        """process → block → why it is dropped."""
        return {process: causes(samples) for process, samples in self._taken(case).items()}

    def spoilt(self, case: str) -> bool:
        """Whether too many of a case's blocks would have to be dropped."""
        blocks = sum(len({s.block for s in samples}) for samples in self._taken(case).values())
        return too_many(sum(map(len, self._causes(case).values())), blocks)

    def dropped_blocks(self) -> dict[str, int]:
        """cause → how many blocks of the whole run were dropped for it."""
        kept = [case for case in self.timed if not self.spoilt(case)]  # of the others none went
        return dict(Counter(why for case in kept for gone in self._causes(case).values() for why in gone.values()))

    def flags(self, cases: Sequence[str], kernel: str) -> list[str]:
        """What the samples of one kernel carry, each once, in order, and whether too many blocks were lost.

        Clocks that part, or a host that is late, in a single span were interrupted; in every fifth span they say something.
        """
        samples = [s for timed in self.samples(cases).values() for case in timed for s in case]
        mine = [s for s in samples if s.arm.removesuffix(NULL) == kernel]
        counted = Counter(flag for s in mine for flag in s.flags if flag != THROTTLED)
        told = [f for f, n in counted.items() if f not in (DISAGREES, WAITED) or too_many(n, len(mine))]
        return sorted(told) + (["blocks_dropped"] if any(map(self.spoilt, cases)) else [])

    def drift(self, cases: Sequence[str]) -> list[str]:
        """The memory ceilings that moved beside these cases, in the timings that count."""
        timed = [t for case in cases for t in self.timed.get(case, {}).values()]
        return sorted({name for t in timed for name in t.moved(self.plan.margin)})

    def repeated(self) -> int:
        """How many timings were made again, since the memory ceilings had moved beside them."""
        return len(self.in_order) - sum(map(len, self.timed.values()))

    def disturbed(self) -> list[str]:
        """What spoils or caps every line: a clock that went otherwise than the kernel's, foreign processes at work."""
        kept = [a.watched for a in self.attended]
        clock = [DISAGREES] if not all(clocks_agree(w) for w in kept) else []
        return [*clock, *(f"foreign_process:{who}" for who in sorted({who for w in kept for who in busy(w)}))]

    def machine(self) -> tuple[Machine, Machine] | None:
        """How the device was before the first process and after the last."""
        return (self.attended[0].watched.before, self.attended[-1].watched.after) if self.attended else None
