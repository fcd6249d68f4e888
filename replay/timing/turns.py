"""Taking turns: the processes of one timing share a schedule, and each step of it belongs to one of them.

Arms that cannot share a process (two builds of one library) are timed in the same blocks all the same.
"""

import contextlib
from collections.abc import Iterator
from multiprocessing.context import BaseContext

from replay.timing.clocks import host_ns


class Turns:
    """What the ``seats`` processes share: the step that the schedule has come to, the case and the arm that it is of (−1 where
    it is no arm's), and when the case began."""

    def __init__(self, context: BaseContext, seats: int) -> None:
        self.seats = seats
        self.step = context.RawValue("q", 0)
        self.case, self.arm = context.RawValue("i", 0), context.RawValue("i", -1)
        self.origin_ns = context.RawValue("q", 0)
        self.changed = context.Condition()


class Seat:
    """One process's place: every process walks through the whole schedule, and does the steps that are its own."""

    def __init__(self, turns: Turns, number: int) -> None:
        self.turns, self.number = turns, number
        self.at = 0

    @contextlib.contextmanager
    def turn(self, owner: int, arm: int = -1) -> Iterator[bool]:
        """The next step of the schedule, which is of one arm or of none. True, once all steps before it are done, for the
        process that owns it."""
        step, self.at = self.at, self.at + 1
        if owner != self.number:
            yield False
            return
        with self.turns.changed:
            self.turns.changed.wait_for(lambda: self.turns.step.value == step)
        self.turns.arm.value = arm
        yield True
        with self.turns.changed:
            self.turns.step.value = step + 1
            self.turns.changed.notify_all()

    def all_in_turn(self) -> Iterator[bool]:
        """A step of each process, one after another; True in one's own."""
        for number in range(self.turns.seats):
            with self.turn(number) as mine:
                yield mine

    def begin_case(self, index: int) -> None:
        """A case begins, in a turn of the first process: all steps of the one before are done."""
        with self.turn(0) as mine:
            if mine:
                self.turns.case.value = index
                self.turns.origin_ns.value = host_ns()

    def since_ns(self) -> int:
        """Nanoseconds since the case began; the host's clock is one for all processes."""
        return host_ns() - int(self.turns.origin_ns.value)
