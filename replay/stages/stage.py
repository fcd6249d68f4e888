"""The shape of a stage: a frozen record of functions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from numpy.typing import NDArray

from replay.model import Case, Kernel, Layout, Problem, Spec, Work
from replay.oracle.moe import ExpertRows

Tensors = dict[str, NDArray[Any] | ExpertRows]
Outputs = dict[str, NDArray[Any]]


# A number in the pattern of a mode's value.
COUNT = r"[1-9]\d*"
# Odd numbers of elements: no vector load of a strided input is aligned, and no row begins where a contiguous one would.
OFFSET, GAP = 5, 3


def laid_out(spec: Spec, layout: Layout) -> Spec:
    """A tensor's spec in a problem of that layout; only inputs are ever strided."""
    if layout == "contiguous" or spec.role != "in":
        return spec
    steps = [1]
    for extent in reversed(spec.shape[1:]):
        steps.append(steps[-1] * extent + GAP)
    return msgspec.structs.replace(spec, stride=tuple(reversed(steps)), offset=OFFSET)


def _accept(problem: Problem) -> None:
    """Most stages take every problem that their modes allow."""


def _nothing(case: Case, outputs: Outputs) -> str:
    """Most stages have nothing to tell of a right output."""
    return ""


def _as_is(problem: Problem, inputs: Tensors, outputs: Outputs) -> Outputs:
    """Most stages permute nothing."""
    return outputs


def _ordinary(problem: Problem, inputs: Tensors) -> bool:
    """Most stages have no edges of that kind."""
    return False


@dataclass(frozen=True)
class Budget:
    """How far an honest kernel may be from the oracle in one output, beside being equal to it.

    At most ``ulp`` scaled ulp in any element (semantics: WITHIN_ULP) and ``flips`` elements of a row that are not
    bit-equal. ``name`` is what a table shows; why there is a budget stands beside it in the stage.
    """

    name: str
    ulp: float
    flips: int


def _none(problem: Problem) -> Mapping[str, Budget]:
    """Most stages hold everything to its bits."""
    return {}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One thing that can be replayed.

    ``modes``: name → values (regular expressions), the default first. ``oracle`` returns an output with fewer rows
    than its spec where only those are defined; the rest must keep their poison. ``canonical`` validates a permutation
    and brings outputs to one order. ``label`` names a row of an output. ``relabel`` moves the active experts to other
    slots without changing the expected outputs, or is None where no weights are read. ``probes`` are the inputs whose
    redrawing must move the outputs. ``check`` raises InputError for a problem that the stage cannot pose.

    ``rests_on`` names the self-tests (session/selftest.py) of what the stage's arithmetic asks of a device.
    ``arranged``, where a stage selects: right outputs in one order but with the kernel's own choice among equal values. Any of
    them is right, and ``canonical`` turns it into the oracle's; a kernel that chose otherwise is TIE_EQUIVALENT.
    ``budgets``: of a problem, output of floats → what makes a kernel WITHIN_ULP that asks for it (``Kernel.budgeted``); an output
    without one is held to its bits.
    ``row_scale`` gives what was reduced into an output's rows its absmax, in an array that broadcasts to the rows that the
    oracle defines; it is given the inputs without the experts' weights, and those rows.

    ``edges`` turns a case into its twin of that name, on rows that a capture refuses or that hardly any holds, in a problem that
    may have more of them.
    ``notice``: what a user should hear of an output that is right, e.g. that a state overflowed its dtype.
    ``degenerate``: whether a case is an edge that may legitimately leave outputs where they are; such are told, and no
    oracle is probed on them.
    """

    name: str
    modes: Mapping[str, tuple[str, ...]]
    specs: Callable[[Problem], tuple[Spec, ...]]
    inputs: Callable[[Case], Tensors]
    oracle: Callable[[Problem, Tensors], Outputs]
    work: Callable[[Problem, Tensors], Work]
    label: Callable[[Case, str, int], str]
    relabel: Callable[[Tensors, NDArray[Any]], Tensors] | None
    probes: tuple[str, ...]
    canonical: Callable[[Problem, Tensors, Outputs], Outputs] = _as_is
    check: Callable[[Problem], None] = _accept
    degenerate: Callable[[Problem, Tensors], bool] = _ordinary
    notice: Callable[[Case, Outputs], str] = _nothing
    edges: Callable[[Case], Case] | None = None
    rests_on: tuple[str, ...] = ()
    arranged: Callable[[Problem, Tensors, Outputs], Outputs] | None = None
    budgets: Callable[[Problem], Mapping[str, Budget]] = _none
    row_scale: Callable[[Problem, Tensors, str, NDArray[Any]], NDArray[Any]] | None = None

    def judging(self, kernel: Kernel) -> "Stage":
        """This stage as it judges a kernel: without its budgets where the kernel does not ask for them."""
        return self if kernel.budgeted else replace(self, budgets=_none)

    def expected(self, problem: Problem, inputs: Tensors) -> Outputs:
        """The oracle's outputs in canonical form, as a kernel's are before they are compared."""
        return self.canonical(problem, inputs, self.oracle(problem, inputs))
