"""The mutants: each changes one thing and can be put into force; the list of equivalent ones holds nothing else."""

import inspect
import os
import tomllib
from collections.abc import Callable

import numpy as np
import pytest

from replay.oracle import arith, moe, quant
from tests.mutation.mutants import STAGE_FUNCTIONS, Mutant, mutants
from tests.mutation.mutate_oracle import LISTED

ALL = list(mutants())
BY_NAME = {str(m): apply for m, apply in ALL}


def test_there_are_mutants_of_every_oracle() -> None:
    """Hundreds, each under a name of its own; every function of the oracles has some, and what calls them for a stage."""
    assert len(BY_NAME) == len(ALL) > 400
    functions = {(m.module, m.function) for m, _ in ALL}
    for module in (arith, quant, moe):
        own = (n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__)
        assert {(module.__name__, name) for name in own} <= functions
    assert {("replay.stages.moe", name) for name in STAGE_FUNCTIONS} <= functions


def test_every_mutant_can_be_put_into_force() -> None:
    """One that could not be would look as if the suite had seen it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for apply in BY_NAME.values():
                apply()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_every_listed_mutant_exists_and_has_a_proof() -> None:
    """A proof of a mutant that is no more proves nothing."""
    listed = tomllib.loads(LISTED.read_text())
    assert listed
    assert set(listed) <= set(BY_NAME)
    assert all(len(proof.split()) >= 5 for proof in listed.values())


def in_a_fork(mutant: str, differs: Callable[[], bool]) -> bool:
    """Whether something differs with a mutant in force; the mutant dies with the fork."""
    child = os.fork()
    if child == 0:
        try:
            BY_NAME[mutant]()
            os._exit(1 if differs() else 0)
        except BaseException:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


X = np.random.default_rng(1).standard_normal((64, 512)).astype(np.float32)


@pytest.mark.parametrize(
    ("mutant", "value"),
    [
        ("oracle.quant.LIMIT: np.float32(127.0) → np.float32(127.00001)", lambda: quant.quantize(X, "recip_half_away")[1]),
        ("oracle.arith.rn_bf16: 32767 → 32768", lambda: arith.rn_bf16(X)),
    ],
)
def test_a_mutant_is_in_force_for_whoever_imported_the_function(mutant: str, value: Callable[[], np.ndarray]) -> None:
    """In the fork the value is another, behind it the same as before."""
    before = value().copy()
    assert in_a_fork(mutant, lambda: value().tobytes() != before.tobytes())
    assert (value() == before).all()


def test_a_mutant_says_what_it_was() -> None:
    """Function, before, after, and which of equal places."""
    assert str(Mutant("replay.oracle.moe", "route", "1", "2", 1)) == "oracle.moe.route: 1 → 2 #1"
