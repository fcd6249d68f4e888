"""What GDN tests share: small state files, cases of them, and batches with every edge in one."""

from pathlib import Path
from typing import Any

from replay.captures.generate_states import StateModel, draw_layer, save
from replay.model import Case, CaseId, Geometry, Sequence, Source, States
from replay.stages import STAGES, problem_for

SMALL = Geometry.parse("qwen36:tp4:head_dim=64,k_heads=2,v_heads=4")
# One token, padding with a token, three tokens, no token, padding without one, one token: nine rows of six sequences.
EDGES = (
    Sequence(0, (0,)), Sequence(-1, (1,)), Sequence(2, (2, 3, 4)), Sequence(3, ()), Sequence(-1, ()), Sequence(4, (5,)),
)  # fmt: skip


def state_file(folder: Path, geometry: Geometry = SMALL, sequences: int = 5, steps: int = 4, **change: Any) -> Path:
    """A generated state file of one layer; ``change``: tensor → what it becomes, or ``modes``."""
    modes = change.pop("modes", {})
    tensors = draw_layer(StateModel(sequences=sequences, steps=steps), 0, geometry) | change
    path = folder / "layer-0.safetensors"
    save(path, 0, tensors, modes)
    return path


def state_case(
    stage: str, file: Path, geometry: Geometry = SMALL, sequences: tuple[Sequence, ...] | int = 5, **modes: str
) -> Case:
    """A case of a file's first sequences, one token each, or of those that are given."""
    chosen = tuple(Sequence(i, (i,)) for i in range(sequences)) if isinstance(sequences, int) else sequences
    rows = sum(len(s.tokens) for s in chosen)
    batch = {} if len(chosen) == rows else {"batch": str(len(chosen))}
    known = {name: value for name, value in modes.items() if name in STAGES[stage].modes}
    problem = problem_for(STAGES[stage], geometry, rows, known | batch)
    return Case(CaseId(problem, Source("drawn", "L0", 0, rows), 7), States(str(file), chosen))
