"""From a kernel's outputs over its repeats to an outcome, with the mode that would have matched."""

import re
from collections.abc import Sequence

from replay.exactness.compare import Got, compare, same_bits
from replay.model import Case, Exact, Inexact, Problem
from replay.stages.stage import Outputs, Stage, Tensors


def judge(
    stage: Stage, case: Case, inputs: Tensors, want: Outputs, repeats: Sequence[Got], trespasses: Sequence[str]
) -> Exact | Inexact:
    """The outcome of one kernel on one case.

    Every repeat is compared with the oracle; repeats that differ from one another are NONDETERMINISTIC, and a wrong
    output, a guard band or an input that was written to is a FAIL.
    """
    problem = case.problem
    specs = stage.specs(problem)
    canonical = [Got(stage.canonical(problem, inputs, g.outputs), g.poison) for g in repeats]
    found = [compare(specs, want, g) for g in canonical]
    worst = next((m for m in found if m), None)
    if worst is None:
        if trespasses:
            return Inexact("FAIL", -1, "; ".join(trespasses))
        return Exact("BITWISE", len(repeats))
    label = stage.label(case, worst.output, worst.row)
    if _unstable(stage, problem, want, canonical):
        agree = sum(m is None for m in found)
        return Inexact("NONDETERMINISTIC", worst.row, f"{agree} of {len(found)} repeats right; {worst.text(label)}")
    return Inexact("FAIL", worst.row, worst.text(label) + _matching_mode(stage, case, repeats[0]) + _extra(trespasses))


def _extra(trespasses: Sequence[str]) -> str:
    return "".join(f"; {t}" for t in trespasses)


def _unstable(stage: Stage, problem: Problem, want: Outputs, repeats: Sequence[Got]) -> bool:
    """True where two repeats under the same poison differ in the rows that the oracle defines."""
    firsts: dict[int, Outputs] = {}
    for got in repeats:
        valid = {n: a[: len(want[n])] for n, a in got.outputs.items() if n in want}
        first = firsts.setdefault(got.poison, valid)
        if same_bits(stage.specs(problem), first, valid):
            return True
    return False


def other_modes(stage: Stage, problem: Problem) -> list[Problem]:
    """The same problem under each other named value of each mode (parametric ones, and other shapes, left out)."""
    found = []
    for name, values in stage.modes.items():
        for value in values:
            if re.fullmatch(r"\w+", value) and value != problem.mode(name):
                other = problem.with_mode(name, value)
                if [s.shape for s in stage.specs(other)] == [s.shape for s in stage.specs(problem)]:
                    found.append(other)
    return found


def _matching_mode(stage: Stage, case: Case, got: Got) -> str:
    """``; matches mode …`` when the output is right under another named mode. Draws the case again, weights and all."""
    problem, inputs = case.problem, stage.inputs(case)
    matches: dict[str, list[str]] = {}
    for other in other_modes(stage, problem):
        name = next(n for n, v in other.modes if problem.mode(n) != v)
        canonical = Got(stage.canonical(other, inputs, got.outputs), got.poison)
        if compare(stage.specs(problem), stage.oracle(other, inputs), canonical) is None:
            matches.setdefault(name, []).append(other.mode(name))
    return "".join(f"; matches mode {n}={' or '.join(values)}, asked {n}={problem.mode(n)}" for n, values in matches.items())


def judge_second(stage: Stage, case: Case, inputs: Tensors, want: Outputs, got: Got) -> Inexact | None:
    """A FAIL where the answer to the second case is wrong: the first case's output again, or any other mistake."""
    found = compare(stage.specs(case.problem), want, Got(stage.canonical(case.problem, inputs, got.outputs), got.poison))
    if found is None:
        return None
    return Inexact("FAIL", found.row, "on other bytes: " + found.text(stage.label(case, found.output, found.row)))
