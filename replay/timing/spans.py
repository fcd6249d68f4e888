"""Time spans of calls, in blocks of random order, on the device's own clock. Runs in a child process."""

import gc
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from replay.devices import Device
from replay.exactness import Got
from replay.model import NULL, Kernel, Sample, Value
from replay.stages.vary import CHECKED
from replay.timing.clocks import TRACED, WAITED, Clock, Span, clock_of, host_ns, put_back_tracers
from replay.timing.dropped import THROTTLED
from replay.timing.telemetry import Telemetry
from replay.timing.turns import Seat

if TYPE_CHECKING:
    from replay.session.arms import Ring
    from replay.session.buffers import Binding, Use
    from replay.stages.stage import Tensors

POISON = 0x7B
WARM_WINDOW = 10
WARM_SLOPE = 0.005
WARM_LIMIT_NS, QUICK_WARM_NS = 150_000_000, 60_000_000
LEADS = 4
LEAST_WARM = (30, 10)  # spans before time alone ends a warm-up, of a full run and of a quick look
SHORT, NOT_COLD = "short_span", "not_cold"

Launch = Literal["calls", "graph"]


class Options(Value, frozen=True):
    """How a case is timed."""

    blocks: int
    cache: str
    launch: Launch
    seed: int
    process: int
    quick: bool


class Arm(Value, frozen=True):
    """One line of a block: a kernel under a name, and the seat of the process that it is timed in."""

    name: str
    kernel: Kernel
    seat: int


def generator(what: str, options: Options) -> np.random.Generator:
    """The random source of one thing in one process of a run; the same in each of the processes that take turns."""
    key = hashlib.sha256(f"{what}/{options.seed}/{options.process}".encode()).digest()[:16]
    return np.random.Generator(np.random.Philox(key=np.frombuffer(key, np.uint64)))


@dataclass(frozen=True)
class Place:
    """What stays the same for every case that one process times."""

    device: Device
    options: Options
    seat: Seat
    clock: Clock
    telemetry: Telemetry

    @classmethod
    def on(cls, device: Device, options: Options, seat: Seat) -> "Place":
        """The place of this process."""
        telemetry = Telemetry(device)
        return cls(device, options, seat, clock_of(device, telemetry), telemetry)


Runs = Mapping[str, list[tuple[Callable[[Mapping[str, Any]], None], dict[str, Any]]]]


