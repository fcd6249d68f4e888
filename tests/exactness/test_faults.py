"""Every planted fault turns its line red, with row, token and expert named, and the mode that would have matched."""

from pathlib import Path

import pytest

from replay.model import Exact, Geometry, Inexact
from replay.stages import STAGES
from tests import faulty
from tests.conftest import judge_here, make_case

FAULTY = str(Path(faulty.__file__))
WIDE = Geometry.parse("qwen36:tp4:hidden=2048,experts=16,top_k=4,inter=256")


@pytest.mark.parametrize("stage", list(faulty.OUTPUT))
@pytest.mark.parametrize("fault", ["flip", "swap", "drop"])
def test_wrong_rows_are_named(stage: str, fault: str) -> None:
    """One flipped bit, two swapped rows, one row not written."""
    outcome = judge_here(f"faulty:{stage}:{fault}", make_case(stage), FAULTY)
    assert isinstance(outcome, Inexact)
    assert outcome.status == "FAIL"
    assert f"row {outcome.row} (" in outcome.detail
    assert f"of {faulty.OUTPUT[stage]}" in outcome.detail
    told = {"moe": ("token", "expert"), "gdn": ("token", "sequence"), "topk": ("captured row",)}[stage.partition(".")[0]]
    assert all(word in outcome.detail for word in told)


@pytest.mark.parametrize("stage", list(faulty.OUTPUT))
def test_trespasses_are_named(stage: str) -> None:
    """A write behind an output, and a changed input, are a FAIL even where the output is right."""
    scribbled = judge_here(f"faulty:{stage}:scribble", make_case(stage), FAULTY)
    assert isinstance(scribbled, Inexact)
    assert f"wrote outside {faulty.OUTPUT[stage]}" in scribbled.detail
    mutated = judge_here(f"faulty:{stage}:mutate", make_case(stage), FAULTY)
    assert isinstance(mutated, Inexact)
    assert "changed its input" in mutated.detail


@pytest.mark.parametrize("stage", list(faulty.OUTPUT))
def test_a_stride_that_is_not_looked_at_is_named(stage: str) -> None:
    """Right on contiguous inputs, wrong where rows lie further apart: red at its row, and green where it is declared."""
    outcome = judge_here(f"faulty:{stage}:dense", make_case(stage, tokens=4), FAULTY)
    assert isinstance(outcome, Inexact)
    assert outcome.detail.startswith("on strided inputs (a kernel that takes contiguous ones only declares layouts=")
    assert f"row {outcome.row} (" in outcome.detail
    declared = judge_here(f"faulty:{stage}:dense-declared", make_case(stage, tokens=4), FAULTY)
    assert isinstance(declared, Exact), declared


MODES = [
    (stage.name, mode, value)
    for stage in STAGES.values()
    for mode, values in stage.modes.items()
    for value in values[1:]
    # Those left out change the tensors that there are, or need a padding row to show.
    if mode not in ("bias", "shared", "conv_bias", "ssm_state", "dt_bias", "padding_z", "index", "logits", "padding")
    and value.replace("_", "").isalnum()
    and value != "bf16"
]


@pytest.mark.parametrize(("stage", "mode", "value"), MODES)
def test_the_mode_that_matches_is_told(stage: str, mode: str, value: str) -> None:
    """A kernel of another mode fails, and the line says which mode it is. Rare differences get the rows to show."""
    for seed in range(6):
        case = make_case(stage, WIDE, tokens=160 if mode in ("epilogue", "quant") else 32, seed=seed)
        outcome = judge_here(f"faulty:{stage}:{mode}-{value}", case, FAULTY)
        if isinstance(outcome, Inexact):
            told = outcome.detail.partition(f"matches mode {mode}=")[2].partition(
                f", asked {mode}={STAGES[stage].modes[mode][0]}"
            )[0]
            assert value in told.split(" or ")
            return
    pytest.fail(f"{value} never differed from the default in 6 cases")


@pytest.mark.parametrize(("stage", "mode", "value"), MODES)
def test_the_right_mode_is_green(stage: str, mode: str, value: str) -> None:
    """Asked for in the case, the same mode is BITWISE."""
    assert isinstance(judge_here(f"eager:{stage}", make_case(stage, tokens=5, **{mode: value})), Exact)
