"""Floors: the case's own bytes at the best matching rate; a time below them is no time."""

import msgspec

from replay.model import Ceilings, Interval, Work
from replay.timing.floors import below_floor, best, drifted, floor_case, floor_impl


def rate(value: float) -> Interval:
    """A rate known to a percent."""
    return Interval(value, value * 0.99, value * 1.01)


CEILINGS = Ceilings(rate(80), rate(40), rate(60), rate(120), Interval(5, 4, 6), rate(1000), rate(100), {})


def test_bytes_of_the_cold_operand_at_the_reading_rate() -> None:
    """8 MB read at 80 GB/s are 100 µs, and 120 kB from cache are one more."""
    floor = floor_case(Work(8_000_000, 0, 120_000, 0), CEILINGS, "cold-weights")
    assert floor.term == "bytes"
    assert abs(floor.us - 101) < 1e-9


def test_a_case_that_writes_is_held_to_the_rates_that_write() -> None:
    """Half read, half written: the in-place rate, not the read-only one."""
    assert abs(floor_case(Work(3_000_000, 3_000_000, 0, 0), CEILINGS, "cold-weights").us - 100) < 1e-9


def test_a_small_case_is_one_launch() -> None:
    """Launch is the other term, once, for every kernel alike."""
    floor = floor_case(Work(0, 0, 1000, 0), CEILINGS, "cold-weights")
    assert (floor.us, floor.term) == (5, "launch")


def test_many_operations_take_their_time() -> None:
    """400 MOP at 1000 GOP/s are 400 µs, where the bytes take a hundred."""
    floor = floor_case(Work(8_000_000, 0, 0, 400_000_000), CEILINGS, "cold-weights")
    assert (floor.us, floor.term, floor.bytes_us) == (400, "operations", 100)


def test_a_kernels_own_launches_never_flatter_it() -> None:
    """Its own floor grows with its launches, the case's stays."""
    floor = floor_case(Work(8_000_000, 0, 0, 0), CEILINGS, "cold-weights")
    assert [floor_impl(floor, n, CEILINGS) for n in (1, 2, 7, None)] == [100, 105, 130, None]


def test_cache_states() -> None:
    """Warm has no memory floor: everything at the rate out of cache."""
    work = Work(8_000_000, 0, 8_000_000, 0)
    assert abs(floor_case(work, CEILINGS, "cold-weights").us - (100 + 8_000_000 / 120 / 1e3)) < 1e-9
    assert abs(floor_case(work, CEILINGS, "warm").us - 16_000_000 / 120 / 1e3) < 1e-9
    assert below_floor(100.0, work, CEILINGS, "warm")
    assert not below_floor(140.0, work, CEILINGS, "warm")


def test_below_the_floor_uses_the_upper_bound_of_the_best_rate() -> None:
    """98 % of the byte time at the highest believable rate is the limit."""
    work = Work(8_000_000, 0, 0, 0)
    limit = 0.98 * 100 / 1.01
    assert below_floor(limit - 0.1, work, CEILINGS, "cold-weights")
    assert not below_floor(limit + 0.1, work, CEILINGS, "cold-weights")


def test_best_and_drift() -> None:
    """The best of two calibrations counts; one that moved past its interval and the margin is named."""
    faster = msgspec.structs.replace(CEILINGS, read_gbs=rate(90), launch_us=Interval(4, 3, 5))
    assert best([CEILINGS, faster]).read_gbs == rate(90)
    assert best([CEILINGS, faster]).launch_us.mid == 4
    assert drifted(CEILINGS, faster, 0.01) == ["read"]
    assert drifted(CEILINGS, CEILINGS, 0.01) == []
