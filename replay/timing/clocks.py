"""How long a span of work took: on a CPU by the host's clock, on an accelerator by events on its stream.

The host's clock is taken before any kernel is loaded, so that one which patches ``time`` afterwards times nothing but itself.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Protocol

from replay.devices import Device

host_ns = perf_counter_ns

# A span shorter than this is dominated by what surrounds it; an event pair on an XPU carries about 0.1 ms by itself.
LEAST_HOST_NS, LEAST_STREAM_NS = 500_000, 2_000_000
# Events and the host's clock may part by so much: the host reads its clock a little outside of what the events enclose.
APART, APART_NS = 0.05, 300_000
# Work that is queued before a span, so that the device never waits for the host: this many times what the host needs to
# hand the calls over, and never more than a tenth of a second.
LEAD, MOST_LEAD_NS = 1.5, 100_000_000
DISAGREES, WAITED, TRACED = "clock_disagrees", "host_waited", "traced"


@dataclass(frozen=True)
class Span:
    """``ns`` by the device's clock. ``host_ns``: what the host took to hand the work over, where that is another time.

    ``early`` and ``late`` are what ``look`` saw when the clock started and when it stopped, in the order of the device's work.
    """

    ns: int
    host_ns: int | None = None
    flags: tuple[str, ...] = ()
    early: Any = None
    late: Any = None


def _tracers() -> tuple[object, object]:
    """Who is called as Python goes on in this thread: whoever it is could work when the clock has stopped."""
    return sys.gettrace(), sys.getprofile()


def _blind() -> None:
    """Nothing to look at."""


class Clock(Protocol):
    """Times work on one device. A span should last ``least_ns`` or more."""

    least_ns: int

    def span(self, work: Callable[[], object], lead_ns: int = 0, look: Callable[[], object] = _blind) -> Span:
        """Do some work and wait for it. ``lead_ns`` is about what the host takes to hand it over."""


def clock_of(device: Device) -> Clock:
    """The clock of a device."""
    return HostClock() if device.kind == "cpu" else StreamClock(device)


class HostClock:
    """For work that is done when the call returns."""

    least_ns = LEAST_HOST_NS

    def span(self, work: Callable[[], object], lead_ns: int = 0, look: Callable[[], object] = _blind) -> Span:
        """Nothing is queued, so there is nothing to lead with."""
        early = look()
        before = _tracers()
        begin = host_ns()
        work()
        after = _tracers()  # asked before the clock stops, since they can take themselves away behind it
        elapsed = host_ns() - begin
        return Span(elapsed, flags=() if after == before else (TRACED,), early=early, late=look())


class StreamClock:
    """For work that a host queues on the device's current stream.

    Before the span so much other work is queued that the host is ahead when the device comes to it; a host that was not is
    told (``host_waited``). From the first event to the last the host's clock must have gone as far: a patched event makes them
    part (``clock_disagrees``), and so does work on another stream that is still going on when the last event came by. What is
    done elsewhere while the lead runs is seen by what ``look`` queues at both ends of the span.
    """

    least_ns = LEAST_STREAM_NS

    def __init__(self, device: Device) -> None:
        self.device = device
        self.filler, self.filler_ns = device.filler()

    def span(self, work: Callable[[], object], lead_ns: int = 0, look: Callable[[], object] = _blind) -> Span:
        """Events around the work, events and the host's clock around the lead as well."""
        first, begin, end = (self.device.event() for _ in range(3))
        fillers = -(-int(min(LEAD * lead_ns, MOST_LEAD_NS)) // self.filler_ns)
        self.device.synchronize()
        outset = host_ns()
        first.record()
        for _ in range(fillers):
            self.filler()
        early = look()
        begin.record()
        before = _tracers()
        handing = host_ns()
        work()
        traced = _tracers() != before
        handed = host_ns() - handing
        waited = bool(fillers) and begin.query()
        end.record()
        late = look()
        self.device.synchronize()
        whole = host_ns() - outset
        apart = abs(whole - first.elapsed_time(end) * 1e6)
        flags = (
            ((TRACED,) if traced else ())
            + ((WAITED,) if waited else ())
            + ((DISAGREES,) if apart > APART * whole + APART_NS else ())
        )
        return Span(round(begin.elapsed_time(end) * 1e6), handed, flags, early, late)
