"""What a promotion should bring in the endpoint: milliseconds per output token. Pure.

Over the shapes of a claim, weighted by how often the capture hits each: time saved a call, times the geometry's layers
that have the stage, times calls of it for one token.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from replay.model import Case, Geometry, Interval, Value
from replay.results.seen import Seen
from replay.results.workload import weights_of
from replay.timing.estimate import mean_interval, weighted_times


class Prediction(Value, frozen=True, kw_only=True):
    """ms saved per output token with its 95 % interval over processes; ``weights``: rows of a shape → its share."""

    ms_per_token: Interval
    baseline: str
    layers: int
    calls_per_token: float
    weights: dict[int, float]
    weighted_by: str


# Preset → every so-manieth layer has full attention, the others GDN; 1: none has GDN.
FULL_ATTENTION_EVERY = {"qwen36": 4, "qwen3-next": 4, "qwen3-30b": 1}


def layers_with(stage: str, geometry: Geometry) -> int:
    """How many layers of a model have a stage: every one has an MoE block, those without full attention GDN; a
    selection is no layer's."""
    if stage.startswith("moe."):
        return geometry.layers
    if stage.startswith("gdn.") and geometry.preset in FULL_ATTENTION_EVERY:
        return geometry.layers - geometry.layers // FULL_ATTENTION_EVERY[geometry.preset]
    if stage.startswith("topk."):
        return 1  # once a step, behind the head
    raise ValueError(f"stage {stage!r}: expected one whose layers are counted")


def predict(seen: Seen, cases: Sequence[Case], kernel: str, hits: Mapping[int, int], calls_per_token: float) -> Prediction | None:
    """The gain, or None where fewer than two processes hold both arms. Positive is faster than the baseline."""
    stage, geometry = cases[0].problem.stage, cases[0].problem.geometry
    baseline = seen.plan.baseline_of(stage)
    shares, weighted_by = weights_of(sorted({c.id.source.rows for c in cases}), hits)
    layers = layers_with(stage, geometry)
    shapes = {rows: seen.samples([str(c.id) for c in cases if c.id.source.rows == rows]) for rows in shares}
    times = weighted_times(shapes, shares, kernel, baseline)
    if len(times) < 2:
        return None
    ms = np.array([base - mine for mine, base in times]) * layers * calls_per_token / 1e3
    return Prediction(
        ms_per_token=mean_interval(ms), baseline=baseline, layers=layers, calls_per_token=calls_per_token,
        weights=shares, weighted_by=weighted_by,
    )  # fmt: skip
