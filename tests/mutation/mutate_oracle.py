"""``make mutate-oracle``: every mutant of every oracle must turn the suite red, or stand in the list of equivalent ones.

python -m tests.mutation.mutate_oracle [WORD]   only mutants whose name holds WORD

The suite comes in two parts. What our kernels wrote on drawn cases and on edge cases is computed once, with the oracles as
they are, and each mutant's outputs are held against it; what survives that is put to the tests of the oracles, run anew.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
import tomllib
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from replay.exactness.compare import Got
from replay.exactness.judge import Graded, graded
from replay.model import Case
from replay.stages import STAGES
from tests.fuzz.strata import MOE
from tests.mutation.mutants import Mutant, mutants

LISTED = Path(__file__).with_name("equivalent.toml")
CASES = 60  # drawn cases a stage
SUITE = ("tests/oracle", "tests/stages")
PATIENCE_S = 60
NOT_IN_FORCE = 3


@dataclass(frozen=True)
class Shown:
    """A case's inputs and what each of our kernels wrote on them."""

    case: Case
    inputs: dict[str, Any]
    wrote: tuple[Got, ...]


def shown() -> list[Shown]:
    """Every stage's cases with the outputs of all its kernels; computed in a process of its own, which imports torch."""
    with get_context("spawn").Pool(1) as pool:
        found: list[Shown] = pickle.loads(pool.apply(_shown))
    return found


def _shown() -> bytes:
    from replay.devices import Device
    from replay.session.arms import Arms
    from replay.session.child import judged_calls
    from tests.fuzz.strata import kernels_of
    from tests.mutation.cases import chosen

    arms, found = Arms(Device("cpu")), []
    for stage in MOE:
        for case, inputs in chosen(arms, stage, CASES):
            ran = [judged_calls(arms, kernel, case, 0, [inputs]) for kernel in kernels_of(stage)]
            found.append(Shown(case, inputs, tuple(r.repeats[0] for r in ran)))
    return pickle.dumps(found)


def sees(found: Sequence[Shown]) -> bool:
    """Whether any kernel's line would be red, by the oracles as they are in this process; a warning is red as well."""
    warnings.simplefilter("error")
    for one in found:
        stage, problem = STAGES[one.case.problem.stage], one.case.problem
        want = stage.expected(problem, one.inputs)
        if any(graded(stage, problem, one.inputs, want, got) != Graded("BITWISE") for got in one.wrote):
            return True
    return False


def killed_by_kernels(mutant: Mutant, apply: Callable[[], None], found: Sequence[Shown]) -> bool:
    """Whether what our kernels wrote tells the mutant from the oracle; asked in a fork, which dies with the mutant.

    RuntimeError for a mutant that cannot be put into force: it would be seen by nobody and count for nothing.
    """
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE_S)  # a mutant that never ends is seen as well
        code = NOT_IN_FORCE
        with contextlib.suppress(BaseException):
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # a mutant's warnings are of no interest
            apply()
            code = 1  # whatever it raises from here on is seen
            code = 1 if sees(found) else 0
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == NOT_IN_FORCE:
        raise RuntimeError(f"{mutant}: could not be put into force")
    return code != 0


def killed_by_tests(mutant: Mutant) -> bool:
    """Whether the tests of the oracles turn red with it."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "tests.mutation.plugin", *SUITE]
    done = subprocess.run(
        command, env=os.environ | {"B70_MUTANT": str(mutant), "OMP_NUM_THREADS": "1"}, capture_output=True, check=False
    )
    if done.returncode not in (0, 1):  # neither green nor red: the tests did not run, which says nothing of a mutant
        raise RuntimeError(f"{mutant}: pytest ended with {done.returncode}: {done.stdout.decode()[-500:]}")
    return done.returncode == 1


def main(word: str = "") -> int:
    """Print what survived, and what stands in the list without need; 1 where there is either."""
    begin = time.monotonic()
    found = shown()
    if sees(found):
        print("the kernels and the oracles differ without a mutant")
        return 1
    chosen = [(m, apply) for m, apply in mutants() if word in str(m)]
    print(f"{len(chosen)} mutants, {len(found)} cases of {len(MOE)} stages ({time.monotonic() - begin:.0f} s)", flush=True)
    left = [m for m, apply in chosen if not killed_by_kernels(m, apply, found)]
    print(f"{len(chosen) - len(left)} seen by what kernels wrote ({time.monotonic() - begin:.0f} s)", flush=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        alive = [m for m, killed in zip(left, pool.map(killed_by_tests, left), strict=True) if not killed]
    print(f"{len(left) - len(alive)} seen by the oracles' tests ({time.monotonic() - begin:.0f} s)")
    proofs = tomllib.loads(LISTED.read_text()) if LISTED.exists() else {}
    names = {str(m) for m in alive}
    listed = [m for m in map(str, alive) if m in proofs]
    survived = [m for m in map(str, alive) if m not in proofs]
    stale = [name for name in proofs if word in name and name not in names]
    print(f"{len(listed)} equivalent, each with its proof; {len(survived)} survived")
    for name in survived:
        print(f"SURVIVED {name}")
    for name in stale:
        print(f"LISTED, BUT SEEN OR GONE {name}")
    return 1 if survived or stale else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
