"""Time spans of calls, in blocks of random order, on the device's own clock.

Runs in a child process. The clock and the random source are taken before any kernel is loaded, so that a kernel which
patches ``time`` afterwards times nothing but itself.
"""

import gc
import hashlib
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from replay.devices import Device
from replay.exactness import Got
from replay.model import NULL, Sample, Value
from replay.stages.vary import CHECKED

if TYPE_CHECKING:
    from replay.session.arms import Ring
    from replay.session.buffers import Binding
    from replay.stages.stage import Tensors

_clock = perf_counter_ns

# A span shorter than this is dominated by what surrounds it; on a CPU 0.5 ms is a thousand times the clock's reading.
MIN_SPAN_NS = {"cpu": 500_000}
MIN_SPAN_ACCELERATOR_NS = 2_000_000
POISON = 0x7B
WARM_WINDOW = 10
WARM_SLOPE = 0.005
WARM_LIMIT_NS = 150_000_000


class Options(Value, frozen=True):
    """How a case is timed."""

    blocks: int
    cache: str
    seed: int
    process: int
    quick: bool


def generator(what: str, options: Options) -> np.random.Generator:
    """The random source of one thing in one process of a run."""
    key = hashlib.sha256(f"{what}/{options.seed}/{options.process}".encode()).digest()[:16]
    return np.random.Generator(np.random.Philox(key=np.frombuffer(key, np.uint64)))


Runs = Mapping[str, list[tuple[Callable[[Mapping[str, Any]], None], dict[str, Any]]]]


class Timer:
    """Times arms of one case. All arms share the bindings, and the position in the ring runs on over all of them."""

    def __init__(self, device: Device, ring: "Ring", runs: Runs, options: Options, flags: tuple[str, ...], at_arm: Any) -> None:
        self.device, self.ring, self.bindings, self.runs, self.options = device, ring, ring.bindings, runs, options
        self.flags, self.at_arm = flags, at_arm
        self.position = 0
        self.numbers = {arm: i for i, arm in enumerate(runs)}
        self.trespasses: dict[str, str] = {}
        self.idle: dict[str, int] = dict.fromkeys(runs, 0)
        self.threads = device.threads()
        self.variation = CHECKED

    def blocks(self, case: str) -> tuple[tuple[Sample, ...], dict[str, Got]]:
        """Every block holds one sample of each arm in random order.

        No call sees the bytes of another. One call an arm, in a block and at a place that are drawn, is on the variation
        that the oracle knows, and what it wrote is kept.
        """
        rng = generator(f"blocks/{case}", self.options)
        names = list(self.runs)
        calls, flags = {}, {}
        for i in rng.permutation(len(names)):
            arm = names[int(i)]
            calls[arm], flags[arm] = self._warm_up(arm)
            self._inspect(arm, self.bindings)
        # Two copies of one kernel are sampled alike, whatever their warm-up made of it.
        calls |= {arm: calls[arm.removesuffix(NULL)] for arm in names if arm.endswith(NULL)}
        checked = {arm: int(rng.integers(0, self.options.blocks)) for arm in names}
        samples: list[Sample] = []
        outputs: dict[str, Got] = {}
        written: dict[str, bool] = {}  # a case without a valid row leaves its outputs as they were
        begin = _clock()
        gc.collect()
        gc.disable()
        try:
            for block in range(self.options.blocks):
                for i in rng.permutation(len(names)):
                    arm = names[int(i)]
                    kept = int(rng.integers(calls[arm])) if checked[arm] == block else None
                    used = self._reset(calls[arm], kept)
                    at = _clock() - begin
                    elapsed = self._span(arm, calls[arm], used)
                    samples.append(Sample(block, arm, calls[arm], elapsed, at, flags[arm] + self.flags))
                    self._inspect(arm, used)
                    if kept is not None:
                        outputs[arm] = Got(used[kept].outputs(), POISON)
                        written[arm] = not used[kept].untouched()
        finally:
            gc.enable()
        for arm in names:
            if self.idle[arm] and written[arm]:
                self._charge(arm, f"left its outputs untouched in {self.idle[arm]} calls when the clock stopped")
        return tuple(samples), outputs

    def _reset(self, calls: int, kept: int | None) -> list["Binding"]:
        """Vary, restore and poison the bindings that the next span will use, and return them; ``kept`` is the place of the
        one whose output will be compared."""
        used = [self.bindings[(self.position + i) % len(self.bindings)] for i in range(calls)]
        for place, binding in enumerate(used):
            self.variation += 1
            binding.vary(CHECKED if place == kept else self.variation)
            binding.restore()
            binding.poison_outputs(POISON)
        self.device.synchronize()
        return used

    def _inspect(self, arm: str, used: list["Binding"]) -> None:
        """Charge the arm that ran last with what it wrote outside its outputs, and put the inputs right."""
        for binding in used:
            if found := binding.trespasses():
                self._charge(arm, "; ".join(found))
                binding.mend()
        if changed := self.device.put_back(self.threads):
            self._charge(arm, changed)

    def _charge(self, arm: str, what: str) -> None:
        self.trespasses.setdefault(arm, f"in a timed call: {what}")

    def answers(self, second: "Tensors") -> dict[str, Got]:
        """Each arm's outputs on other bytes at the addresses it was timed on: what was remembered is wrong there."""
        for i, moved in enumerate(self.ring.moved(second) * (len(self.bindings) // len(self.ring.moved(second)))):
            self.bindings[i].pose(moved)
        found = {}
        for arm in self.runs:
            used = self._reset(1, 0)
            self._span(arm, 1)
            found[arm] = Got(used[0].outputs(), POISON)
            self._inspect(arm, used)
        return found

    def _span(self, arm: str, calls: int, poisoned: Sequence["Binding"] = ()) -> int:
        """Nanoseconds of ``calls`` calls on consecutive bindings, the wait for the device included.

        Of the bindings that were ``poisoned`` for it, those whose outputs nobody had touched when the clock stopped are
        counted here, before anything else can run.
        """
        runs, position, n = self.runs[arm], self.position, len(self.bindings)
        todo = [runs[(position + i) % n] for i in range(calls)]
        self.position = (position + calls) % n
        self.at_arm.value = self.numbers[arm]
        begin = _clock()
        for run, tensors in todo:
            run(tensors)
        self.device.synchronize()
        elapsed = _clock() - begin
        self.idle[arm] += sum(binding.untouched() for binding in poisoned)
        return elapsed

    def _warm_up(self, arm: str) -> tuple[int, tuple[str, ...]]:
        """(calls a sample, flags). Goes on until the last window of spans has no slope, not for a count."""
        single = min(self._span(arm, 1) for _ in range(3))
        least = MIN_SPAN_NS.get(self.device.kind, MIN_SPAN_ACCELERATOR_NS)
        # Never more calls than bindings: a second lap would find the first one's outputs where poison should be.
        calls = int(np.clip(-(-least // max(single, 1)), 1, len(self.bindings)))
        window: list[float] = []
        begin = _clock()
        while True:
            window.append(self._span(arm, calls) / calls)
            if len(window) >= WARM_WINDOW:
                recent = np.array(window[-WARM_WINDOW:])
                slope = np.polyfit(np.arange(WARM_WINDOW), recent, 1)[0] * WARM_WINDOW / np.median(recent)
                if abs(slope) < WARM_SLOPE:
                    return calls, ()
                if _clock() - begin > WARM_LIMIT_NS:
                    return calls, ("not_stationary",)
