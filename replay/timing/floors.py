"""The least time a case could take on a device with given ceilings. Pure.

``floor_case`` = max(byte time, one launch): the case's own bytes, the same for every kernel. Cold bytes move at the
best matching memory rate, hot bytes at the best rate out of cache; what is cold is the stage's to say.
"""

from collections.abc import Sequence

from replay.model import Ceilings, Floor, Interval, Work

# A time under this share of the byte time at the upper bound of the best rate did not do the work.
BELOW_FLOOR = 0.98
# From this share of written bytes on, a case is held to the rates that write.
WRITING_SHARE = 0.25


def best(found: Sequence[Ceilings]) -> Ceilings:
    """Each ceiling at its best over all calibrations of a run: the highest rate, the shortest launch."""
    chosen = {
        "read": max(found, key=lambda c: c.read_gbs.mid),
        "copy": max(found, key=lambda c: c.copy_gbs.mid),
        "inplace": max(found, key=lambda c: c.inplace_gbs.mid),
        "hot": max(found, key=lambda c: c.hot_gbs.mid),
        "launch": min(found, key=lambda c: c.launch_us.mid),
    }
    return Ceilings(
        read_gbs=chosen["read"].read_gbs,
        copy_gbs=chosen["copy"].copy_gbs,
        inplace_gbs=chosen["inplace"].inplace_gbs,
        hot_gbs=chosen["hot"].hot_gbs,
        launch_us=chosen["launch"].launch_us,
        best_of={term: c.best_of.get(term, "") for term, c in chosen.items()},
    )


def memory_rate(work: Work, ceilings: Ceilings) -> Interval:
    """The highest rate that matches the case's mix of reads and writes, GB/s."""
    total = work.read_bytes + work.write_bytes
    writes = total and work.write_bytes / total >= WRITING_SHARE
    matching = [ceilings.copy_gbs, ceilings.inplace_gbs] if writes else [ceilings.read_gbs]
    return max(matching, key=lambda r: r.mid)


def _byte_time(work: Work, memory_gbs: float, hot_gbs: float, cache: str) -> float:
    """µs of the case's bytes; under ``warm`` all of them come from cache."""
    cold = 0 if cache == "warm" else work.read_bytes + work.write_bytes
    hot = work.read_bytes + work.write_bytes + work.hot_bytes - cold
    return cold / memory_gbs / 1e3 + hot / hot_gbs / 1e3


def floor_case(work: Work, ceilings: Ceilings, cache: str) -> Floor:
    """The floor under a cache state: under ``cold-weights`` the stage says what is cold, under ``warm`` nothing is."""
    bytes_us = _byte_time(work, memory_rate(work, ceilings).mid, ceilings.hot_gbs.mid, cache)
    launch = ceilings.launch_us.mid
    return Floor(max(bytes_us, launch), "bytes" if bytes_us >= launch else "launch", bytes_us, work)


def below_floor(us: float, work: Work, ceilings: Ceilings, cache: str) -> bool:
    """True where a time is below what the bytes alone take at the upper bounds of the best rates."""
    return us < BELOW_FLOOR * _byte_time(work, memory_rate(work, ceilings).hi, ceilings.hot_gbs.hi, cache)


# A process whose ceilings moved is timed again, up to this share of the processes asked for: declared beforehand, counted,
# and never more than 20 % of all that were timed.
SPARE_SHARE = 0.25


def most_processes(asked: int) -> int:
    """How many processes a run may time to have as many steady ones as were asked for."""
    return asked + int(asked * SPARE_SHARE)


def drifted(before: Ceilings, after: Ceilings, margin: float) -> list[str]:
    """The memory ceilings whose intervals parted by more than the margin between two calibrations."""
    moved = []
    for name in ("read_gbs", "copy_gbs", "inplace_gbs"):
        a, b = getattr(before, name), getattr(after, name)
        if a.lo > b.hi * (1 + margin) or b.lo > a.hi * (1 + margin):
            moved.append(name.removesuffix("_gbs"))
    return moved
