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
    first = found[0]
    rates = {
        name: max((getattr(c, name) for c in found), key=lambda r: float(r.mid))
        for name in ("read_gbs", "copy_gbs", "inplace_gbs", "hot_gbs")
    }
    launch = min((c.launch_us for c in found), key=lambda r: r.mid)
    return Ceilings(**rates, launch_us=launch, best_of=first.best_of)


def memory_rate(work: Work, ceilings: Ceilings) -> Interval:
    """The highest rate that matches the case's mix of reads and writes, GB/s."""
    total = work.read_bytes + work.write_bytes
    writing = [ceilings.copy_gbs, ceilings.inplace_gbs]
    matching = writing if total and work.write_bytes / total >= WRITING_SHARE else [ceilings.read_gbs, *writing]
    return max(matching, key=lambda r: r.mid)


def floor_case(work: Work, ceilings: Ceilings, cache: str) -> Floor:
    """The floor under a cache state: ``cold-weights`` as the stage says, ``cold-all`` everything cold, ``warm`` nothing."""
    cold, hot = work.read_bytes + work.write_bytes, work.hot_bytes
    if cache == "cold-all":
        cold, hot = cold + hot, 0
    elif cache == "warm":
        cold, hot = 0, cold + hot
    bytes_us = cold / memory_rate(work, ceilings).mid / 1e3 + hot / ceilings.hot_gbs.mid / 1e3
    launch = ceilings.launch_us.mid
    return Floor(max(bytes_us, launch), "bytes" if bytes_us >= launch else "launch", bytes_us, work)


def below_floor(us: float, work: Work, ceilings: Ceilings, cache: str) -> bool:
    """True where a time is below what the cold bytes alone take at the upper bound of the best rate."""
    cold = 0 if cache == "warm" else work.read_bytes + work.write_bytes
    return us < BELOW_FLOOR * cold / memory_rate(work, ceilings).hi / 1e3


def drifted(before: Ceilings, after: Ceilings, margin: float) -> list[str]:
    """The memory ceilings whose intervals parted by more than the margin between two calibrations."""
    moved = []
    for name in ("read_gbs", "copy_gbs", "inplace_gbs"):
        a, b = getattr(before, name), getattr(after, name)
        if a.lo > b.hi * (1 + margin) or b.lo > a.hi * (1 + margin):
            moved.append(name.removesuffix("_gbs"))
    return moved
