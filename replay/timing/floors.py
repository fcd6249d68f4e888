"""The least time a case could take on a device with given ceilings. Pure.

``floor_case`` = max(byte time, operations at the peak rate, one launch): the case's own, the same for every kernel. Cold
bytes move at the best matching memory rate, hot bytes at the best rate out of cache; what is cold is the stage's to say.
``floor_impl`` adds a kernel's own launches, so that a kernel of many launches is not flattered by its own floor.
"""

from collections.abc import Sequence
from typing import Literal

from replay.model import Ceilings, Floor, Interval, MemoryRates, Work

# A time under this share of the byte time at the upper bound of the best rate did not do the work.
BELOW_FLOOR = 0.98
# From this share of written bytes on, a case is held to the rates that write.
WRITING_SHARE = 0.25


RATES = ("read_gbs", "copy_gbs", "inplace_gbs", "hot_gbs", "int8_gops", "bf16_gops")


def best(found: Sequence[Ceilings]) -> Ceilings:
    """Each ceiling at its best over all calibrations of a run: the highest rate, the shortest launch."""
    chosen = {name: max(found, key=lambda c, n=name: getattr(c, n).mid) for name in RATES}  # type: ignore[misc]  # n is bound
    chosen["launch_us"] = min(found, key=lambda c: c.launch_us.mid)
    rates = {name: getattr(c, name) for name, c in chosen.items()}
    terms = {name.partition("_")[0]: c for name, c in chosen.items()}
    return Ceilings(**rates, best_of={term: c.best_of.get(term, "") for term, c in terms.items()})


def memory_rate(work: Work, ceilings: Ceilings) -> Interval:
    """The highest rate that matches the case's mix of reads and writes, GB/s."""
    total = work.read_bytes + work.write_bytes
    writes = total and work.write_bytes / total >= WRITING_SHARE
    matching = [ceilings.copy_gbs, ceilings.inplace_gbs] if writes else [ceilings.read_gbs]
    return max(matching, key=lambda r: r.mid)


def _byte_time(work: Work, memory_gbs: float, hot_gbs: float, cache: str) -> float:
    """µs of the case's bytes; under ``warm`` all of them come from cache, under ``cold-all`` none."""
    all_bytes = work.read_bytes + work.write_bytes + work.hot_bytes
    cold = {"warm": 0, "cold-weights": work.read_bytes + work.write_bytes, "cold-all": all_bytes}[cache]
    hot = all_bytes - cold
    return cold / memory_gbs / 1e3 + hot / hot_gbs / 1e3


def floor_case(work: Work, ceilings: Ceilings, cache: str) -> Floor:
    """The floor under a cache state: under ``cold-weights`` the stage says what is cold, under ``warm`` nothing is, under
    ``cold-all`` everything."""
    bytes_us = _byte_time(work, memory_rate(work, ceilings).mid, ceilings.hot_gbs.mid, cache)
    operations_us = (work.int8_ops / ceilings.int8_gops.mid + work.bf16_ops / ceilings.bf16_gops.mid) / 1e3
    terms: dict[Literal["bytes", "operations", "launch"], float]
    terms = {"bytes": bytes_us, "operations": operations_us, "launch": ceilings.launch_us.mid}
    term = max(terms, key=lambda name: terms[name])
    return Floor(terms[term], term, bytes_us, operations_us, work)


def floor_impl(floor: Floor, launches: int | None, ceilings: Ceilings) -> float | None:
    """µs of the same work in so many launches, the gaps between them added; None where nobody counted them."""
    if launches is None:
        return None
    return max(floor.bytes_us, floor.operations_us, ceilings.launch_us.mid) + (launches - 1) * ceilings.launch_us.mid


def below_floor(us: float, work: Work, ceilings: Ceilings, cache: str) -> bool:
    """True where a time is below what the bytes alone take at the upper bounds of the best rates."""
    return us < BELOW_FLOOR * _byte_time(work, memory_rate(work, ceilings).hi, ceilings.hot_gbs.hi, cache)


# A case beside which the memory ceilings moved is timed again in its process, up to this share of the process's timings and so
# often: declared beforehand, counted, and never more than 20 % of all that were made.
SPARE_SHARE, MOST_REPEATS = 0.25, 2


def spare_timings(cases: int) -> int:
    """How many timings a process of so many cases may repeat."""
    return int(SPARE_SHARE * cases)


def drifted(before: Ceilings | MemoryRates, after: Ceilings | MemoryRates, margin: float) -> list[str]:
    """The memory ceilings whose intervals parted by more than the margin between two calibrations."""
    moved = []
    for name in ("read_gbs", "copy_gbs", "inplace_gbs"):
        a, b = getattr(before, name), getattr(after, name)
        if a.lo > b.hi * (1 + margin) or b.lo > a.hi * (1 + margin):
            moved.append(name.removesuffix("_gbs"))
    return moved
