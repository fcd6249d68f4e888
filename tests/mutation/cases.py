"""The cases that mutants are put to: drawn ones of every stratum, and the edges that no draw would meet."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from replay.model import Case
from replay.oracle.arith import rn_bf16
from replay.session.arms import Arms
from tests.conftest import SMALL, make_case
from tests.fuzz.strata import Random, draw, special

Chosen = Iterator[tuple[Case, dict[str, Any]]]


def chosen(arms: Arms, stage: str, count: int) -> Chosen:
    """(case, inputs) of one stage; the arms are left at the case, so that its kernels can be run."""
    choices = Random(np.random.Generator(np.random.Philox(key=[5, sum(map(ord, stage))])))
    for _ in range(count):
        drawn = draw(choices, stage)
        yield drawn.case, special(arms.begin(drawn.case), drawn.values)
    yield from _edges(arms, stage)


def _edges(arms: Arms, stage: str) -> Chosen:
    if stage == "moe.quantize":
        yield from _rows(arms)
    if stage == "moe.act_quant":
        yield from _gates(arms)
    if stage in ("moe.gemm1", "moe.gemm2"):
        yield from _sums(arms, stage)


def _rows(arms: Arms) -> Chosen:
    """Rows with NaN, inf or nothing, of the smallest numbers, of ties between codes, and of the largest code."""
    for quant in ("recip_half_away", "recip_half_even", "div_half_even", "rmsnorm_int8", "group_trunc:16"):
        case = make_case("moe.quantize", SMALL, tokens=10, quant=quant)
        inputs = dict(arms.begin(case))
        x = np.array(inputs["x"])
        x[0, 3], x[1, 5], x[2, 7] = 0x7FC0, 0x7F80, 0xFF80
        x[3, 1], x[3, 2] = 0x7F80, 0x7FC0
        x[4] = 0
        x[5] = np.arange(SMALL.hidden) | np.where(np.arange(SMALL.hidden) % 3, 0, 0x8000)  # denormals of both signs
        x[6] = rn_bf16((np.arange(SMALL.hidden, dtype=np.float32) - 32) + np.float32(0.5))
        x[6, 0] = rn_bf16(np.array([127], np.float32))[0]  # scale 1: every other value is a tie
        x[7] = rn_bf16(np.full(SMALL.hidden, -1e-12, np.float32))  # below the least m
        x[8, :2] = 0xFF7F, 0x7F7F
        yield case, inputs | {"x": x}


def _gates(arms: Arms) -> Chosen:
    """Every bf16 gate, finite or not, with ups of several sizes."""
    for act in ("silu_round_twice", "silu_round_once", "silu_f32"):
        case = make_case("moe.act_quant", msgspec.structs.replace(SMALL, inter=256), tokens=64, act=act)
        inputs = dict(arms.begin(case))
        gates = np.arange(65536, dtype=np.uint16).reshape(256, 256)
        for up in (1.0, -0.3, 3e30):
            ups = np.full((256, 256), rn_bf16(np.array([up], np.float32))[0])
            yield case, inputs | {"gate_up": np.concatenate([gates, ups], axis=1)}


def _sums(arms: Arms, stage: str) -> Chosen:
    """Sums past 2^24, where an f32 is no longer every integer: the largest codes, and others that leave an odd sum."""
    geometry = msgspec.structs.replace(SMALL, hidden=2085, inter=2085, experts=2, top_k=1)
    for epilogue in ("row_then_col", "scales_first"):
        case = make_case(stage, geometry, tokens=3, epilogue=epilogue)
        inputs = dict(arms.begin(case))
        name = "a" if stage == "moe.gemm1" else "h"
        codes = np.full(inputs[name].shape, -128, np.int8)
        codes[:, ::7] = 127
        yield case, inputs | {name: codes}
