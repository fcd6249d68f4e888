"""Which bindings a span uses: the ring is gone round by calls, and by graphs of so many calls."""

from collections.abc import Callable
from typing import Any

import pytest

from replay.timing.spans import Options, Timer, generator


def timer(bindings: int, launch: Any) -> Timer:
    """A timer that has nothing but a ring."""
    made = Timer.__new__(Timer)
    made.bindings = list(range(bindings))  # type: ignore[arg-type]  # numbers in the place of bindings
    made.options = Options(5, "cold-weights", launch, 7, 0, quick=True)
    made.position, made.graphs = 0, {}
    made.runs = {arm: [(lambda t: None, {}) for _ in range(bindings)] for arm in "ab"}
    return made


def test_calls_go_round_the_ring() -> None:
    """Each span begins behind the one before, whoever's it was."""
    ring = timer(10, "calls")
    used = []
    for arm, calls in (("a", 4), ("b", 3), ("a", 4), ("b", 3)):
        used.append(ring._places(calls))
        ring._next(arm, calls)
    assert used == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9, 0], [1, 2, 3]]


def test_a_span_is_the_graph_of_its_bindings() -> None:
    """Graphs begin at multiples of their length; a span takes the next that begins behind the one before, and its bindings."""
    ring = timer(10, "graph")

    def graph(arm: str, begin: int, calls: int) -> Callable[[], object]:
        return lambda: (arm, list(range(begin, begin + calls)))

    lengths = {"a": 3, "b": 4}
    ring.graphs = {arm: [graph(arm, b, n) for b in range(0, 10 - n + 1, n)] for arm, n in lengths.items()}
    seen: list[list[int]] = []
    for arm in "abaabbba":
        places = ring._places(lengths[arm])
        assert ring._next(arm, lengths[arm])() == (arm, places), "the graph is not of the bindings that were prepared for it"
        seen.append(places)
    assert seen[:4] == [[0, 1, 2], [4, 5, 6, 7], [0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("what", ["blocks/x", "answers"])
def test_every_process_of_a_timing_draws_alike(what: str) -> None:
    """The same for equal options, another for another process."""
    options = Options(5, "warm", "calls", 7, 0, quick=True)
    other = Options(5, "warm", "calls", 7, 1, quick=True)
    draws = [generator(what, o).integers(0, 1 << 62) for o in (options, options, other)]
    assert draws[0] == draws[1] != draws[2]
