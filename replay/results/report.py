"""A run as one self-contained page: the tables, pictures, what it means per token, identity, and how to see it again.

The pictures are SVG inside the page; each mark carries an id, so that a test can count what a reader should see.
"""

import io
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from replay.model import GRADES, Exact, Row
from replay.results import table
from replay.results.build import Group, Result
from replay.results.seen import Seen
from replay.timing.estimate import by_arm, us_per_call

ROW_INCHES = 0.22
FARTHEST = 25  # % from the median


def page(result: Result, seen: Seen, folder: str, bridge: Sequence[tuple[str, Any]]) -> str:
    """The whole page; ``folder`` is the run's, ``bridge`` holds (kernel, prediction) where there is one."""
    return render(
        "report.html.j2",
        result=result, folder=folder, heads=table.heads(result), tables=list(_tables(result)),
        missing=sorted(table.unavailable(result).items()), bridge=bridge,
        floors=floors(result.rows), drift=drift(seen),
        ceilings=table.ceilings_text(result.ceilings) if result.ceilings else "not measured",
        machine=table.machine_text(*result.machine) if result.machine else None,
        identity=list(_flat(result.identity)),
    )  # fmt: skip


def render(template: str, **values: Any) -> str:
    """One of our templates, filled; whatever it names must be there."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("replay.results"), undefined=jinja2.StrictUndefined, autoescape=True
    )
    return environment.get_template(template).render(**values)


def _tables(result: Result) -> Any:
    for _, shown in table.tables(result):
        if shown:
            yield table.title(shown[0], shown, result), [_line(g, result) for g in shown], table.floor_line(shown)


def _line(group: Group, result: Result) -> dict[str, Any]:
    return {"cells": table.cells(group, result), "red": group.exact not in GRADES, "reproduce": group.reproduce}


def _flat(values: Mapping[str, Any], before: str = "") -> Any:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value


def timed_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows that the picture of floors shows: those with a time and a floor."""
    return [r for r in rows if isinstance(r.outcome, Exact) and r.outcome.timing and r.floor]


def floors(rows: Sequence[Row]) -> str:
    """Every timed row's time with its interval on a log scale, a picture a stage, and the case's floor as a line."""
    found = []
    for stage, members in groupby(timed_rows(rows), key=lambda r: r.case.partition("@")[0]):
        found.append(_floors_of(stage, list(members)))
    return "\n".join(found) or "<p>Nothing was timed.</p>"


def _floors_of(stage: str, rows: list[Row]) -> str:
    from matplotlib.figure import Figure

    kernels = list(dict.fromkeys(r.kernel for r in rows))
    cases = list(dict.fromkeys(r.case for r in rows))
    figure = Figure(figsize=(9, 0.9 + ROW_INCHES * len(rows)), layout="constrained")
    axes = figure.subplots()
    place = {(r.case, r.kernel): i for i, r in enumerate(sorted(rows, key=lambda r: (kernels.index(r.kernel), r.case)))}
    for row in rows:
        assert isinstance(row.outcome, Exact)
        assert row.outcome.timing is not None
        assert row.floor is not None
        us, y = row.outcome.timing.us, place[row.case, row.kernel]
        color = f"C{kernels.index(row.kernel) % 10}"
        axes.plot([us.lo, us.hi], [y, y], color=color, linewidth=1)
        axes.plot([us.mid], [y], "o", color=color, markersize=3.5, gid=f"mark-{stage}-{y}")
        axes.plot([row.floor.us] * 2, [y - 0.5, y + 0.5], color="black", linewidth=1, gid=f"floor-{stage}-{y}")
    axes.set_xscale("log")
    axes.set_xlabel("µs a call; the black line is the floor")
    axes.set_title(f"{stage}: {len(kernels)} kernels, {len(cases)} cases", loc="left", fontsize=10)
    middles = [np.mean([place[key] for key in place if key[1] == kernel]) for kernel in kernels]
    axes.set_yticks(middles, kernels, fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    return svg(figure)


def drift(seen: Seen) -> str:
    """All samples of a run in the order they were taken, a picture a process."""
    from matplotlib.figure import Figure

    processes = sorted({process for timed in seen.timed.values() for process in timed})
    if not processes:
        return "<p>Nothing was timed.</p>"
    figure = Figure(figsize=(9, 1.6 * len(processes) + 0.6), layout="constrained")
    all_axes = figure.subplots(len(processes), 1, squeeze=False)[:, 0]
    for axes, process in zip(all_axes, processes, strict=True):
        at, over = [], []
        begin = 0.0
        for timed in (t for t in seen.in_order if t.process == process):
            for samples in by_arm(timed.samples).values():
                times = us_per_call(samples)
                at += [begin + s.at_ns / 1e9 for s in samples]
                over += list(times / np.median(times) - 1)
            begin += max((s.at_ns for s in timed.samples), default=0) / 1e9
        shown = np.clip(np.array(over) * 100, -FARTHEST, FARTHEST)  # what lies farther off stands at the edge
        axes.plot(at, shown, ".", markersize=2, gid=f"samples-{process}")
        axes.axhline(0, color="black", linewidth=0.5)
        axes.set_ylim(-FARTHEST - 1, FARTHEST + 1)
        axes.set_ylabel("% of median", fontsize=8)
        axes.set_title(f"process {process}: {len(at)} samples", loc="left", fontsize=8)
    all_axes[-1].set_xlabel("seconds of timed cases")
    return svg(figure)


def svg(figure: Any) -> str:
    """The picture as an element of a page: without the XML head, nor the date that would make each page another."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return re.sub(r"^.*?(?=<svg)", "", out.getvalue(), flags=re.DOTALL)
