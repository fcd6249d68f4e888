"""How long a span of work took: on a CPU by the host's clock, on an accelerator by events on its stream.

The host's clock is taken before any kernel is loaded, so that one which patches ``time`` afterwards times nothing but itself.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Protocol

from replay.devices import Device
from replay.timing.telemetry import Telemetry

host_ns = perf_counter_ns

# A span shorter than this is dominated by what surrounds it; an event pair on an XPU carries about 0.1 ms by itself.
LEAST_HOST_NS, LEAST_STREAM_NS = 500_000, 2_000_000
# Events and the host's clock may part by so much: the host reads its clock a little outside of what the events enclose.
APART, APART_NS = 0.05, 300_000
# Work that is queued before a span, so that the device never waits for the host: this many times what the host needs to
# hand the calls over, and never more than a tenth of a second.
LEAD, MOST_LEAD_NS = 1.5, 100_000_000
AWAKE_NS = 50_000  # a start that takes longer may have put threads to sleep, or others to work that go on spinning
DISAGREES, WAITED, TRACED = "clock_disagrees", "host_waited", "traced"


@dataclass(frozen=True)
class Span:
    """``ns`` by the device's clock. ``host_ns``: what the host took to hand the work over, where that is another time. ``mhz``:
    the device's clock frequency beside it."""

    ns: int
    host_ns: int | None = None
    flags: tuple[str, ...] = ()
    mhz: int | None = None


def _tracers() -> tuple[object, ...]:
    """Who is called as Python goes on in this thread: whoever it is could work when the clock has stopped."""
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12
    tools = tuple(monitoring.get_tool(number) for number in range(6)) if monitoring else ()
    return sys.gettrace(), sys.getprofile(), *tools


CLEAN = _tracers()


def put_back_tracers() -> bool:
    """Take away whoever traces this process and did not when it began; whether there was somebody."""
    found = _tracers()
    if found == CLEAN:
        return False
    sys.settrace(CLEAN[0])  # type: ignore[arg-type]  # what gettrace gave
    sys.setprofile(CLEAN[1])  # type: ignore[arg-type]
    for number, (was, now) in enumerate(zip(CLEAN[2:], found[2:], strict=True)):
        if was is None and now is not None:
            sys.monitoring.free_tool_id(number)  # type: ignore[attr-defined]  # there are tools only where it is
    return True


def _nothing() -> None:
    """Nothing to do at that end of a span."""


Work = Callable[[], object]


class Clock(Protocol):
    """Times work on one device. A span should last ``least_ns`` or more."""

    least_ns: int

    def span(self, work: Work, lead_ns: int = 0, start: Work = _nothing, stop: Work = _nothing) -> Span:
        """Do some work and wait for it. ``lead_ns`` is about what the host takes to hand it over; ``start`` and ``stop`` are
        done right before the clock starts and right after it stops, in the order of the device's work."""


def clock_of(device: Device, telemetry: Telemetry | None = None) -> Clock:
    """The clock of a device."""
    from replay.kernels.probes import waker

    return HostClock(telemetry, waker(device)) if device.kind == "cpu" else StreamClock(device, telemetry)


def _mhz(telemetry: Telemetry | None) -> int | None:
    return telemetry.mhz() if telemetry else None


class HostClock:
    """For work that is done when the call returns. ``wake`` puts the threads to work that do it: they sleep when they find
    nothing to do, and to wake them takes longer than many a kernel. It comes before the inputs are written, so that nothing
    finds them ahead of the clock; and again behind a start that took long: they may sleep once more, or those spin that wrote."""

    least_ns = LEAST_HOST_NS

    def __init__(self, telemetry: Telemetry | None = None, wake: Work = _nothing) -> None:
        self.telemetry, self.wake = telemetry, wake

    def span(self, work: Work, lead_ns: int = 0, start: Work = _nothing, stop: Work = _nothing) -> Span:
        """Nothing is queued, so there is nothing to lead with."""
        self.wake()
        starting = host_ns()
        start()
        if host_ns() - starting > AWAKE_NS:
            self.wake()
        begin = host_ns()
        work()
        tracers = _tracers()  # asked before the clock stops, since they can take themselves away behind it
        elapsed = host_ns() - begin
        stop()
        return Span(elapsed, flags=() if tracers == CLEAN else (TRACED,), mhz=_mhz(self.telemetry))


class StreamClock:
    """For work that a host queues on the device's current stream.

    Before the span so much other work is queued that the host is ahead when the device comes to it; a host that was not is
    told (``host_waited``). From the first event to the last the host's clock must have gone as far: a patched event makes them
    part (``clock_disagrees``), and so does work on another stream that is still going on when the last event came by.
    """

    least_ns = LEAST_STREAM_NS

    def __init__(self, device: Device, telemetry: Telemetry | None = None) -> None:
        self.device, self.telemetry = device, telemetry
        self.filler, self.filler_ns = device.filler()
        self.starting_ns = 0  # the longest that the host took over a start

    def span(self, work: Work, lead_ns: int = 0, start: Work = _nothing, stop: Work = _nothing) -> Span:
        """Events around the work, events and the host's clock around the lead as well."""
        first, begin, end = (self.device.event() for _ in range(3))
        lead = min(LEAD * lead_ns + self.starting_ns, MOST_LEAD_NS) if lead_ns else 0
        fillers = -(-int(lead) // self.filler_ns)
        self.device.synchronize()
        outset = host_ns()
        first.record()
        for _ in range(fillers):
            self.filler()
        starting = host_ns()
        start()
        begin.record()
        handing = host_ns()
        work()
        tracers = _tracers()
        handed = host_ns() - handing
        waited = bool(fillers) and begin.query()
        end.record()
        stop()
        mhz = _mhz(self.telemetry)  # while the device works: an idle one would tell another clock
        self.device.synchronize()
        whole = host_ns() - outset
        self.starting_ns = max(self.starting_ns, handing - starting)
        ns = round(begin.elapsed_time(end) * 1e6)
        # The lead is inside of both clocks, and needs no allowance.
        apart = abs(whole - first.elapsed_time(end) * 1e6) > APART * ns + APART_NS
        flags = {TRACED: tracers != CLEAN, WAITED: waited, DISAGREES: apart}
        return Span(ns, handed, tuple(name for name, found in flags.items() if found), mhz)
