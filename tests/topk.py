"""What tests of selection share: small logit files, cases of them, and rows with every edge."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.captures.generate_logits import save
from replay.model import Case, CaseId, Geometry, Logits, Source
from replay.stages import STAGES, problem_for


def logit_case(stage: str, folder: Path, rows: NDArray[Any], **modes: str) -> Case:
    """A case of all these rows, f32 or bf16 bits [rows, vocab], in their dtype; what a capture would refuse is taken."""
    path = folder / f"{hashlib.sha256(rows.tobytes()).hexdigest()[:16]}.safetensors"
    modes = {"logits": "bf16" if rows.dtype == np.uint16 else "f32"} | modes
    save(path, "lm_head", rows, len(rows))
    geometry = Geometry.parse(f"qwen36:tp1:vocab={rows.shape[1]}")
    problem = problem_for(STAGES[stage], geometry, len(rows), modes)
    return Case(CaseId(problem, Source("drawn", "lm_head", 0, len(rows)), 7), Logits(str(path), tuple(range(len(rows)))))


def edges(vocab: int, seed: int = 0) -> NDArray[np.float32]:
    """Twelve rows: numbers; ties; one NaN; a NaN of the other sign; NaN alone; infinities; −inf alone but for NaN; both zeros;
    all equal; low bits alone; few winners and zeros; denormals."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((12, vocab)).astype(np.float32)
    x[1] = np.round(x[1])
    x[2, vocab // 2] = np.nan
    x[3, vocab - 1] = np.uint32(0xFFC00000).view(np.float32)
    x[4] = np.nan
    x[5, [0, vocab // 3, vocab - 1]] = np.inf, -np.inf, np.inf
    x[6] = np.where(np.arange(vocab) % 2, -np.inf, np.nan)
    x[7] = np.where(rng.random(vocab) < 0.5, -0.0, 0.0)
    x[8] = 1.5
    x[9] = (rng.integers(0, 1024, vocab, np.uint32) + np.uint32(0x3F800000)).view(np.float32)
    x[10] = np.where(np.arange(vocab) % 83, 0.0, 1 + rng.random(vocab))
    x[11] = (rng.integers(0, 1 << 23, vocab, np.uint32) | (rng.integers(0, 2, vocab, np.uint32) << 31)).view(np.float32)
    return x
