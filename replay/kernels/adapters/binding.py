"""What binds an operation to a stage: each argument is one of the stage's tensors, a value, or room that the operation wants.

``writes`` is what an operation does, whether its schema declares it or not.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replay.model import Problem

if TYPE_CHECKING:
    import torch

    T = torch.Tensor
    Tensors = Mapping[str, T]


@dataclass(frozen=True)
class Is:
    """A tensor of the stage; ``zeroed`` by whoever calls, right before."""

    tensor: str
    zeroed: bool = False


@dataclass(frozen=True)
class Value:
    """A number, a flag, a string, or a tensor that is made of the stage's."""

    of: "Callable[[Problem, Tensors], Any]"


@dataclass(frozen=True)
class Room:
    """A tensor that an operation fills and no stage has, or reads and no stage gives: dtype and shape."""

    dtype: str
    shape: Callable[[Problem], tuple[int, ...]]


Argument = Is | Value | Room
NONE = Value(lambda p, t: None)


def _once(p: Problem, t: "Tensors") -> "Iterator[Tensors]":
    """Most operations do all of a stage in one call."""
    yield t


def _ends(p: Problem, t: "Tensors", args: Mapping[str, Any], returned: Any) -> None:
    """Most operations write all that the stage asks for."""


@dataclass(frozen=True, kw_only=True)
class Binding:
    """``op`` runs ``stage`` as ``variant``. ``named``: a fork's schema of which only the names are known, so only they are held.

    What a binding does beside the operation is in the time of a call: a tensor that a Value makes, what ``finish`` adds, and
    where a Value or ``calls`` asks the device for a number, its wait. docs/gpu.md names them.

    ``calls`` gives the stage's tensors for each call that it takes. ``finish(problem, tensors, arguments, returned)`` writes
    what the stage asks for and the operation does not.
    """

    op: str
    schema: str
    stage: str
    variant: str
    arguments: Mapping[str, Argument]
    writes: tuple[str, ...]
    named: bool = False
    modes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    calls: "Callable[[Problem, Tensors], Iterator[Tensors]]" = _once
    finish: "Callable[[Problem, Tensors, Mapping[str, Any], Any], None]" = _ends
    undeclared: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """``moe.combine:moe_gather``."""
        return f"{self.stage}:{self.variant}"


def of_problem(of: Callable[[Problem], Any]) -> Value:
    """What the problem alone says."""
    return Value(lambda p, t: of(p))


def same(*names: str) -> dict[str, Argument]:
    """Arguments that the stage calls by the same name."""
    return {name: Is(name) for name in names}


def arguments_of(binding: Binding, problem: Problem, tensors: "Tensors", kept: "dict[str, T]") -> dict[str, Any]:
    """The operation's arguments, by name; ``kept`` holds what it wants beside the stage's tensors."""
    import torch

    given: dict[str, Any] = {}
    like = next(iter(tensors.values()))
    for name, argument in binding.arguments.items():
        if isinstance(argument, Is):
            given[name] = tensors[argument.tensor].zero_() if argument.zeroed else tensors[argument.tensor]
        elif isinstance(argument, Value):
            given[name] = argument.of(problem, tensors)
        else:
            if name not in kept:
                kept[name] = torch.zeros(argument.shape(problem), dtype=getattr(torch, argument.dtype), device=like.device)
            given[name] = kept[name]
    return given
