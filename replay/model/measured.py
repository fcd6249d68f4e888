"""What was measured: self-tests, ceilings, samples, times, effects and verdicts."""

from typing import Literal

from replay.model.value import Value


class Finding(Value, frozen=True):
    """One self-test of a device: how many answers were asked for (0: the device has no such unit), how many were wrong."""

    key: str
    name: str
    asked: int
    wrong: int

    def __str__(self) -> str:
        if not self.asked:
            return f"{self.name:<36} not there"
        return f"{self.name:<36} {f'WRONG in {self.wrong:,} of' if self.wrong else 'right,'} {self.asked:,}"


class Interval(Value, frozen=True):
    """A middle and a 95 % interval around it, all in the unit of the field that holds it."""

    mid: float
    lo: float
    hi: float


class Work(Value, frozen=True):
    """What a case must do at least. Bytes of the cold operand are apart from bytes that may come from cache."""

    read_bytes: int
    write_bytes: int
    hot_bytes: int
    int8_ops: int
    launches: int = 1
    bf16_ops: int = 0


class Floor(Value, frozen=True):
    """The least time the device could take for a case, in µs, which term set it, and the terms of bytes and operations."""

    us: float
    term: Literal["bytes", "operations", "launch"]
    bytes_us: float
    operations_us: float
    work: Work


class Ceilings(Value, frozen=True):
    """Calibrated rates in GB/s (1e9 bytes a second) and GOP/s (1e9 operations, a multiply and an add being two), an empty
    launch in µs, and the implementation that reached each."""

    read_gbs: Interval
    copy_gbs: Interval
    inplace_gbs: Interval
    hot_gbs: Interval
    launch_us: Interval
    int8_gops: Interval
    bf16_gops: Interval
    best_of: dict[str, str]


class MemoryRates(Value, frozen=True):
    """The memory ceilings alone, in GB/s, as they are measured between one case and the next."""

    read_gbs: Interval
    copy_gbs: Interval
    inplace_gbs: Interval


# Behind a baseline's id: the arm that is a second copy of it, the null arm of a comparison.
NULL = "#null"


class Sample(Value, frozen=True):
    """One timed span: ``calls`` calls of one arm, a kernel's id or the baseline's with NULL behind it.

    ``span_ns`` is the time that counts, by the device's clock, and ``at_ns`` where the span began, from the first of its
    case and process. ``host_ns`` is what the host took to hand the calls over, where the device works apart from it;
    ``mhz`` the device's clock frequency beside the span, where it can be read.
    """

    block: int
    arm: str
    calls: int
    span_ns: int
    at_ns: int
    host_ns: int | None = None
    mhz: int | None = None
    flags: tuple[str, ...] = ()


class Timing(Value, frozen=True):
    """Time of one call in µs: the median over samples and the interval of that median; ``host_us`` is the host's part, where
    it is known apart from the device's."""

    us: Interval
    samples: int
    calls: int
    processes: int
    host_us: float | None = None


class Effect(Value, frozen=True):
    """log(arm / baseline) as a share: −0.5 is half the time; ``ratio`` with its interval at ``confidence``, ``ratio90`` with
    that at 90 %.

    ``confidence`` is 0.95, or more where the claim has several shapes; ``p`` is two-sided, of no effect, unadjusted.
    ``mde`` is the minimum detectable effect, a share found with power 0.9. ``needed`` counts the processes that would decide
    (None where one process tells no spread, or no number up to a thousand would).
    """

    ratio: Interval
    ratio90: Interval
    mde: float
    processes: int
    needed: int | None = None
    p: float = 1.0
    confidence: float = 0.95


class Comparison(Value, frozen=True):
    """A kernel against its baseline, and the baseline against a second copy of itself over the whole claim."""

    baseline: str
    effect: Effect
    null: Effect | None


class Verdict(Value, frozen=True):
    """The label a user acts on, and the reason codes behind it."""

    label: Literal["BASELINE", "FASTER", "SLOWER", "SAME", "INCONCLUSIVE", "INVALID"]
    quick: bool
    reasons: tuple[str, ...] = ()
    processes_needed: int | None = None
