"""Random GDN cases in named strata: sequences of any length, padding, every mode, states of every dtype."""

import functools
import tempfile
from pathlib import Path
from typing import Any

from replay.model import Geometry, Sequence
from replay.stages import STAGES
from tests.fuzz.strata import Choices, Drawn, altered
from tests.gdn import state_case, state_file

GDN = tuple(name for name in STAGES if name.startswith("gdn."))
VALUES = ("normal", "normal", "tiny", "huge", "zero rows")
LENGTHS = (0, 1, 1, 1, 2, 3, 4)
HELD = 5  # sequences that a state file has states of
WANTED = (
    "padding", "all padding", "no token", "several tokens", "ratio 1", "odd ratio", "interleaved", "biased", "wide slots", "two taps",
    "dim 128", "tiny", "huge", "zero rows",
)  # fmt: skip
RECURRENT = ("bf16 state", "f16 state", "k_v", "bf16 dt_bias", "eps_out")


def draw(choices: Choices, stage: str) -> Drawn:
    """One random case of a stage."""
    k_heads, ratio = choices.pick((1, 2, 3)), choices.pick((1, 2, 3, 4, 8))
    dim, width = choices.pick((64, 64, 64, 128)), choices.pick((2, 3, 4, 5))
    sizes = f"head_dim={dim},k_heads={k_heads},v_heads={k_heads * ratio},conv_width={width}"
    geometry = Geometry.parse(f"qwen36:tp4:{sizes}")
    padding = choices.pick((0.0, 0.0, 0.0, 0.3, 0.3, 1.0))
    owners = list(range(HELD))
    sequences, row = [], 0
    for _ in range(choices.integer(1, HELD)):
        length = choices.pick(LENGTHS)
        state = -1 if choices.chance(padding) else owners.pop(choices.integer(0, len(owners) - 1))
        sequences.append(Sequence(state, tuple(range(row, row + length))))
        row += length
    if not row:
        sequences.append(Sequence(-1, (0,)))
    modes = {
        n: choices.pick([v for v in values if v.isidentifier()]) for n, values in STAGES[stage].modes.items() if n != "batch"
    }
    slot = {"conv_slot_stride": geometry.conv_dim * (width - 1), "ssm_slot_stride": k_heads * ratio * dim * dim}
    wide = choices.chance(0.3)
    modes |= {name: str(least + 40) for name, least in slot.items() if wide and name in modes}
    case = state_case(stage, _file(str(geometry)), geometry, tuple(sequences), **modes)
    values = choices.pick(VALUES)
    live = [s for s in sequences if s.state >= 0]
    strata = {
        "padding": any(s.state < 0 for s in sequences), "all padding": not live, "no token": any(not s.tokens for s in live),
        "several tokens": any(len(s.tokens) > 1 for s in live), "ratio 1": ratio == 1, "odd ratio": ratio == 3,
        "interleaved": modes.get("reorder_input") == "interleaved", "biased": modes.get("conv_bias", "off") != "off",
        "wide slots": wide, "two taps": width == 2, "dim 128": dim == 128, values: True,
        f"{modes.get('ssm_state')} state": True, "k_v": modes.get("state_layout") == "k_v",
        "bf16 dt_bias": modes.get("dt_bias") == "bf16", "eps_out": modes.get("l2norm") == "eps_out",
    }  # fmt: skip
    return Drawn(case, values, frozenset(name for name, holds in strata.items() if holds))


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="b70-fuzz-")


@functools.cache
def _file(geometry: str) -> Path:
    folder = Path(_folder().name) / geometry.replace(":", "_")
    return state_file(folder, Geometry.parse(geometry), sequences=HELD, steps=5)


def special(inputs: dict[str, Any], values: str) -> dict[str, Any]:
    """The inputs with what was projected changed as ``values`` says."""
    return inputs | {n: altered(inputs[n], values) for n in ("qkvz", "qkv", "ba", "a", "b") if n in inputs}


def wanted(stage: str) -> tuple[str, ...]:
    """The strata that a stage's cases can be of."""
    conv, recurrent = ("interleaved", "biased", "two taps"), stage != "gdn.conv"
    return tuple(name for name in WANTED if stage != "gdn.recurrent" or name not in conv) + (RECURRENT if recurrent else ())
