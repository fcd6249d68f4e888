"""Blocks go for causes declared beforehand, are counted, and too many of them spoil the case."""

import msgspec
import pytest

from replay.model import NULL, Case, Exact, Interval, MemoryRates, Sample
from replay.results.seen import Seen
from replay.session import journal as j
from replay.timing.dropped import causes, too_many
from replay.verdict import conclude
from tests.conftest import make_case
from tests.session.test_journal import plan

BASE, MINE = "eager:moe.route", "mine:moe.route"


def block(number: int, **of_mine: object) -> list[Sample]:
    """One block of three arms, 1 ms each."""
    base = [Sample(number, arm, 1, 1_000_000, number, mhz=2000) for arm in (BASE, BASE + NULL)]
    return [*base, msgspec.structs.replace(base[0], arm=MINE, **of_mine)]


@pytest.mark.parametrize(
    ("of_mine", "cause"),
    [
        ({}, None), ({"flags": ("throttled",)}, "throttled"), ({"mhz": 1930}, "clock"), ({"mhz": 1950}, None), ({"mhz": None}, None),
        ({"span_ns": 9_000_000}, None),
    ],
)  # fmt: skip
def test_a_cause_is_a_throttle_flag_or_a_clock(of_mine: dict[str, object], cause: str | None) -> None:
    """A clock below 97 % of its partner's, or a flag; a slow time is none, and an unknown clock is none."""
    assert causes([*block(0), *block(1, **of_mine)]) == ({1: cause} if cause else {})


def test_a_fifth_is_the_most() -> None:
    """Six of thirty may go, seven may not."""
    assert not too_many(6, 30)
    assert too_many(7, 30)


STEADY = MemoryRates(*(Interval(50, 49, 51),) * 3)


def seen(throttled: int) -> tuple[Seen, Case]:
    """A run of thirty blocks, the last few of which were taken while the device throttled, on half the clock."""
    case = make_case("moe.route")
    samples = [s for n in range(30 - throttled) for s in block(n)]
    samples += [s for n in range(30 - throttled, 30) for s in block(n, flags=("throttled",), span_ns=2_000_000, mhz=1000)]
    records = [
        j.Begun(msgspec.structs.replace(plan(), cases=(case,)), {}),
        j.Judged(str(case.id), MINE, Exact("BITWISE", 2)),
        j.Timed(0, str(case.id), tuple(samples), {}, {}, {}, (STEADY, STEADY)),
    ]
    return Seen(records), case


def test_few_are_dropped_and_counted() -> None:
    """The times are those of the blocks that are left."""
    found, case = seen(throttled=3)
    assert found.dropped_blocks() == {"throttled": 3}
    samples = found.samples([str(case.id)])[0][0]
    assert {s.block for s in samples} == set(range(27))
    assert found.flags([str(case.id)], MINE) == []


def test_throttling_in_mid_run_is_invalid() -> None:
    """Over a fifth: nothing is dropped, and no time of the case counts."""
    found, case = seen(throttled=10)
    flags = found.flags([str(case.id)], MINE)
    assert flags == ["blocks_dropped"]
    assert found.dropped_blocks() == {}
    assert len(found.samples([str(case.id)])[0][0]) == 90
    assert conclude(None, margin=0.01, quick=False, below=False, flags=flags).label == "INVALID"


def test_one_span_that_was_interrupted_is_not_another_clock() -> None:
    """Clocks that part in one span of thirty say nothing; in seven, the time is not the device's."""
    for parted, flags in ((1, []), (7, ["clock_disagrees"])):
        case = make_case("moe.route")
        samples = [s for n in range(30) for s in block(n, flags=("clock_disagrees",) * (n < parted))]
        records = [
            j.Begun(msgspec.structs.replace(plan(), cases=(case,)), {}),
            j.Timed(0, str(case.id), tuple(samples), {}, {}, {}, (STEADY, STEADY)),
        ]
        assert Seen(records).flags([str(case.id)], MINE) == flags
