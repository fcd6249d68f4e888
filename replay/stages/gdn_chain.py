"""One decode step after another: the inputs of a case's sequences at each, and what a step hands to the next.

Inputs come from the capture while it has a row of every sequence for the step, and are drawn from then on, as the generator of
state captures draws them.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.captures.generate_states import draw_projections
from replay.captures.states import StateFile
from replay.errors import InputError
from replay.model import Case
from replay.stages import STAGES
from replay.stages.draw import generator
from replay.stages.gdn_tensors import Drawn, reordered
from replay.stages.stage import Outputs, Tensors

FED_BACK = ("gdn.recurrent", "gdn.step")  # the stages with a recurrent state
NAN_BYTE = 0xFF  # every byte of what a step must not read, or has to write: NaN in each dtype


@dataclass(frozen=True)
class Link:
    """A step's inputs but for what it changes; ``captured`` or drawn."""

    inputs: Tensors
    captured: bool


def links(case: Case, reset: str) -> Iterator[Link]:
    """Step after step, without end. Where the stage has no conv of its own, q|k|v come from the contract's, whose states go on;
    under ``fresh`` each step finds those that the first one found."""
    names = [s.name for s in STAGES[case.problem.stage].specs(case.problem) if s.role == "in"]
    begin = Drawn(case)
    at = _rows_by_step(begin.file)
    history = first = begin.table("conv_state")
    lasts = True
    for number in itertools.count():
        rows = _captured(begin, at, number) if lasts else None
        lasts = rows is not None
        drawn = rows or Drawn(case, _projections(begin, number))
        inputs: Tensors = {name: drawn.get(name) for name in names if name != "qkv"}
        if "qkv" in names:  # what a stage's own conv would make is not for the process that runs it to know
            inputs["qkv"], history = drawn.convolved(first if reset == "fresh" else history)
        yield Link(inputs, lasts)


def _captured(begin: Drawn, at: Mapping[tuple[int, int], int], number: int) -> Drawn | None:
    """The case so many steps later, or None where the capture has no row of one of its sequences then."""
    case, index, held = begin.case, begin.file.index, begin.case.states
    moved = []
    for sequence in held.sequences:
        (row,) = sequence.tokens
        later = at.get((int(index["step"][row]) + number, int(index["sequence"][row])))
        if later is None:
            return None
        moved.append(msgspec.structs.replace(sequence, tokens=(later,)))
    return Drawn(msgspec.structs.replace(case, held=msgspec.structs.replace(held, sequences=tuple(moved))))


def _rows_by_step(file: StateFile) -> dict[tuple[int, int], int]:
    """(step, sequence) → row of a file."""
    pairs = zip(file.index["step"].tolist(), file.index["sequence"].tolist(), strict=True)
    return {key: row for row, key in enumerate(pairs)}


def _projections(begin: Drawn, number: int) -> dict[str, NDArray[Any]]:
    """A drawn step, in the file's order."""
    problem = begin.problem
    drawn = draw_projections(generator(begin.case.id, "chain", number), problem.rows, problem.geometry)
    order = begin.file.modes.get("reorder_input", "contiguous")
    return {n: a if order == "contiguous" else reordered(a, n, begin.heads, "contiguous", order) for n, a in drawn.items()}


# ---------------------------------------------------------------- from one step to the next


def check(case: Case) -> None:
    """InputError for a case that no state can be fed back in."""
    if case.problem.stage not in FED_BACK:
        raise InputError("--stage", "name", f"{' or '.join(FED_BACK)}, which have a state to feed back", case.problem.stage)


def owned(first: Tensors) -> NDArray[np.intp]:
    """The slots that sequences own, in the order of the batch."""
    slots = np.asarray(first["slots"])
    return slots[slots >= 0].astype(np.intp)


def carried(case: Case, reset: str, first: Tensors, before: Outputs | None) -> Outputs:
    """What a step finds in the tensors that it changes: the states that the step ``before`` left, or under ``fresh`` those that
    the first one found. Under ``poison`` slots that are nobody's and every output hold NaN, before each step."""
    changed = [s.name for s in STAGES[case.problem.stage].specs(case.problem) if s.role == "inout"]
    found: Outputs = {}
    for name in changed:
        at_first = first[name]
        assert isinstance(at_first, np.ndarray)
        fed_back = before is not None and reset != "fresh" and name.endswith("_state")
        array = np.array(before[name] if fed_back and before else at_first)
        if reset == "poison":
            others = np.arange(len(array))
            others = np.setdiff1d(others, owned(first)) if name.endswith("_state") else others
            array.view(np.uint8).reshape(len(array), -1)[others] = NAN_BYTE
        found[name] = array
    return found
