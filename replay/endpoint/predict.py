"""What a promotion should bring in the endpoint: milliseconds per output token. Pure.

Over the shapes of a claim, weighted by how often the capture hits each: time saved a call, times the geometry's layers
that have the stage, times calls of it for one token.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from replay.model import Case, Geometry, Interval, Value
from replay.results.seen import Seen
from replay.timing.estimate import mean_interval, us_per_call


class Prediction(Value, frozen=True, kw_only=True):
    """ms saved per output token with its 95 % interval over processes; ``weights``: rows of a shape → its share."""

    ms_per_token: Interval
    baseline: str
    layers: int
    calls_per_token: float
    weights: dict[int, float]
    weighted_by: str


def layers_with(stage: str, geometry: Geometry) -> int:
    """How many layers of a model have a stage: every one has an MoE block."""
    if not stage.startswith("moe."):
        raise ValueError(f"stage {stage!r}: expected one whose layers are counted")
    return geometry.layers


def weights_of(shapes: Sequence[int], hits: Mapping[int, int]) -> tuple[dict[int, float], str]:
    """(rows → share, what it rests on): records of the capture that have so many token rows."""
    counted = {rows: hits.get(rows, 0) for rows in shapes}
    total = sum(counted.values())
    if not total:
        return {rows: 1 / len(shapes) for rows in shapes}, "no record of the capture has a shape of the run: all weigh the same"
    return {rows: n / total for rows, n in counted.items()}, f"{total} records of the capture"


def predict(seen: Seen, cases: Sequence[Case], kernel: str, hits: Mapping[int, int], calls_per_token: float) -> Prediction | None:
    """The gain, or None where fewer than two processes hold both arms. Positive is faster than the baseline."""
    stage, geometry = cases[0].problem.stage, cases[0].problem.geometry
    baseline = seen.plan.baseline_of(stage)
    shares, weighted_by = weights_of(sorted({c.id.source.rows for c in cases}), hits)
    layers = layers_with(stage, geometry)
    gains: dict[int, float] = {}
    for rows, share in shares.items():
        for process, saved in _saved(seen, [str(c.id) for c in cases if c.id.source.rows == rows], kernel, baseline).items():
            gains[process] = gains.get(process, 0.0) + share * saved
    if len(gains) < 2:
        return None
    ms = np.array(list(gains.values())) * layers * calls_per_token / 1e3
    return Prediction(
        ms_per_token=mean_interval(ms), baseline=baseline, layers=layers, calls_per_token=calls_per_token,
        weights=shares, weighted_by=weighted_by,
    )  # fmt: skip


def _saved(seen: Seen, cases: list[str], kernel: str, baseline: str) -> dict[int, float]:
    """process → µs saved a call, the mean over cases of the difference of medians."""
    found = {}
    for process, timed in seen.samples(cases).items():
        times = [{arm: us_per_call([s for s in case if s.arm == arm]) for arm in (kernel, baseline)} for case in timed]
        differences = [np.median(t[baseline]) - np.median(t[kernel]) for t in times if len(t[kernel]) and len(t[baseline])]
        if differences:
            found[process] = float(np.mean(differences))
    return found
