"""From a kernel's outputs over its repeats to an outcome, with the mode that would have matched."""

import re
from collections.abc import Sequence
from functools import partial

from replay.exactness.compare import Allowance, Got, Mismatch, compare, same_bits
from replay.model import Case, Exact, Inexact, Problem
from replay.stages.stage import Outputs, Stage, Tensors

# How a twin's answer is told, and what may be done about it.
TWIN = {
    "second": "on other bytes: ",
    "strided": "on strided inputs (a kernel that takes contiguous ones only declares layouts=('contiguous',)): ",
}


def judge(
    stage: Stage, case: Case, inputs: Tensors, want: Outputs, repeats: Sequence[Got], trespasses: Sequence[str]
) -> Exact | Inexact:
    """The outcome of one kernel on one case.

    Every repeat is compared with the oracle; repeats that differ from one another are NONDETERMINISTIC, and a wrong
    output, a guard band or an input that was written to is a FAIL.
    """
    problem = case.problem
    canonical = [Got(stage.canonical(problem, inputs, g.outputs), g.poison) for g in repeats]
    found = [compare(stage.specs(problem), want, g) for g in canonical]
    differs = next((m for m in found if m), None)
    if differs and _unstable(stage, problem, want, canonical):
        agree = sum(m is None for m in found)
        told = differs.text(stage.label(case, differs.output, differs.row))
        return Inexact("NONDETERMINISTIC", differs.row, f"{agree} of {len(found)} repeats right; {told}")
    worst = differs and next((m for g in repeats if (m := held(stage, problem, inputs, want, g))), None)
    if worst:
        told = worst.text(stage.label(case, worst.output, worst.row))
        return Inexact("FAIL", worst.row, told + _matching_mode(stage, case, repeats[0]) + _extra(trespasses))
    if trespasses:
        return Inexact("FAIL", -1, "; ".join(trespasses))
    if differs:
        return Exact("WITHIN_ULP", len(repeats), detail=_spent(stage, problem, inputs, want, canonical))
    if stage.selects and (told := next(filter(None, map(partial(_otherwise, stage, problem), repeats, canonical)), "")):
        return Exact("TIE_EQUIVALENT", len(repeats), detail=told)
    return Exact("BITWISE", len(repeats), detail="lowest index first" if stage.selects else "")


def held(stage: Stage, problem: Problem, inputs: Tensors, want: Outputs, got: Got) -> Mismatch | None:
    """The worst row of a call that is neither the oracle's nor within the stage's budgets."""
    canonical = Got(stage.canonical(problem, inputs, got.outputs), got.poison)
    return compare(stage.specs(problem), want, canonical, _allowed(stage, problem, inputs))


def _allowed(stage: Stage, problem: Problem, inputs: Tensors) -> dict[str, Allowance]:
    scale = stage.row_scale
    return {n: Allowance(budget, scale(problem, inputs, n) if scale else 0.0) for n, budget in stage.budgets.items()}


def _spent(stage: Stage, problem: Problem, inputs: Tensors, want: Outputs, repeats: Sequence[Got]) -> str:
    """``gate_up within own_exp: 1.5 of 5 scaled ulp, 3 of 4 flips a row``, over all repeats and budgets."""
    told = []
    allowed = _allowed(stage, problem, inputs)
    for spec in stage.specs(problem):
        if allowance := allowed.get(spec.name):
            rows = want[spec.name]
            spent = [allowance.spent(spec, rows, g.outputs[spec.name][: len(rows)]) for g in repeats]
            ulp, flips = (max(float(part[i].max(initial=0)) for part in spent) for i in (0, 1))
            b = allowance.budget
            told.append(f"{spec.name} within {b.name}: {ulp:.3g} of {b.ulp:g} scaled ulp, {flips:.0f} of {b.flips} flips a row")
    return "; ".join(told)


def _otherwise(stage: Stage, problem: Problem, raw: Got, canonical: Got) -> str:
    """Where a selection among equal values is another than the oracle's, which takes the lowest index first."""
    found = same_bits(stage.specs(problem), canonical.outputs, raw.outputs)
    return f"not the lowest index first in {len(found[1])} rows of {found[0]}, first {found[1][0]}" if found else ""


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


def judge_twin(stage: Stage, case: Case, inputs: Tensors, want: Outputs, got: Got) -> Inexact | None:
    """A FAIL where the answer to a twin of the case is wrong: the first case's output again, or any other mistake."""
    found = held(stage, case.problem, inputs, want, got)
    if found is None:
        return None
    return Inexact("FAIL", found.row, TWIN[case.twin] + found.text(stage.label(case, found.output, found.row)))
