"""From a kernel's outputs over its repeats to an outcome, with the mode that would have matched."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from replay.exactness.compare import Allowance, Got, Mismatch, compare, flips_a_row, same_bits
from replay.exactness.ulp import scaled_ulp
from replay.model import GRADES, Case, Exact, Grade, Inexact, Problem, Spec
from replay.stages.stage import Outputs, Stage, Tensors

_STRIDED = "on strided inputs (a kernel that takes contiguous ones only declares layouts=('contiguous',)): "
# How a twin's answer is told, and what may be done about it.
TWIN = {
    "second": "on other bytes: ", "strided": _STRIDED, "strided second": _STRIDED + "on other bytes: ", "edges": "on edges: ",
}  # fmt: skip


@dataclass(frozen=True)
class Graded:
    """What the outputs of one call are worth, and what a grade below BITWISE consists in."""

    grade: Grade
    detail: str = ""


def graded(stage: Stage, problem: Problem, inputs: Tensors, want: Outputs, got: Got) -> Graded | Mismatch:
    """The grade of one call's outputs, or the worst row that is neither the oracle's nor within the stage's budgets."""
    specs = stage.specs(problem)
    canonical = Got(stage.canonical(problem, inputs, got.outputs), got.poison)
    if compare(specs, want, canonical) is None:
        chosen = stage.arranged(problem, inputs, got.outputs) if stage.arranged else canonical.outputs
        if other := same_bits(specs, canonical.outputs, chosen):
            name, rows = other
            return Graded("TIE_EQUIVALENT", f"not the lowest index first in {len(rows)} rows of {name}, first {rows[0]}")
        return Graded("BITWISE", "lowest index first" if stage.arranged else "")
    allowed = _allowed(stage, problem, inputs, want)
    return compare(specs, want, canonical, allowed) or Graded("WITHIN_ULP", _spent(specs, allowed, want, canonical))


def judge(
    stage: Stage, case: Case, inputs: Tensors, want: Outputs, repeats: Sequence[Got], trespasses: Sequence[str]
) -> Exact | Inexact:
    """The outcome of one kernel on one case.

    Every repeat is compared with the oracle; repeats that differ from one another are NONDETERMINISTIC, and a wrong
    output, a guard band or an input that was written to is a FAIL.
    """
    found = [graded(stage, case.problem, inputs, want, g) for g in repeats]
    if differs := _differing(stage, case, inputs, want, repeats, found):
        return differs
    wrong = next((f for f in found if isinstance(f, Mismatch)), None)
    if wrong:
        return _fail(stage, case, repeats[0], wrong, extra=trespasses)
    if trespasses:
        return Inexact("FAIL", -1, "; ".join(trespasses))
    least = max((f for f in found if isinstance(f, Graded)), key=lambda f: GRADES.index(f.grade))
    told = "; ".join(part for part in (least.detail, stage.notice(case, want)) if part)
    return Exact(least.grade, len(repeats), detail=told)


def with_twin(stage: Stage, case: Case, inputs: Tensors, want: Outputs, got: Got, outcome: Exact) -> Exact | Inexact:
    """The outcome with a twin's answer: FAIL where that is wrong (the first case's output again, or any other mistake), and
    no better a grade than the twin's."""
    found = graded(stage, case.problem, inputs, want, got)
    if isinstance(found, Mismatch):
        return _fail(stage, case, got, found, TWIN[case.twin])
    if GRADES.index(found.grade) <= GRADES.index(outcome.grade):
        return outcome
    return msgspec.structs.replace(outcome, grade=found.grade, detail=TWIN[case.twin] + found.detail)


def _fail(stage: Stage, case: Case, got: Got, wrong: Mismatch, where: str = "", extra: Sequence[str] = ()) -> Inexact:
    told = where + wrong.text(stage.label(case, wrong.output, wrong.row)) + _matching_mode(stage, case, got)
    return Inexact("FAIL", wrong.row, "; ".join([told, *extra]))


def _differing(
    stage: Stage, case: Case, inputs: Tensors, want: Outputs, repeats: Sequence[Got], found: Sequence[Graded | Mismatch]
) -> Inexact | None:
    """NONDETERMINISTIC where two repeats under the same poison differ in the rows that the oracle defines, each in its
    canonical form."""
    if all(isinstance(f, Graded) and f.grade != "WITHIN_ULP" for f in found):
        return None
    specs = stage.specs(case.problem)
    canonical = [Got(stage.canonical(case.problem, inputs, g.outputs), g.poison) for g in repeats]
    if not _unstable(specs, want, canonical):
        return None
    wrong = [compare(specs, want, g) for g in canonical]
    first = next(m for m in wrong if m)
    told = first.text(stage.label(case, first.output, first.row))
    return Inexact("NONDETERMINISTIC", first.row, f"{sum(m is None for m in wrong)} of {len(wrong)} repeats right; {told}")


def _unstable(specs: tuple[Spec, ...], want: Outputs, repeats: Sequence[Got]) -> bool:
    firsts: dict[int, Outputs] = {}
    for got in repeats:
        valid = {n: a[: len(want[n])] for n, a in got.outputs.items() if n in want}
        if same_bits(specs, firsts.setdefault(got.poison, valid), valid):
            return True
    return False


def _allowed(stage: Stage, problem: Problem, inputs: Tensors, want: Outputs) -> dict[str, Allowance]:
    scale = stage.row_scale
    return {
        n: Allowance(budget, scale(problem, inputs, n, want[n]) if scale else 0.0) for n, budget in stage.budgets(problem).items()
    }


def _spent(specs: tuple[Spec, ...], allowed: Mapping[str, Allowance], want: Outputs, got: Got) -> str:
    """``gate_up within own_exp: 1.5 of 5 scaled ulp (elementwise 7), 3 of 4 flips a row``, for each budget."""
    told = []
    for spec in specs:
        if allowance := allowed.get(spec.name):
            rows, wrote, b = want[spec.name], got.outputs[spec.name], allowance.budget
            wrote = wrote[: len(rows)]
            scaled, plain = allowance.scaled(spec, rows, wrote).max(initial=0), scaled_ulp(rows, wrote, spec.dtype).max(initial=0)
            told.append(
                f"{spec.name} within {b.name}: {scaled:.3g} of {b.ulp:g} scaled ulp (elementwise {plain:.3g}), "
                f"{flips_a_row(spec, rows, wrote).max(initial=0)} of {b.flips} flips a row"
            )
    return "; ".join(told)


def other_modes(stage: Stage, problem: Problem) -> list[Problem]:
    """The same problem under each other named value of each mode (parametric ones, and those with other tensors, left out)."""
    found = []
    for name, values in stage.modes.items():
        for value in values:
            if re.fullmatch(r"\w+", value) and value != problem.mode(name):
                other = problem.with_mode(name, value)
                if stage.specs(other) == stage.specs(problem):
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
