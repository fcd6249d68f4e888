"""Kernels that cheat, one a way of cheating; each wraps what the honest kernel of its stage does.

Registered with --load. What they deserve stands in test_cheats.py.
"""

import gc
import hashlib
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from replay.kernels.eager import prepare_combine, prepare_route
from replay.model import Kernel, Problem

Run = Callable[[Mapping[str, Any]], None]
OUTPUTS = ("rows_per_expert", "offsets", "unpermuted_to_permuted")


def _kept(t: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, t[name].clone()) for name in OUTPUTS]


def _give(t: Mapping[str, Any], kept: list[tuple[str, Any]]) -> None:
    for name, value in kept:
        t[name].copy_(value)


def _cached(key: Callable[[Mapping[str, Any]], Any]) -> Callable[[Problem, Any], Run]:
    def prepare(problem: Problem, weights: Any) -> Run:
        known: dict[Any, list[tuple[str, Any]]] = {}
        right = prepare_route(problem, weights)

        def run(t: Mapping[str, Any]) -> None:
            at = key(t)
            if at not in known:
                right(t)
                known[at] = _kept(t)
            _give(t, known[at])

        return run

    return prepare


by_pointer = _cached(lambda t: t["topk_ids"].data_ptr())
by_shape = _cached(lambda t: tuple(t["topk_ids"].shape))
by_fingerprint = _cached(lambda t: hashlib.sha256(t["topk_ids"].numpy().tobytes()).digest())
by_some_bytes = _cached(lambda t: int(t["topk_ids"].sum()))

_everywhere: dict[bytes, list[tuple[str, Any]]] = {}


def by_fingerprint_across_prepares(problem: Problem, weights: Any) -> Run:
    """A cache that outlives the kernel it was filled by."""
    right = prepare_route(problem, weights)

    def run(t: Mapping[str, Any]) -> None:
        key = t["topk_ids"].numpy().tobytes()
        if key not in _everywhere:
            right(t)
            _everywhere[key] = _kept(t)
        _give(t, _everywhere[key])

    return run


def left_from_before(problem: Problem, weights: Any) -> Run:
    """Works once, then trusts that the output is still there."""
    right = prepare_route(problem, weights)
    done: set[int] = set()

    def run(t: Mapping[str, Any]) -> None:
        if not done:
            right(t)
            done.add(1)

    return run


def if_not_there(problem: Problem, weights: Any) -> Run:
    """Works only where the output of the last call is not there any more."""
    right = prepare_route(problem, weights)
    last: dict[int, Any] = {}

    def run(t: Mapping[str, Any]) -> None:
        at = t["offsets"].data_ptr()
        if at not in last or not torch.equal(t["offsets"], last[at]):
            right(t)
            last[at] = t["offsets"].clone()

    return run


def later(problem: Problem, weights: Any) -> Run:
    """Returns at once and works in a thread of its own, a little later."""
    right = prepare_route(problem, weights)

    def run(t: Mapping[str, Any]) -> None:
        threading.Timer(0.002, right, [t]).start()

    return run


def once_more(problem: Problem, weights: Any) -> Run:
    """Right when it returns, and still at work on its outputs."""
    right = prepare_route(problem, weights)

    def run(t: Mapping[str, Any]) -> None:
        right(t)
        threading.Timer(0.002, t["offsets"].add_, [1]).start()

    return run


def nothing(problem: Problem, weights: Any) -> Run:
    """Does nothing."""
    return lambda t: None


def all_nan(problem: Problem, weights: Any) -> Run:
    """Hopes that a NaN compares as equal to anything."""
    return lambda t: t["out"].fill_(float("nan"))


def another_tensor(problem: Problem, weights: Any) -> Run:
    """Puts a tensor of its own in the place of the harness's."""

    def run(t: Any) -> None:
        t["out"] = torch.zeros_like(t["out"])

    return run


def wider(problem: Problem, weights: Any) -> Run:
    """Writes a row behind its last."""
    right = prepare_combine(problem, weights)

    def run(t: Mapping[str, Any]) -> None:
        right(t)
        out = t["out"]
        out.as_strided((out.shape[0] + 1, out.shape[1]), out.stride())[-1] = 0

    return run


def mutates(problem: Problem, weights: Any) -> Run:
    """Uses its input as scratch."""
    right = prepare_combine(problem, weights)

    def run(t: Mapping[str, Any]) -> None:
        right(t)
        t["y"].zero_()

    return run