class Timer:
    """Times arms of one case. All arms of a process share the bindings, and the position in the ring runs on over all of
    them. ``runs`` holds the arms of this process, ``arms`` those of all that take turns with it; without any of its own a
    process has no ring."""

    def __init__(self, place: Place, ring: "Ring | None", arms: Sequence[Arm], runs: Runs, flags: tuple[str, ...]) -> None:
        self.device, self.options, self.place = place.device, place.options, place
        self.ring, self.bindings = ring, ring.bindings if ring else []
        self.arms, self.runs, self.flags = arms, runs, flags
        self.position = 0
        self.trespasses: dict[str, str] = {}
        self.calls: dict[str, int] = {}  # by kernel: it and its second copy are sampled alike
        self.idle: dict[str, int] = dict.fromkeys(runs, 0)
        self.lead_ns: dict[str, float] = dict.fromkeys(runs, 0.0)  # the host's part of one call
        self.graphs: dict[str, list[Callable[[], object]]] = {}  # one for so many calls from 0 on, from there on, and so forth
        self.threads = place.device.threads()
        self.variation = CHECKED

    def _turn(self, number: int) -> AbstractContextManager[bool]:
        """The step of one arm; whatever dies in it is charged to that arm."""
        return self.place.seat.turn(self.arms[number].seat, number)

    def blocks(self, case: str) -> tuple[tuple[Sample, ...], dict[str, Got]]:
        """Every block holds one sample of each arm in random order.

        No call sees the bytes of another. One call an arm, in a block and at a place that are drawn, is on the variation
        that the oracle knows, and what it wrote is kept.
        """
        order = generator(f"blocks/{case}", self.options)
        flags = self._warm_up_all(order)
        drawn = generator(f"kept/{case}", self.options)
        checked = {arm: int(drawn.integers(0, self.options.blocks)) for arm in self.runs}
        samples: list[Sample] = []
        outputs: dict[str, Got] = {}
        written: dict[str, bool] = {}  # a case without a valid row leaves its outputs as they were
        gc.collect()
        gc.disable()
        try:
            for block in range(self.options.blocks):
                for number in order.permutation(len(self.arms)):
                    with self._turn(number) as mine:
                        if mine:
                            arm = self.arms[number].name
                            calls = self.calls[arm.removesuffix(NULL)]
                            kept = int(drawn.integers(calls)) if checked[arm] == block else None
                            use = self._use(calls, kept, drawn)
                            samples.append(self._sample(block, arm, use, (*flags[arm], *self.flags)))
                            if use.kept:
                                outputs[arm], written[arm] = Got(use.outputs(), POISON), not use.kept.untouched()
                            self._inspect(arm, use.bindings)
        finally:
            gc.enable()
        for arm in self.runs:
            if self.idle[arm] and written[arm]:
                self._charge(arm, f"left its outputs untouched in {self.idle[arm]} calls when the clock stopped")
        return tuple(samples), outputs

    def _sample(self, block: int, arm: str, use: "Use", flags: tuple[str, ...]) -> Sample:
        """One span that counts."""
        self.place.telemetry.throttled()  # what was before the span is not the span's
        at = self.place.seat.since_ns()
        span = self._span(arm, len(use.bindings), use)
        throttled = (THROTTLED,) if self.place.telemetry.throttled() else ()
        return Sample(block, arm, len(use.bindings), span.ns, at, span.host_ns, span.mhz, (*flags, *span.flags, *throttled))

    def _warm_up_all(self, order: np.random.Generator) -> dict[str, tuple[str, ...]]:
        """Flags by arm; how many calls each makes is known then."""
        flags: dict[str, tuple[str, ...]] = {}
        for number in order.permutation(len(self.arms)):
            with self._turn(number) as mine:
                if mine:
                    arm = self.arms[number].name
                    flags[arm] = self._warm_up(arm)
                    self._inspect(arm, self.bindings)
        return flags

    def _use(self, calls: int, kept: int | None, rng: np.random.Generator) -> "Use":
        """The bindings that the next span will use: inputs varied and staged, outputs poisoned; ``kept`` is the place of the
        one whose output will be compared."""
        assert self.ring is not None
        used = [self.bindings[i] for i in self._places(calls)]
        for place, binding in enumerate(used):
            self.variation += 1
            binding.vary(CHECKED if place == kept else self.variation)
            binding.restore()
            binding.poison_outputs(POISON)
        use = self.ring.use(used, kept, rng)
        self.device.synchronize()
        return use

    def _inspect(self, arm: str, used: Sequence["Binding"]) -> None:
        """Charge the arm that ran last with what it wrote outside its outputs, and put the inputs right."""
        for binding in self.ring.doubtful(used) if self.ring else ():
            if found := binding.trespasses():
                self._charge(arm, "; ".join(found))
                binding.mend()
        if changed := put_back(self.device, self.threads):
            self._charge(arm, changed)

    def _charge(self, arm: str, what: str) -> None:
        self.trespasses.setdefault(arm, f"in a timed call: {what}")

    def answers(self, second: Callable[[], "Tensors"]) -> dict[str, Got]:
        """Each arm's outputs on other bytes at the addresses it was timed on: what was remembered is wrong there."""
        found: dict[str, Got] = {}
        rng = generator("answers", self.options)
        for number, arm in enumerate(self.arms):
            with self._turn(number) as mine:
                if mine:
                    if not found:
                        self._pose(second())
                    use = self._use(self.calls[arm.kernel.id] if arm.name in self.graphs else 1, 0, rng)
                    self._span(arm.name, len(use.bindings), use)
                    found[arm.name] = Got(use.outputs(), POISON)
                    self._inspect(arm.name, use.bindings)
        return found

    def _pose(self, other: "Tensors") -> None:
        """Put another case's inputs at all bindings."""
        assert self.ring is not None
        moved = self.ring.moved(other)
        for i, binding in enumerate(self.bindings):
            binding.pose(moved[i % len(moved)])

    def _span(self, arm: str, calls: int, use: "Use | None" = None) -> Span:
        """The time of ``calls`` calls on consecutive bindings, the wait for the device included.

        Of a span that counts, those calls are counted whose outputs nobody had touched when the clock stopped.
        """
        lead_ns = round(self.lead_ns[arm] * calls)
        if use is None:
            span = self.place.clock.span(self._next(arm, calls), lead_ns)
        else:
            span = self.place.clock.span(self._next(arm, calls), lead_ns, use.start, use.stop)
            self.idle[arm] += use.idle()
        if TRACED in span.flags:
            self._charge(arm, "traced the function that timed it")
        return span

    def _places(self, calls: int) -> list[int]:
        """The bindings that the next span uses: from the position of the ring on, for graphs from where the next one begins."""
        n, position = len(self.bindings), self.position
        if self.options.launch == "graph":
            position = -(-position // calls) * calls
            position = position if position + calls <= n else 0
        return [(position + i) % n for i in range(calls)]

    def _next(self, arm: str, calls: int) -> Callable[[], object]:
        """The work of the next span; the position of the ring moves past it."""
        places = self._places(calls)
        self.position = (places[-1] + 1) % len(self.bindings)
        if arm in self.graphs:
            return self.graphs[arm][places[0] // calls]
        return self._calls(arm, places)

    def _calls(self, arm: str, places: Sequence[int]) -> Callable[[], None]:
        """One call of an arm on each of these bindings."""
        todo = [self.runs[arm][i] for i in places]

        def work() -> None:
            for run, tensors in todo:
                run(tensors)

        return work

    def _led(self, arm: str, single: Span) -> Span:
        """One call behind a lead that is long enough: handing work to a busy device takes longer than to an idle one.

        A call that waits for the device by itself is late behind any lead, and gets the one that it began with.
        """
        if single.host_ns is None:
            return single
        self.lead_ns[arm] = first = float(single.host_ns)
        for _ in range(LEADS):
            led = self._span(arm, 1)
            if WAITED not in led.flags:
                return led
            self.lead_ns[arm] = float(led.host_ns or 0)
        self.lead_ns[arm] = first
        return single

    def _warm_up(self, arm: str) -> tuple[str, ...]:
        """Flags. Goes on until the last window of spans has no slope, not for a count."""
        single = min((self._span(arm, 1) for _ in range(3)), key=lambda span: span.ns)
        single = self._led(arm, single)
        # Never more calls than bindings: a second lap would find the first one's outputs where poison should be. A kernel and
        # its second copy are sampled alike, whatever their warm-up made of it.
        wanted = -(-self.place.clock.least_ns // max(single.ns, 1))
        calls = self.calls.setdefault(arm.removesuffix(NULL), int(np.clip(wanted, 1, len(self.bindings))))
        flags: tuple[str, ...] = (SHORT,) if self.device.kind != "cpu" and wanted > len(self.bindings) else ()
        if self.options.launch == "graph":
            flags += self._capture(arm, calls)
        window: list[float] = []
        begin, limit = host_ns(), QUICK_WARM_NS if self.options.quick else WARM_LIMIT_NS
        while True:
            window.append(self._span(arm, calls).ns / calls)
            if len(window) >= WARM_WINDOW:
                recent = np.array(window[-WARM_WINDOW:])
                slope = np.polyfit(np.arange(WARM_WINDOW), recent, 1)[0] * WARM_WINDOW / np.median(recent)
                if abs(slope) < WARM_SLOPE:
                    return flags
                if host_ns() - begin > limit and len(window) >= LEAST_WARM[self.options.quick]:
                    return (*flags, "not_stationary")

    def _capture(self, arm: str, calls: int) -> tuple[str, ...]:
        """Graph after graph round the ring, so that a replay finds as little in the cache as calls do; flags."""
        begins = range(0, len(self.bindings) - calls + 1, calls)
        self.graphs[arm] = [self.device.graph(self._calls(arm, range(b, b + calls))) for b in begins]
        self.lead_ns[arm] = (self._span(arm, calls).host_ns or 0) / calls
        assert self.ring is not None
        return () if self.ring.cold_on(len(begins) * calls) else (NOT_COLD,)


def put_back(device: Device, threads: int) -> str | None:
    """Undo what a kernel did to this process that all others would pay for; what it was, or None."""
    traced = "left a trace function behind" if put_back_tracers() else None
    return device.put_back(threads) or traced
