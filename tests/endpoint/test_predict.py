"""Milliseconds per token: weighted by what the capture hits, times layers, times calls."""

import msgspec
import pytest

from replay.endpoint.predict import layers_with, predict
from replay.model import preset
from replay.results.seen import Seen
from replay.results.workload import weights_of
from tests.endpoint.conftest import BASE, MINE, Run


def test_weights_are_what_the_capture_hits() -> None:
    """Records of that many rows; where it has none, all weigh the same, and it is said."""
    assert weights_of([1, 4], {1: 30, 4: 10, 64: 1000}) == ({1: 0.75, 4: 0.25}, "40 records of the capture")
    shares, why = weights_of([2, 16], {1: 30})
    assert shares == {2: 0.5, 16: 0.5}
    assert "no record" in why


def test_the_gain_is_time_saved_times_layers_times_calls(steady: Run) -> None:
    """100 µs saved a call, 40 layers, two calls a token: 8 ms."""
    seen = Seen(steady.records())
    cases = [c for c in seen.plan.cases if c.problem.stage == "moe.combine"]
    found = predict(seen, cases, MINE, {1: 192}, 2.0)
    assert found is not None
    assert found.ms_per_token.mid == pytest.approx(8.0, rel=0.01)
    assert found.ms_per_token.lo < 8.0 * 1.01
    assert found.ms_per_token.hi > 8.0 * 0.99
    assert (found.baseline, found.layers, found.weights) == (BASE, 40, {1: 1.0})
    assert predict(seen, cases, "mine:moe.combine:elsewhere", {1: 192}, 1.0) is None


def test_layers_of_a_stage() -> None:
    """Every layer has an MoE block, three of four have GDN, a selection is made once a step; a stage that nobody counted is no guess."""
    assert layers_with("moe.layer", preset("qwen36", 4)) == 40
    assert layers_with("gdn.step", preset("qwen36", 4)) == 30
    assert layers_with("gdn.step", preset("qwen3-30b", 4)) == 0
    assert layers_with("topk.greedy", preset("qwen36", 4)) == 1
    with pytest.raises(ValueError, match=r"sampling\.top_p"):
        layers_with("sampling.top_p", preset("qwen36", 4))


def test_a_prediction_is_a_value(steady: Run) -> None:
    """It survives the journey through identity.json."""
    seen = Seen(steady.records())
    found = predict(seen, list(seen.plan.cases), MINE, {}, 1.0)
    assert msgspec.json.decode(msgspec.json.encode(found), type=type(found)) == found