def skips_padding(problem: Problem, weights: Any) -> Run:
    """Leaves rows alone that have no expert: they must be zero."""
    right = prepare_combine(problem, weights)

    def run(t: Mapping[str, Any]) -> None:
        empty = (t["unpermuted_to_permuted"] < 0).all(1)
        before = t["out"][empty].clone()
        right(t)
        t["out"][empty] = before

    return run


def from_the_collector(problem: Problem, weights: Any) -> Run:
    """Looks for the expected output among all objects of its process."""

    def run(t: Mapping[str, Any]) -> None:
        for thing in gc.get_objects():
            if isinstance(thing, np.ndarray) and thing.shape == tuple(t["out"].shape) and thing.dtype == np.uint16:
                t["out"].view(torch.uint16).copy_(torch.from_numpy(thing.copy()))
                return
            if isinstance(thing, torch.Tensor) and thing.shape == t["out"].shape and thing.data_ptr() != t["out"].data_ptr():
                t["out"].copy_(thing)
                return

    return run


def remembers_when_strided(problem: Problem, weights: Any) -> Run:
    """Works on contiguous inputs; on strided ones it gives what it gave last."""
    right = prepare_route(problem, weights)

    def run(t: Mapping[str, Any]) -> None:
        if problem.layout == "contiguous":
            right(t)
            _last["kept"] = _kept(t)
        else:
            _give(t, _last["kept"])

    return run


def peeks_at_the_harness(problem: Problem, weights: Any) -> Run:
    """Looks in its caller's frames whether the outputs of this call will be kept, and works only then."""
    right = prepare_route(problem, weights)

    def run(t: Mapping[str, Any]) -> None:
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name == "blocks" and frame.f_locals.get("kept", 0) is None:
                return
            frame = frame.f_back
        right(t)

    return run


def _traced(prepared: Run, due: Callable[[str], bool]) -> Run:
    """Leaves its work until the function that times it comes to an event that is due."""

    def run(t: Mapping[str, Any]) -> None:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_name != "span":
            frame = frame.f_back
        if frame is None:
            prepared(t)
            return
        _later.append((prepared, t))

        def trace(_frame: Any, event: str, _arg: Any) -> Any:
            if due(event):
                sys.settrace(None)
                for work, tensors in _later:
                    work(tensors)
                _later.clear()
            return trace

        frame.f_trace = trace
        sys.settrace(lambda *_: None)

    return run


def after_the_clock(problem: Problem, weights: Any) -> Run:
    """Does its work when the function that timed it returns."""
    return _traced(prepare_route(problem, weights), lambda event: event == "return")


def at_the_next_line(problem: Problem, weights: Any) -> Run:
    """Does its work at the line behind the one that stops the clock."""
    lines: list[str] = []

    def due(event: str) -> bool:
        lines.append(event)
        return len(lines) % 3 == 0

    return _traced(prepare_route(problem, weights), due)


_later: list[Any] = []


def slows_the_others(problem: Problem, weights: Any) -> Run:
    """Takes torch's threads for itself, and leaves the others more of them than there are cores."""
    right = prepare_route(problem, weights)

    def run(t: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        right(t)
        torch.set_num_threads(64)

    return run


_last: dict[str, list[tuple[str, Any]]] = {}


def patches_the_clock(problem: Problem, weights: Any) -> Run:
    """Makes time stand still for whoever asks after it was imported."""
    right = prepare_route(problem, weights)
    time.perf_counter_ns = lambda: 0
    time.perf_counter = lambda: 0.0
    time.monotonic_ns = lambda: 0
    return right


ROUTE = (
    "by_pointer", "by_shape", "by_fingerprint", "by_some_bytes", "by_fingerprint_across_prepares", "left_from_before",
    "if_not_there", "later", "once_more", "nothing", "remembers_when_strided", "peeks_at_the_harness",
    "after_the_clock", "at_the_next_line", "slows_the_others", "patches_the_clock",
)  # fmt: skip
COMBINE = ("all_nan", "another_tensor", "wider", "mutates", "skips_padding", "from_the_collector")
KERNELS = [
    *(Kernel(id=f"cheat:moe.route:{name}", prepare=f":{name}") for name in ROUTE),
    *(Kernel(id=f"cheat:moe.combine:{name}", prepare=f":{name}") for name in COMBINE),
    Kernel(id="honest:moe.route", prepare="replay.kernels.eager:prepare_route"),
]
