"""Random cases of selection in named strata: rows of every kind, lengths, several tokens a sequence, k to 2048."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from replay.oracle.arith import rn_bf16
from replay.stages import STAGES
from tests.fuzz.strata import Choices, Drawn
from tests.topk import logit_case

TOPK = tuple(name for name in STAGES if name.startswith("topk."))
KINDS = ("plain", "ties", "nan", "all nan", "infinities", "zeros", "equal", "narrow", "rising")
WANTED = (*KINDS[1:], "bf16", "f32", "one row", "64 rows", "one column", "odd size")
ROWS = ("shard", "next_n", "k=1", "k over 64", "k over all")
ROUTER = ("bias", "padding", "renormalize")


def draw(choices: Choices, stage: str) -> Drawn:
    """One random case of a stage; its rows' kinds are among the strata."""
    sizes = (256, 257, 1000) if stage == "topk.router" else (1, 2, 8, 31, 64, 100, 257, 1000, 1024, 9000)
    rows, vocab = choices.pick((1, 1, 2, 3, 4, 6, 12, 64)), choices.pick(sizes)
    if rows == 64:
        vocab = min(vocab, 257)
    seed = choices.integer(0, 1 << 30)
    x, kinds = drawn_rows(np.random.default_rng(seed), rows, vocab)
    bf16 = choices.chance(0.5)
    modes = {}
    if stage == "topk.rows":
        if vocab % 2 == 0 and choices.chance(0.3):
            modes["shard"] = choices.pick(("0/2", "1/2"))
        modes["k"] = str(choices.pick((1, 5, 20, 64, 65, 200, 2048)))
        modes["next_n"] = str(choices.pick([n for n in (1, 1, 2, 3) if rows % n == 0]))
    elif stage == "topk.greedy":
        modes["index"] = choices.pick(("i64", "i32"))
    else:
        modes |= {name: choices.pick(("on", "off")) for name in ROUTER}
    case = logit_case(stage, _folder(), rn_bf16(x) if bf16 else x, **modes)
    k = int(modes.get("k", 0))
    strata = {
        "bf16": bf16, "f32": not bf16, "one row": rows == 1, "64 rows": rows == 64, "one column": vocab == 1,
        "odd size": vocab % 16 != 0, "shard": "shard" in modes, "next_n": modes.get("next_n", "1") != "1", "k=1": k == 1,
        "k over 64": k > 64, "k over all": k > vocab, **{name: modes.get(name) == "on" for name in ROUTER},
    }  # fmt: skip
    return Drawn(case, "lengths", frozenset(kinds) | {name for name, holds in strata.items() if holds})


def drawn_rows(rng: np.random.Generator, rows: int, vocab: int) -> tuple[np.ndarray, list[str]]:
    """f32 rows of every kind, and the kind of each."""
    kinds = rng.choice(KINDS, rows).tolist()
    x = rng.standard_normal((rows, vocab), np.float32) * np.float32(3)
    for row, kind in zip(x, kinds, strict=True):
        some = rng.random(vocab) < 0.1
        if kind == "ties":
            row[:] = np.round(row)
        elif kind in ("nan", "all nan"):
            row[some if kind == "nan" else slice(None)] = np.nan
        elif kind == "infinities":
            row[some] = np.where(rng.random(int(some.sum())) < 0.5, np.inf, -np.inf)
        elif kind == "zeros":
            row[:] = np.where(some, np.where(rng.random(vocab) < 0.5, 0.0, -0.0), -np.abs(row) - 1)
        elif kind == "equal":
            row[:] = row[0]
        elif kind == "narrow":
            row[:] = (rng.integers(0, 1024, vocab, np.uint32) + np.uint32(0x3F800000)).view(np.float32)
        elif kind == "rising":
            row.sort()
    return x, kinds


@functools.cache
def _held() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="b70-fuzz-")


def _folder() -> Path:
    return Path(_held().name)


def special(inputs: dict[str, Any], values: str) -> dict[str, Any]:
    """The inputs with lengths of every size, where there are lengths."""
    if "seq_lens" not in inputs:
        return inputs
    lengths = inputs["seq_lens"]
    rng = np.random.default_rng(len(lengths) + int(lengths[0]))
    return inputs | {"seq_lens": np.where(rng.random(len(lengths)) < 0.5, rng.integers(0, lengths + 2), lengths).astype(np.int32)}


def wanted(stage: str) -> tuple[str, ...]:
    """The strata that a stage's cases can be of."""
    if stage == "topk.router":
        return (*(name for name in WANTED if name not in ("one column", "odd size")), *ROUTER)
    return WANTED + (ROWS if stage == "topk.rows" else ())
