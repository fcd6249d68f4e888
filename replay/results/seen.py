"""A journal's records by kind: what the documents, and a promotion, are made of."""

from collections.abc import Sequence
from typing import Any

import msgspec

from replay.model import NULL, Exact, Inexact, NotRun, Outcome, Sample, Work
from replay.session import journal as j
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
from replay.timing.watch import busy, clocks_agree


class Seen:
    """The records of a run that has begun; ``records[0]`` must be its Begun."""

    def __init__(self, records: Sequence[Record]) -> None:
        first = records[0]
        assert isinstance(first, Begun)  # journal.resume and promote check it
        self.plan: Plan = first.plan
        self.identity: dict[str, Any] = first.identity
        self.work: dict[str, Work] = {}
        self.degenerate: set[str] = set()
        self.selftested: Selftested | None = None
        self.attended: list[Attended] = []
        self.judged: dict[tuple[str, str], Judged] = {}
        self.timed: dict[str, dict[int, Timed]] = {}
        self.wrong: dict[tuple[str, str], str] = {}
        self.dropped: dict[tuple[str, str], NotRun] = {}
        self.calibrated: list[Calibrated] = []
        self.loaded: list[Loaded] = []
        self.finished = False
        for record in records[1:]:
            self._see(record)
        moved = j.moved(self.calibrated, self.plan.margin)
        self.drift = {process: names for process, names in moved.items() if names}
        # Enough steady processes stand for the run by themselves; otherwise all of them do, and what moved is told.
        steady = [process for process in moved if process not in self.drift]
        self.replaced = tuple(sorted(self.drift)) if len(steady) >= self.plan.processes else ()

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
            self.wrong.update({(record.case, kernel): what for kernel, what in record.wrong.items()})
        elif isinstance(record, Dropped):
            self.dropped[record.case, record.kernel] = NotRun(record.status, record.detail)
        elif isinstance(record, Calibrated):
            self.calibrated.append(record)
        elif isinstance(record, Loaded):
            self.loaded.append(record)
        elif isinstance(record, Finished):
            self.finished = True

    def outcome(self, case: str, kernel: str) -> Outcome:
        """The outcome after both phases: a green row turns red when a timed call was wrong or died."""
        found = self.judged[case, kernel].outcome
        if not isinstance(found, Exact):
            return found
        if wrong := self.wrong.get((case, kernel)):
            return Inexact("FAIL", -1, wrong)
        if dropped := self.dropped.get((case, kernel)):
            return dropped
        return msgspec.structs.replace(found, timing=estimate.timing(self.samples([case]), kernel))

    def samples(self, cases: Sequence[str]) -> dict[int, list[tuple[Sample, ...]]]:
        """process → the samples of each of these cases, without processes that were replaced."""
        found: dict[int, list[tuple[Sample, ...]]] = {}
        for case in cases:
            for process, timed in self.timed.get(case, {}).items():
                if process in self.replaced:
                    continue
                found.setdefault(process, []).append(timed.samples)
        return found

    def flags(self, cases: Sequence[str], kernel: str) -> list[str]:
        """What the samples of one kernel carry, each once, in order."""
        mine = (s for timed in self.samples(cases).values() for case in timed for s in case)
        return sorted({flag for s in mine if s.arm.removesuffix(NULL) == kernel for flag in s.flags})

    def disturbed(self) -> list[str]:
        """What spoils or caps every line: a clock that went otherwise than the kernel's, foreign processes at work."""
        kept = [a.watched for a in self.attended if a.process not in self.replaced]
        clock = ["clock_disagrees"] if not all(clocks_agree(w) for w in kept) else []
        return [*clock, *(f"foreign_process:{who}" for who in sorted({who for w in kept for who in busy(w)}))]
