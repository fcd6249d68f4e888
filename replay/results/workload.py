"""A claim over a whole workload: the shapes of a run, each weighted by how often the capture hits it. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from replay.model import NULL, Case, Comparison, Value, Verdict
from replay.results.seen import Seen
from replay.timing import estimate
from replay.verdict import caps, conclude, spoils

if TYPE_CHECKING:
    from replay.results.build import Group


class Workload(Value, frozen=True, kw_only=True):
    """A kernel against its baseline over all shapes together; ``weights``: token rows → share."""

    stage: str
    geometry: str
    capture: str
    modes: str
    kernel: str
    weights: dict[int, float]
    weighted_by: str
    comparison: Comparison
    verdict: Verdict


def weights_of(shapes: Sequence[int], hits: Mapping[int, int]) -> tuple[dict[int, float], str]:
    """(token rows → share, what it rests on): records of the capture that have so many token rows."""
    counted = {rows: hits.get(rows, 0) for rows in shapes}
    total = sum(counted.values())
    if not total:
        return {rows: 1 / len(shapes) for rows in shapes}, "no record of the capture has a shape of the run: all weigh the same"
    return {rows: n / total for rows, n in counted.items()}, f"{total} records of the capture"


def workloads(seen: Seen, groups: "Sequence[Group]") -> Iterator[Workload]:
    """The kernels that were compared on several shapes of one stage, in two processes or more."""

    def claim(group: "Group") -> tuple[str, str, str, str, str]:
        return group.stage, group.geometry, group.capture, group.modes, group.kernel

    for _, members in groupby(sorted(groups, key=claim), key=claim):
        lines = list(members)
        if len(lines) > 1 and all(g.comparison for g in lines) and (found := _workload(seen, lines)):
            yield found


def _is_of(group: "Group", case: Case) -> bool:
    """Whether a case is one of the group's, in whatever number of token rows."""
    problem = case.problem
    return (problem.stage, str(problem.geometry), problem.modes_text) == (group.stage, group.geometry, group.modes)


def _workload(seen: Seen, lines: "list[Group]") -> Workload | None:
    first, margin = lines[0], seen.plan.margin
    baseline = seen.plan.baseline_of(first.stage)
    weights, weighted_by = weights_of(sorted(g.tokens for g in lines), dict(seen.plan.hits))
    cases = {
        tokens: seen.samples([str(c.id) for c in seen.plan.cases if _is_of(first, c) and c.problem.rows == tokens])
        for tokens in weights
    }
    effect = estimate.weighted_effect(cases, weights, first.kernel, baseline, margin)
    if effect is None:
        return None
    told = dict.fromkeys(
        r for g in lines if g.verdict for r in g.verdict.reasons if (spoils(r) or caps(r)) and r != "null_inconclusive"
    )
    compared = Comparison(baseline, effect, estimate.weighted_effect(cases, weights, baseline + NULL, baseline, margin))
    flags = [reason for reason in told if reason != "below_floor"]
    return Workload(
        stage=first.stage, geometry=first.geometry, capture=first.capture, modes=first.modes, kernel=first.kernel,
        weights=weights, weighted_by=weighted_by, comparison=compared,
        verdict=conclude(compared, margin=margin, quick=seen.plan.quick, below="below_floor" in told, flags=flags),
    )  # fmt: skip
