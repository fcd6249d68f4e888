"""What can be replayed: the stages by name, and the problem a stage makes of a geometry and modes."""

import functools
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from replay.errors import InputError
from replay.model import Geometry, Problem
from replay.stages.gdn import STAGES as _GDN
from replay.stages.moe import STAGES as _MOE
from replay.stages.router import STAGES as _ROUTER
from replay.stages.stage import COUNT, Stage
from replay.stages.topk import STAGES as _TOPK

STAGES: dict[str, Stage] = {stage.name: stage for stage in (*_MOE, *_GDN, *_TOPK, *_ROUTER)}


def matching(globs: Iterable[str]) -> list[Stage]:
    """The stages whose name matches any glob, in the order of the pipeline; InputError for a glob that matches none."""
    globs = list(globs)
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in STAGES):
            raise InputError("--stage", "name", f"one of {', '.join(STAGES)}", repr(glob))
    return [s for s in STAGES.values() if any(fnmatchcase(s.name, g) for g in globs)]


def shown(value: str) -> str:
    """A value of a mode as a user reads it: N for a number."""
    return functools.reduce(lambda text, number: text.replace(number, "N"), (f"(0|{COUNT})", COUNT, r"\d+"), value)


def problem_for(stage: Stage, geometry: Geometry, rows: int, chosen: Mapping[str, str]) -> Problem:
    """The problem of one stage: its default modes, with those in ``chosen`` that it has. InputError for a bad value."""
    modes = []
    for name, values in stage.modes.items():
        value = chosen.get(name, values[0])
        if not any(re.fullmatch(pattern, value) for pattern in values):
            raise InputError("--mode", f"{name} of {stage.name}", f"one of {', '.join(map(shown, values))}", repr(value))
        modes.append((name, value))
    problem = Problem(stage.name, geometry, rows, tuple(sorted(modes)))
    stage.check(problem)
    return problem


def check_modes(stages: list[Stage], chosen: Mapping[str, str], where: str = "--mode") -> None:
    """InputError for a mode that none of the stages has; ``where`` it was asked for."""
    known = sorted({name for stage in stages for name in stage.modes})
    for name in chosen:
        if name not in known:
            field = "name" if where == "--mode" else "mode name"
            raise InputError(where, field, f"one of {', '.join(known) or 'none for these stages'}", repr(name))
