"""Spans by events on a stream, with a stand-in for the device whose time is known: what parts from the host's clock is seen."""

import sys
from collections.abc import Callable

import pytest

from replay.timing import clocks
from replay.timing.clocks import DISAGREES, TRACED, WAITED, HostClock, StreamClock, put_back_tracers

US = 1_000


class Stream:
    """An accelerator that works in the order of its queue, and a host whose clock goes on as it hands work over."""

    def __init__(self, *, filler_ns: int = 100 * US, skew: float = 1.0) -> None:
        self.now = 0  # the host
        self.free = 0  # when the device has done what was queued
        self.elsewhere = 0  # when its other streams have
        self.filler_ns, self.skew = filler_ns, skew

    def queue(self, device_ns: int, host_ns: int = 5 * US) -> None:
        """Hand over work."""
        self.now += host_ns
        self.free = max(self.free, self.now) + device_ns

    def queue_elsewhere(self, device_ns: int) -> None:
        """Hand over work on another stream."""
        self.now += 5 * US
        self.elsewhere = max(self.elsewhere, self.free, self.now) + device_ns

    def filler(self) -> tuple[Callable[[], None], int]:
        """Work of a known length."""
        return lambda: self.queue(self.filler_ns), self.filler_ns

    def event(self) -> "Event":
        """A new event."""
        return Event(self)

    def synchronize(self) -> None:
        """Wait for all streams."""
        self.now = max(self.now, self.free, self.elsewhere)


class Event:
    """When the device came by."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.at = 0

    def record(self) -> None:
        """At the end of what is queued now."""
        self.stream.free = max(self.stream.free, self.stream.now)
        self.at = self.stream.free

    def query(self) -> bool:
        """Whether the device has come by."""
        return self.stream.now >= self.at

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds."""
        return (end.at - self.at) * self.stream.skew / 1e6


def stream_clock(monkeypatch: pytest.MonkeyPatch, **kwargs: float) -> tuple[Stream, StreamClock]:
    """A stream and its clock; the host's is the stream's as well."""
    stream = Stream(**kwargs)  # type: ignore[arg-type]  # numbers
    monkeypatch.setattr(clocks, "host_ns", lambda: stream.now)
    return stream, StreamClock(stream)  # type: ignore[arg-type]  # a stand-in


def calls(stream: Stream, device_ns: int, host_ns: int) -> Callable[[], None]:
    """A hundred calls."""
    return lambda: [stream.queue(device_ns, host_ns) for _ in range(100)] and None  # type: ignore[return-value]


def test_the_device_never_waits_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of 20 µs that the host needs 50 µs each to hand over: behind a lead they take 20."""
    stream, clock = stream_clock(monkeypatch)
    slow = clock.span(calls(stream, 20 * US, 50 * US))
    assert slow.ns == pytest.approx(5_020 * US, rel=0.01)
    led = clock.span(calls(stream, 20 * US, 50 * US), lead_ns=5_000 * US)
    assert (led.ns, led.host_ns, led.flags) == (2_000 * US, 5_000 * US, ())


def test_a_host_that_was_late_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lead that was too short leaves the host's time in the span."""
    stream, clock = stream_clock(monkeypatch)
    span = clock.span(calls(stream, 20 * US, 50 * US), lead_ns=500 * US)
    assert span.ns > 2_000 * US
    assert span.flags == (WAITED,)


@pytest.mark.parametrize("skew", [10.0, 0.1])
def test_a_clock_of_events_that_lies(monkeypatch: pytest.MonkeyPatch, skew: float) -> None:
    """Ten times fast or slow parts from the host's."""
    stream, clock = stream_clock(monkeypatch, skew=skew)
    assert DISAGREES in clock.span(calls(stream, 50 * US, US), lead_ns=100 * US).flags


def test_work_left_on_a_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """No event saw it; the wait for the device did."""
    stream, clock = stream_clock(monkeypatch)
    assert clock.span(calls(stream, 50 * US, US), lead_ns=100 * US).flags == ()
    assert DISAGREES in clock.span(lambda: [stream.queue_elsewhere(50 * US) for _ in range(100)], lead_ns=100 * US).flags


def test_both_ends_are_in_the_order_of_the_devices_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done at the start is queued behind the lead, and what is done at the stop behind the work; neither counts."""
    stream, clock = stream_clock(monkeypatch)
    ends = []

    def end() -> None:
        stream.queue(30 * US, 0)
        ends.append(stream.free)

    span = clock.span(calls(stream, 50 * US, US), lead_ns=1_000 * US, start=end, stop=end)
    assert ends[1] - ends[0] == span.ns + 30 * US


def test_a_long_lead_allows_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A span of 5 ms behind a lead of 90: a millisecond on a side stream is seen all the same."""
    stream, clock = stream_clock(monkeypatch)

    def work() -> None:
        calls(stream, 50 * US, US)()
        stream.queue_elsewhere(1_000 * US)

    assert clock.span(calls(stream, 50 * US, US), lead_ns=60_000 * US).flags == ()
    assert clock.span(work, lead_ns=60_000 * US).flags == (DISAGREES,)


def test_a_tracer_is_seen_before_the_clock_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it was set in this span or left behind by another; taken away, the next span is clean."""
    clock = HostClock()
    assert clock.span(lambda: sys.setprofile(lambda *_: None)).flags == (TRACED,)
    assert clock.span(lambda: None).flags == (TRACED,)
    assert put_back_tracers()
    assert not put_back_tracers()
    assert clock.span(lambda: None).flags == ()


def test_a_host_clock_times_what_is_done_when_the_call_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lead, no other time."""
    stream = Stream()
    monkeypatch.setattr(clocks, "host_ns", lambda: stream.now)
    span = HostClock().span(lambda: stream.queue(0, 700 * US))
    assert (span.ns, span.host_ns, span.flags) == (700 * US, None, ())


def test_the_threads_are_awake_before_inputs_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Woken before the start, and once more behind one that took long; never between the start of the clock and the work."""
    stream, log = Stream(), []
    monkeypatch.setattr(clocks, "host_ns", lambda: stream.now)
    clock = HostClock(wake=lambda: log.append("wake"))
    for start_us in (50, 5000):
        span = clock.span(
            lambda: (log.append("work"), stream.queue(0, 700 * US)),
            0,
            lambda us=start_us: (log.append("start"), stream.queue(0, us * US)),
        )
        assert span.ns == 700 * US
    assert log == ["wake", "start", "work", "wake", "start", "wake", "work"]
