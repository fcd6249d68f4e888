"""Two runs side by side: what each says of the same kernel and shape. Pure.

Times of two runs are not paired block by block, so nothing is concluded here: their ratio stands with both intervals.
"""

from collections.abc import Sequence

from tabulate import tabulate

from replay.model import Value
from replay.results.build import Group, Result
from replay.results.table import interval_text, percent, shape_of


class Line(Value, frozen=True):
    """One kernel on one shape in both runs; None where a run lacks it."""

    what: str
    before: Group | None
    after: Group | None

    @property
    def ratio(self) -> float | None:
        """Time after over time before, as a share; None where either has none that may be believed."""
        if not (self.before and self.after and self.before.us and self.after.us):
            return None
        if _invalid(self.before) or _invalid(self.after):
            return None
        return self.after.us.mid / self.before.us.mid - 1


def _invalid(group: Group) -> bool:
    return group.verdict is not None and group.verdict.label == "INVALID"


def _key(group: Group) -> tuple[object, ...]:
    return (*shape_of(group), group.layers, group.kernel)


def _what(g: Group) -> str:
    return f"{g.kernel} · {g.stage} · {g.geometry} · {g.capture} {g.layers} · {g.tokens} token{'s' * (g.tokens > 1)}"


def lines(before: Result, after: Result) -> list[Line]:
    """Every kernel and shape of either run that could run in one of them, in the order of the first."""
    a, b = ({_key(g): g for g in result.groups if g.exact != "UNAVAILABLE"} for result in (before, after))
    return [Line(_what(group), a.get(key), b.get(key)) for key, group in {**a, **b}.items()]


def settings(before: Result, after: Result) -> list[str]:
    """What the runs were asked for otherwise."""
    names = ("device", "cache", "launch", "processes")
    pairs = [(name, getattr(before, name), getattr(after, name)) for name in names]
    return [f"{name}: {a} → {b}" for name, a, b in pairs if a != b]


def doubts(result: Result) -> str:
    """What spoils or caps all of a run's times, in the codes of its lines; empty for a quiet run."""
    told = (f"ceiling_drift: {name}" for name in result.drift)
    return "; ".join([*(d.replace(":", ": ", 1) for d in result.disturbed), *told])


def text(found: Sequence[Line], differing: Sequence[str]) -> str:
    """The table, and under it what the runs differ in."""

    def time(group: Group | None) -> str:
        if group is None or group.us is None:
            return group.exact if group else "–"
        return interval_text(group.us) + (" INVALID" if _invalid(group) else "")

    rows = [
        [line.what, time(line.before), time(line.after), percent(line.ratio) if line.ratio is not None else "–"] for line in found
    ]
    table = tabulate(rows, ["kernel", "first µs [95 %]", "second µs [95 %]", "second / first"], disable_numparse=True)
    return "\n".join(
        [
            table,
            *(f"differs: {how}" for how in differing),
            "The runs were not interleaved: a difference between them is no verdict.",
        ]
    )
