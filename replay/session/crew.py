"""The processes that time a run together: one, or as many as its kernels need to be apart."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from replay.model import NULL, Kernel
from replay.session.child import Done, Message, Sampled
from replay.session.journal import Plan
from replay.session.sampling import Job, time_main
from replay.session.workers import Died, Worker, context, listen
from replay.timing.spans import Arm, Options
from replay.timing.turns import Turns


class Seating:
    """Who is timed in which process.

    Kernels of two user's files may be two builds of one library, whose operations cannot be registered twice and whose
    second build the loader would take for the first. So each file then has a process of its own; ours sit with the first. The
    second copy of a baseline sits alone: what two processes differ by shows in the null arm.
    """

    def __init__(self, plan: Plan) -> None:
        files = plan.load()
        self.apart = len(files) > 1
        self.first = files[0] if files else ""
        seats = [(self.first, False)]
        if self.apart:
            seats = [(file, False) for file in files]
            kernels = {k.id: k for k in plan.kernels}
            seats += dict.fromkeys((self._file(kernels[plan.baseline_of(s)]), True) for s in plan.stages())
        self.seats = tuple(seats)

    def _file(self, kernel: Kernel) -> str:
        return kernel.file or self.first

    def arm(self, name: str, kernel: Kernel) -> Arm:
        """A kernel under its name, at its seat."""
        seat = (self._file(kernel), name.endswith(NULL)) if self.apart else self.seats[0]
        return Arm(name, kernel, self.seats.index(seat))

    def load(self, seat: int) -> tuple[str, ...]:
        """The user's files that the process at a seat loads."""
        file, _ = self.seats[seat]
        return (file,) if file else ()


class Crew:
    """The processes of one timing."""

    def __init__(self, seating: Seating, jobs: Sequence[Job], device: str, options: Options, timeout_s: float) -> None:
        self.turns = Turns(context, len(seating.seats))  # kept: its semaphores last as long as the parent holds them
        self.timeout_s = timeout_s
        self.workers = [
            Worker(
                time_main, self.turns, seat, tuple(jobs), device, options, seating.load(seat), timeout_s=timeout_s, seat=seat
            )
            for seat in range(len(seating.seats))
        ]  # fmt: skip

    @property
    def arm(self) -> int:
        """The number of the arm whose step it is, −1 where it is none's."""
        return int(self.turns.arm.value)

    def listen(self) -> Iterator[Message | Died]:
        """Messages as from one process: the samples of a case when all have sent theirs, Done when all are."""
        parts: dict[int, list[Sampled]] = {}
        done: list[Done] = []
        for message in listen(self.workers, self.timeout_s):
            if isinstance(message, Sampled):
                mine = parts.setdefault(message.index, [])
                mine.append(message)
                if len(mine) == len(self.workers):
                    yield merged(parts.pop(message.index))
            elif isinstance(message, Done):
                done.append(message)
                if len(done) == len(self.workers):
                    yield Done(tuple(sorted({file for d in done for file in d.files})))
            elif isinstance(message, Died):
                # A process that waits for its turn may have begun the next case already.
                yield replace(message, index=int(self.turns.case.value))
            else:
                yield message


def merged(parts: Sequence[Sampled]) -> Sampled:
    """What several processes found on one case, the samples in the order they were taken."""
    whole, *others = parts
    for part in others:
        whole = replace(
            whole, samples=whole.samples + part.samples, outputs=whole.outputs | part.outputs,
            second=whole.second | part.second, trespasses=whole.trespasses | part.trespasses,
            memory=whole.memory or part.memory,
        )  # fmt: skip
    return replace(whole, samples=tuple(sorted(whole.samples, key=lambda s: s.at_ns)))
