"""The values: ids print and parse symmetrically, and a red row cannot hold a time."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.model import CaseId, Exact, Geometry, Inexact, Interval, Outcome, Problem, Source, Timing, preset

geometries = st.builds(
    lambda name, tp, changes: msgspec.structs.replace(preset(name, tp), **changes),
    st.sampled_from(["qwen36", "qwen3-next", "qwen3-30b"]),
    st.sampled_from([1, 2, 4]),
    st.dictionaries(st.sampled_from(["hidden", "experts", "inter"]), st.integers(16, 9999)),
)
words = st.from_regex(r"[a-z][a-z0-9_.]{0,12}", fullmatch=True)
case_ids = st.builds(
    lambda stage, g, capture, layer, start, rows, modes, seed: CaseId(
        Problem(stage, g, rows, tuple(sorted(modes.items()))), Source(capture, layer, start, rows), seed
    ),
    words, geometries, words, words, st.integers(0, 10**9), st.integers(1, 4096),
    st.dictionaries(words, words, max_size=4), st.integers(0, 2**31),
)  # fmt: skip


@given(case_ids)
def test_case_id_parses_what_it_prints(case: CaseId) -> None:
    """str and parse are inverse, whatever the parts."""
    assert CaseId.parse(str(case)) == case


def test_case_id_reads_as_documented() -> None:
    """The id that the documents show is one."""
    text = "moe.layer@qwen36:tp4/lab6/L9/r0+1;quant=recip_half_away#7"
    assert str(CaseId.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "moe.layer",
        "moe.layer@nope:tp4/a/L9/r0+1#7",
        "m@qwen36:tp3/a/L9/r0+1#7",
        "m@qwen36:tp4/a/L9/r0+1",
        "m@qwen36:tp4:inter=x/a/L9/r0+1#7",
        "m@qwen36:tp4:inter/a/L9/r0+1#7",
        "m@qwen36:tp4:top_k=300/a/L9/r0+1#7",
    ],
)
def test_bad_case_id_is_a_value_error(text: str) -> None:
    """Anything else is refused with what was expected."""
    with pytest.raises(ValueError, match="expected"):
        CaseId.parse(text)


def test_geometry_of_a_rank() -> None:
    """Qwen3.6 at TP4 has the sizes of the field's own notes."""
    g = preset("qwen36", 4)
    assert (g.hidden, g.experts, g.top_k, g.inter, g.k_heads, g.v_heads, g.vocab) == (2048, 256, 8, 128, 4, 8, 62_080)
    assert str(g) == "qwen36:tp4"
    assert Geometry.parse("qwen36:tp4:inter=320").inter == 320


def test_red_row_with_a_time_does_not_parse() -> None:
    """A FAIL that carries a timing is no value of the model."""
    timing = Timing(Interval(1.0, 1.0, 1.0), 30, 1, 1)
    green = msgspec.to_builtins(Exact("BITWISE", 4, timing))
    assert msgspec.convert(green, Outcome) == Exact("BITWISE", 4, timing)
    red = msgspec.to_builtins(Inexact("FAIL", 0, "row 0")) | {"timing": green["timing"]}
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert(red, Outcome)
