"""Which blocks of samples are dropped: for causes that were declared beforehand, never for their times. Pure."""

from collections.abc import Sequence

from replay.model import Sample

THROTTLED, CLOCK = "throttled", "clock"
# A sample whose clock ran below this share of another's in its block was taken on a slower machine.
CLOCK_FELL = 0.97
# Where more than this share of a case's blocks would go, none does, and its times are INVALID.
MOST_DROPPED = 0.2


def causes(samples: Sequence[Sample]) -> dict[int, str]:
    """block → why it is dropped, of one process's samples of a case."""
    found: dict[int, str] = {}
    clocks: dict[int, list[int]] = {}
    for sample in samples:
        if THROTTLED in sample.flags:
            found[sample.block] = THROTTLED
        if sample.mhz is not None:
            clocks.setdefault(sample.block, []).append(sample.mhz)
    for block, mhz in clocks.items():
        if min(mhz) < CLOCK_FELL * max(mhz):
            found.setdefault(block, CLOCK)
    return found


def too_many(dropped: int, of: int) -> bool:
    """Whether so many are more than may be."""
    return dropped > MOST_DROPPED * of
