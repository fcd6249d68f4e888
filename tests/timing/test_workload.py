"""Several shapes taken together: weighted by how often the capture has each, with an interval over processes."""

import numpy as np
import pytest

from replay.model import Sample
from replay.timing.estimate import Processes, mean_times, weighted_effect
from tests.conftest import Cli


def shape(base_us: float, mine_us: float, processes: int = 4, spread: float = 0.001) -> Processes:
    """Processes of one case and two arms, which differ a little from process to process."""
    rng = np.random.default_rng(5)

    def case() -> list[Sample]:
        slow = float(np.exp(rng.normal(0, spread)))
        return [Sample(b, arm, 1, round(us * slow * 1e3), b) for b in range(9) for arm, us in (("a", base_us), ("b", mine_us))]

    return {p: [case()] for p in range(processes)}


def test_times_are_weighed_not_ratios() -> None:
    """Half the time on a shape of 10 µs, twice on one of 1000: three hits to one leave it far slower."""
    found = weighted_effect({1: shape(10, 5), 64: shape(1000, 2000)}, {1: 0.75, 64: 0.25}, "b", "a", 0.01)
    assert found is not None
    assert found.ratio.mid == pytest.approx((0.75 * 5 + 0.25 * 2000) / (0.75 * 10 + 0.25 * 1000) - 1, rel=0.01)
    assert found.ratio.lo < found.ratio.mid < found.ratio.hi
    assert found.processes == 4


def test_one_process_shows_no_spread() -> None:
    """Nothing is claimed over a workload from it."""
    assert weighted_effect({1: shape(10, 5, 1), 4: shape(10, 5, 1)}, {1: 0.5, 4: 0.5}, "b", "a", 0.01) is None


def test_only_cases_that_hold_both_count() -> None:
    """A case that lost an arm says nothing about either."""
    both, alone = shape(10, 5)[0][0], [s for s in shape(7000, 1)[0][0] if s.arm == "a"]
    assert mean_times({0: [both, alone]}, "b", "a")[0] == pytest.approx((5, 10), rel=0.01)


def test_a_run_of_two_shapes_says_so(cli: Cli) -> None:
    """A table of its own, with the shares and what they rest on; a case of two tokens is not taken for the twin of one that was
    doubled."""
    done = cli(
        "run", "--capture", "qwen36-generated", "--route-layer-regex", r"\.9\.", "--route-start-indices", "0,1",
        "--route-window-size", "1,2", "--stage", "moe.remap", "--processes", 2, "--blocks", 5, "--repeats", 2, "-o", "run",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    head = next(line for line in done.stdout.splitlines() if "over all shapes" in line)
    assert head.startswith("moe.remap · qwen36 tp4 · over all shapes: 1 token ")
    assert "records of the capture" in head
    line = done.stdout.split(head)[1].splitlines()[2]
    assert line.startswith("sycl:moe.remap:rows")
    assert "(QUICK)" in line
