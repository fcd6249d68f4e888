"""Selecting rows: indices count the rows left by the filters, per layer; whatever matches nothing is an error."""

from pathlib import Path
from typing import Any

import pytest

from replay.captures import Select, cases, open_capture
from replay.captures.cases import find
from replay.captures.select import layer_label, parse_starts
from replay.errors import InputError
from replay.model import Case, Geometry, Problem
from tests.captures.test_routes import v1_record, write

GEOMETRY = Geometry.parse("qwen36:tp4:experts=8,top_k=2")


def posed(geometry: Geometry, rows: int) -> Problem:
    """A problem without modes."""
    return Problem("moe.route", geometry, rows, ())


def selected(path: Path, **select: Any) -> list[Case]:
    """The cases of a file."""
    return list(cases(open_capture(path), Select(**select), GEOMETRY, posed, 7))


@pytest.fixture
def routes(tmp_path: Path) -> Path:
    """Ten steps of layers 9 and 14; step s of layer 9 chose experts (s % 7, 7)."""
    records = []
    for step in range(10):
        records.append(v1_record(step=step, topk_ids=[[step % 7, 7]]))
        records.append(v1_record(step=step, layer="model.layers.14.mlp.experts", topk_ids=[[7, step % 7]]))
    return write(tmp_path / "r.jsonl", *records)


def test_start_indices_count_rows_per_layer(routes: Path) -> None:
    """The stop is exclusive, and each layer is counted on its own."""
    found = selected(routes, start_indices="1,4:8:2")
    assert [(c.id.source.layer, c.id.source.start) for c in found] == [
        ("L9", 1), ("L14", 1), ("L9", 4), ("L14", 4), ("L9", 6), ("L14", 6)
    ]  # fmt: skip
    assert found[2].routes.topk_ids == ((4, 7),)
    assert found[2].routes.topk_weights == ((0.75, 0.25),)


def test_windows_take_consecutive_rows(routes: Path) -> None:
    """A window of W is W token rows of one layer, and several sizes make several cases."""
    found = selected(routes, start_indices="3", windows=(1, 4), layer_regex=r"layers\.9\.")
    assert [c.routes.topk_ids for c in found] == [((3, 7),), ((3, 7), (4, 7), (5, 7), (6, 7))]


def test_default_is_sixteen_evenly_spaced(tmp_path: Path) -> None:
    """Without indices: the first, the last and fourteen between."""
    path = write(tmp_path / "r.jsonl", *[v1_record(step=s) for s in range(61)])
    assert [c.id.source.start for c in selected(path)] == list(range(0, 61, 4))
    assert [c.id.source.start for c in selected(path, max_cases=2)] == [0, 4]


def test_index_past_the_end_prints_the_rows(routes: Path) -> None:
    """No wrap-around: the error has each layer's rows and a value that works."""
    with pytest.raises(InputError, match=r"L9 10, L14 10; try 0:7.*got 8 \+ 4 on L9"):
        selected(routes, start_indices="8", windows=(4,))


@pytest.mark.parametrize("text", ["", "a", "1:", "1:2:0", "-1", "5:2", "1,,2"])
def test_bad_indices(text: str) -> None:
    """Anything but ints and ranges is refused."""
    with pytest.raises(ValueError, match="got"):
        parse_starts(text, 10, 1)


def test_patterns_that_match_nothing_name_what_there_is(routes: Path) -> None:
    """The names in the file are listed."""
    with pytest.raises(InputError, match=r"--route-layer-regex.*model\.layers\.14.*'layers.*3"):
        selected(routes, layer_regex=r"layers\.3\.")
    with pytest.raises(InputError, match=r"--route-stage-regex.*router.*'apply'"):
        selected(routes, stage_regex="apply")
    with pytest.raises(InputError, match="a regular expression"):
        selected(routes, layer_regex="(")
    with pytest.raises(InputError, match="token rows left to replay, got none"):
        selected(routes, min_num_tokens=2)


def test_one_stage_of_one_rank(tmp_path: Path) -> None:
    """Stages that repeat one another and ranks that record the same routes are replayed once."""
    records = [v1_record(stage=s, rank=r) for s in ("router", "modular_apply") for r in ("1", "0") for _ in range(3)]
    assert len(selected(write(tmp_path / "r.jsonl", *records), start_indices="0:3")) == 3


def test_each_layer_has_its_own_stage_and_rank(tmp_path: Path) -> None:
    """A layer that only another rank or stage recorded is still replayed, and a rank of 0 is a rank."""
    records = [v1_record(rank=r) for r in (0, 1, 0, 1)]
    records += [v1_record(layer="model.layers.30.mlp.experts", stage="modular_apply", rank=1)] * 2
    found = selected(write(tmp_path / "r.jsonl", *records), start_indices="0:2")
    assert [c.id.source.layer for c in found] == ["L9", "L9", "L30", "L30"]


def test_padding_rows_are_no_tokens(tmp_path: Path) -> None:
    """A row marked as padding is neither counted nor replayed."""
    ids = [[1, 2], [3, 4], [5, 6]]
    record = v1_record(num_tokens=3, topk_ids=ids, topk_weights=None, requests=None, padding=[False, True, False])
    found = selected(write(tmp_path / "r.jsonl", record), start_indices="0", windows=(2,))
    assert found[0].routes.topk_ids == ((1, 2), (5, 6))


def test_filters_can_leave_out_a_draft_model(tmp_path: Path) -> None:
    """Sizes are checked on the rows that are replayed, not on those a filter left out."""
    draft = v1_record(layer="mtp.layers.0.mlp.experts", num_experts=5)
    path = write(tmp_path / "r.jsonl", draft, v1_record())
    assert len(selected(path, layer_regex=r"^model\.layers", start_indices="0")) == 1


def test_a_range_of_billions_is_past_the_end(routes: Path) -> None:
    """It is told at once, not built."""
    with pytest.raises(InputError, match="L9 10, L14 10"):
        selected(routes, start_indices="0:99999999999")


def test_experts_of_another_model(routes: Path) -> None:
    """A capture whose experts are not the geometry's is refused at its line."""
    with pytest.raises(InputError, match=r"r\.jsonl:1: num_experts, top_k: expected 256, 8"):
        list(cases(open_capture(routes), Select(), Geometry.parse("qwen36:tp4"), posed, 7))


def test_find_brings_a_case_back(routes: Path) -> None:
    """The id of a case is enough to read its rows again."""
    for case in selected(routes, start_indices="2:5", windows=(1, 2)):
        assert find(open_capture(routes), case.id, Select()) == case


def test_layer_labels() -> None:
    """The main model's layers are short; a draft model's layer 0 is not taken for the main one."""
    assert layer_label("language_model.model.layers.9.mlp.experts") == "L9"
    assert layer_label("model.layers.14.mlp") == "L14"
    assert layer_label("mtp.layers.0.mlp.experts") == "mtp.layers.0.mlp.experts"
