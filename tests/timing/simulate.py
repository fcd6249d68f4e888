"""``make simulate-timing``: the statistics on times whose truth is known. Seeded; no device is touched.

python -m tests.timing.simulate [CLAIMS]

A claim has 40 shapes; a process times three arms (baseline, candidate, the baseline's second copy) in blocks of random order.
Every sample has 0.6 % of noise, and on top of it one disturbance. What is asked: how often a claim in which nothing differs
carries a verdict that something does, how often an interval holds the truth, and how often a true 1 % is found.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.model import Comparison, Effect
from replay.timing.estimate import adjusted_confidence, of_processes
from replay.verdict import conclude

SHAPES, BLOCKS, PROCESSES = 40, 30, 8
NOISE, OFFSET, MARGIN = 0.006, 0.003, 0.01
BASE, MINE, NULL = range(3)

Logs = NDArray[np.float64]  # log times [shapes, processes, samples in time order]
Disturb = Callable[[np.random.Generator, tuple[int, int, int]], Any]


def _ramp(rng: np.random.Generator, size: tuple[int, int, int]) -> Any:
    """2 % slower from the first sample to the last."""
    return np.linspace(0, 0.02, size[2])


def _wander(rng: np.random.Generator, size: tuple[int, int, int]) -> Any:
    """A slow walk of about 2 % to and fro."""
    steps = rng.normal(0, 1, size).cumsum(2)
    return 0.02 * steps / np.abs(steps).max(2, keepdims=True)


def _slow_samples(rng: np.random.Generator, size: tuple[int, int, int]) -> Any:
    """One sample of twenty takes 5 to 40 % longer."""
    return np.where(rng.random(size) < 0.05, np.log1p(rng.uniform(0.05, 0.4, size)), 0)


def _slow_first(rng: np.random.Generator, size: tuple[int, int, int]) -> Any:
    """The first sample of each shape takes 5 % longer."""
    return np.where(np.arange(size[2]) == 0, np.log(1.05), 0)


def _nothing(rng: np.random.Generator, size: tuple[int, int, int]) -> Any:
    """Noise alone."""
    return 0.0


# name → (what moves with time, the spread of an arm's offset in a process: placement, clocks, neighbours)
DISTURBANCES: dict[str, tuple[Disturb, float]] = {
    "2 % ramp": (_ramp, 0.0),
    "slow wander": (_wander, 0.0),
    "0.3 % process offset": (_nothing, OFFSET),
    "5 % of samples slow by 5–40 %": (_slow_samples, 0.0),
    "first repeat 5 % slow": (_slow_first, 0.0),
    "all of them": (lambda rng, size: sum(d(rng, size) for d in (_ramp, _wander, _slow_samples, _slow_first)), OFFSET),
}


def medians(
    rng: np.random.Generator,
    disturb: Disturb,
    offset: float,
    effects: Any = 0.0,
    shapes: int = SHAPES,
    processes: int = PROCESSES,
) -> tuple[Logs, Logs]:
    """Per shape and process the median log ratio of candidate and of second copy to the baseline, each [shapes, processes]."""
    size = shapes, processes, 3 * BLOCKS
    times = rng.normal(0, NOISE, size) + disturb(rng, size)
    # Which sample of a block each arm got.
    order = rng.permuted(np.broadcast_to(np.arange(3), (shapes, processes, BLOCKS, 3)), axis=3)
    arms = np.take_along_axis(times.reshape(shapes, processes, BLOCKS, 3), order, axis=3)
    arms = arms + rng.normal(0, offset, (shapes, processes, 1, 3))
    ratios = arms - arms[..., BASE : BASE + 1]
    found = np.median(ratios, axis=2)
    return found[..., MINE] + np.reshape(effects, (-1, 1)), found[..., NULL]


def adjusted(values: Logs) -> list[Effect]:
    """The effects of a claim's shapes with the intervals that its number of shapes asks for."""
    confidence = adjusted_confidence([of_processes(v, MARGIN).p for v in values])
    return [of_processes(v, MARGIN, confidence) for v in values]


def labels(mine: Logs, null: Logs) -> list[str]:
    """The verdicts of a claim's shapes."""
    pairs = zip(adjusted(mine), adjusted(null), strict=True)
    compared = [Comparison("base", effect, other) for effect, other in pairs]
    return [conclude(c, margin=MARGIN, quick=False, below=False, flags=()).label for c in compared]


def null_claims(name: str, claims: int, seed: int) -> tuple[float, float]:
    """(share of claims with any false verdict, share of 95 % intervals that hold the truth) where nothing differs."""
    rng = np.random.Generator(np.random.Philox(key=seed))
    false = held = 0
    for _ in range(claims):
        mine, null = medians(rng, *DISTURBANCES[name])
        false += bool({"FASTER", "SLOWER"} & set(labels(mine, null)))
        held += sum(e.ratio.lo <= 0 <= e.ratio.hi for e in (of_processes(v, MARGIN) for v in mine))
    return false / claims, held / (claims * SHAPES)


def power(shapes: int, processes: int, claims: int, seed: int, offset: float = OFFSET) -> float:
    """How often the one shape of several that is 1 % faster is found so."""
    rng = np.random.Generator(np.random.Philox(key=seed))
    effects = np.where(np.arange(shapes) == 0, np.log(0.99), 0)
    found = 0
    for _ in range(claims):
        mine, null = medians(rng, _nothing, offset, effects, shapes, processes)
        found += labels(mine, null)[0] == "FASTER"
    return found / claims


def main(claims: int) -> int:
    """Print the tables; 1 where the statistics promise more than they keep."""
    bad = []
    print(f"{claims} claims of {SHAPES} shapes, {PROCESSES} processes of {BLOCKS} blocks, noise {NOISE:.1%}, margin {MARGIN:.0%}")
    print(f"{'nothing differs, but':<32} {'false claims':>12} {'coverage':>9}")
    for number, name in enumerate(DISTURBANCES):
        false, coverage = null_claims(name, claims, number)
        print(f"{name:<32} {false:>12.1%} {coverage:>9.1%}", flush=True)
        bad += [name] if false > 0.05 or not 0.93 <= coverage <= 0.97 else []
    print(f"a true 1 %, process offset {OFFSET:.1%}: found")
    alone = power(1, PROCESSES, 10 * claims, 100)
    print(f"{'one shape, ' + str(PROCESSES) + ' processes':<32} {alone:>12.1%}", flush=True)
    bad += ["power"] if alone < 0.9 else []
    for processes in (5, 8, 10, 15):
        print(
            f"{f'one of {SHAPES}, {processes} processes':<32} {power(SHAPES, processes, claims, 200 + processes):>12.1%}",
            flush=True,
        )
    print(f"{len(bad)} promises broken" + (f": {', '.join(bad)}" if bad else ""))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100))
