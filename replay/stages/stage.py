"""The shape of a stage: a frozen record of functions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from replay.model import Case, Problem, Spec, Work
from replay.oracle.moe import ExpertRows

Tensors = dict[str, NDArray[Any] | ExpertRows]
Outputs = dict[str, NDArray[Any]]


def _accept(problem: Problem) -> None:
    """Most stages take every problem that their modes allow."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One thing that can be replayed.

    ``modes``: name → values (regular expressions), the default first. ``oracle`` returns an output with fewer rows
    than its spec where only those are defined; the rest must keep their poison. ``canonical`` validates a permutation
    and brings outputs to one order. ``label`` names a row of an output. ``relabel`` moves the active experts to other
    slots without changing the expected outputs, or is None where no weights are read. ``probes`` are the inputs whose
    redrawing must move the outputs. ``check`` raises InputError for a problem that the stage cannot pose.
    """

    name: str
    modes: Mapping[str, tuple[str, ...]]
    specs: Callable[[Problem], tuple[Spec, ...]]
    inputs: Callable[[Case], Tensors]
    oracle: Callable[[Problem, Tensors], Outputs]
    work: Callable[[Problem, Tensors], Work]
    canonical: Callable[[Problem, Tensors, Outputs], Outputs]
    label: Callable[[Case, str, int], str]
    relabel: Callable[[Tensors, NDArray[Any]], Tensors] | None
    probes: tuple[str, ...]
    check: Callable[[Problem], None] = _accept

    def expected(self, problem: Problem, inputs: Tensors) -> Outputs:
        """The oracle's outputs in canonical form, as a kernel's are before they are compared."""
        return self.canonical(problem, inputs, self.oracle(problem, inputs))
