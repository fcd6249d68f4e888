"""Taking turns: the processes of one timing share a schedule, and each step of it belongs to one of them.

Arms that cannot share a process (two builds of one library) are timed in the same blocks all the same.
"""

import contextlib
from collections.abc import Iterator
from multiprocessing.context import BaseContext

from replay.timing.clocks import host_ns


class Turns:
    """What the ``seats`` processes share: the step that the schedule has come to, which case that is of, and when it began."""

    def __init__(self, context: BaseContext, seats: int) -> None:
        self.seats = seats
        self.step = context.RawValue("q", 0)
        self.case = context.RawValue("i", 0)
        self.origin_ns = context.RawValue("q", 0)
        self.changed = context.Condition()


class Seat:
    """One process's place: every process walks through the whole schedule, and does the steps that are its own."""

    def __init__(self, turns: Turns, number: int) -> None:
        self.turns, self.number = turns, number
        self.at = 0

    @contextlib.contextmanager
    def turn(self, owner: int) -> Iterator[bool]:
        """The next step of the schedule. True, once all steps before it are done, for the process that owns it."""
        step, self.at = self.at, self.at + 1
        if owner != self.number:
            yield False
            return
        with self.turns.changed:
            self.turns.changed.wait_for(lambda: self.turns.step.value == step)
        yield True
        with self.turns.changed:
            self.turns.step.value = step + 1
            self.turns.changed.notify_all()

    def begin_case(self, index: int) -> None:
        """A case begins, in a turn of the first process: all steps of the one before are done."""
        with self.turn(0) as mine:
            if mine:
                self.turns.case.value = index
                self.turns.origin_ns.value = host_ns()

    def since_ns(self) -> int:
        """Nanoseconds since the case began; the host's clock is one for all processes."""
        return host_ns() - int(self.turns.origin_ns.value)
