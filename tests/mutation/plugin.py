"""A pytest plugin: the suite with one mutant in force, the one that B70_MUTANT names."""

import os

from tests.mutation.mutants import mutants


def pytest_configure() -> None:
    """Apply the mutant before anything is collected."""
    wanted = os.environ["B70_MUTANT"]
    next(apply for mutant, apply in mutants() if str(mutant) == wanted)()
