"""Could the check have failed at all? A stage's oracle is probed before anything is judged by it.

An input whose redrawing does not move the expected output is not checked by it, and an oracle that calls the op under
test agrees with it whatever it does.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.model import Case
from replay.oracle.arith import rn_bf16
from replay.oracle.moe import ExpertRows
from replay.stages.stage import Outputs, Stage, Tensors
from replay.stages.vary import doubled

MOST_PROBED = 16
# torch's own operations are the one library that an oracle may share with a candidate.
TORCH_NAMESPACES = ("aten", "prim", "prims")


def mistrust(stage: Stage, cases: Sequence[Case]) -> str | None:
    """Why nothing can be judged by this stage's oracle, or None. ``cases`` are those of one stage in one run.

    Probed on cases that are not degenerate, doubled or with their edges where there are any, until every probe has moved an
    output or none is left of the first few; a suite of edge cases alone leaves its stage unprobed.
    """
    if shared := sorted(candidates_code(stage.oracle)):
        return f"the oracle calls what it should judge: {', '.join(shared)}"
    still: list[str] | None = None
    where = None
    for chosen in cases[:MOST_PROBED]:
        if stage.degenerate(chosen.problem, stage.inputs(chosen)):
            continue
        case = probed(stage, chosen)
        inputs = stage.inputs(case)
        base, foreign = dispatched(partial(stage.oracle, case.problem, inputs))
        if foreign:
            return f"the oracle calls operations that are not torch's: {', '.join(foreign)}"
        where = where or chosen.id
        names = [n for n in stage.probes if n in inputs] if still is None else still
        still = [name for name in names if not _moves(stage, case, inputs, base, name)]
        if not still:
            return None
    return f"redrawing {', '.join(still)} moves no expected output beside {where}" if still else None


def probed(stage: Stage, case: Case) -> Case:
    """The case on which a stage's oracle is probed."""
    return stage.edges(case) if stage.edges else doubled(case)


def _moves(stage: Stage, case: Case, inputs: Tensors, base: Outputs, name: str) -> bool:
    dtype = {s.name: s.dtype for s in stage.specs(case.problem)}[name]
    value = inputs[name]
    other = _moved_slot(value) if name == "slots" and isinstance(value, np.ndarray) else redrawn(value, dtype)
    found = stage.oracle(case.problem, {**inputs, name: other})
    return any(base[n].tobytes() != found[n].tobytes() for n in base)


def redrawn(value: NDArray[Any] | ExpertRows, dtype: str) -> NDArray[Any] | ExpertRows:
    """Other values of the same shape and kind. Ids and maps change places among themselves, so that they stay valid."""
    if isinstance(value, ExpertRows):
        rows = redrawn(value.rows, dtype)
        assert isinstance(rows, np.ndarray)  # an array gives an array
        return ExpertRows(value.total, value.experts, rows)
    rng = np.random.Generator(np.random.Philox(key=1))
    if dtype == "i8":
        return rng.integers(-127, 128, value.shape, np.int8)
    if dtype in ("f32", "f16", "bf16"):
        drawn = rng.standard_normal(value.shape, np.float32)
        return rn_bf16(drawn) if dtype == "bf16" else np.abs(drawn).astype(value.dtype)
    valid = value >= 0
    present, place = np.unique(value[valid], return_inverse=True)
    turned = value.copy()
    turned[valid] = present[::-1][place]
    return turned


def _moved_slot(slots: NDArray[Any]) -> NDArray[Any]:
    """Slots in another order; one alone takes the one before it, or behind the first: tables have more than they need."""
    turned = redrawn(slots, "i32")
    assert isinstance(turned, np.ndarray)  # an array gives an array
    return np.where(slots >= 0, np.abs(slots - 1), slots) if np.array_equal(turned, slots) else turned


def dispatched(call: Callable[[], Outputs]) -> tuple[Outputs, list[str]]:
    """What an oracle returns, and the operations it went through that are not torch's. An oracle in numpy has none, and
    torch is not even imported."""
    import sys

    if "torch" not in sys.modules:
        return call(), []
    from torch.utils._python_dispatch import TorchDispatchMode

    names: set[str] = set()

    class Log(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
        """Takes down the names of all operations."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.add(func.name())
            return func(*args, **(kwargs or {}))

    with Log():  # type: ignore[no-untyped-call]  # as above
        found = call()
    return found, sorted(n for n in names if n.partition("::")[0] not in TORCH_NAMESPACES)


def candidates_code(function: Any) -> set[str]:
    """Names of kernels' modules that a function reaches through the globals it uses, however many calls away."""
    found: set[str] = set()
    seen: set[int] = set()
    todo = [function]
    while todo:
        current = todo.pop()
        if not isinstance(current, FunctionType) or id(current) in seen:
            continue
        seen.add(id(current))
        for thing in _used(current):
            module = str(getattr(thing, "__module__", None) or getattr(thing, "__name__", ""))
            if module.startswith("replay.kernels"):
                found.add(module)
            todo.append(thing)
    return found


def _used(function: FunctionType) -> Iterator[Any]:
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield function.__globals__[name]
    for cell in function.__closure__ or ():
        yield cell.cell_contents
