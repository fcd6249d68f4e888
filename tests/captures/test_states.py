"""State captures: what is in them is checked, told in one line, and read back as it was written."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from replay.captures import Select, locate, open_capture
from replay.captures.generate_states import StateModel, draw_layer
from replay.captures.select import layer_label
from replay.captures.states import cases, check_capture, check_states, find, open_states
from replay.errors import InputError
from replay.model import Geometry, Problem, Sequence
from tests.conftest import Cli
from tests.gdn import SMALL, state_file


def posed(geometry: Geometry, rows: int) -> Problem:
    """A problem of so many rows."""
    return Problem("gdn.step", geometry, rows, ())


def changed(name: str, **at: object) -> dict[str, np.ndarray]:
    """A generated tensor with one element set: ``where`` → ``value``."""
    array = draw_layer(StateModel(sequences=5, steps=4), 0, SMALL)[name].copy()
    array[at["where"]] = at["value"]
    return {name: array}


def test_other_readers_read_it(tmp_path: Path) -> None:
    """safetensors' own reader gives the tensors that ours does."""
    from safetensors.torch import load_file

    path = state_file(tmp_path)
    ours, theirs = open_states(path), load_file(str(path))
    assert set(theirs) == set(ours.entries)
    assert np.array_equal(theirs["ssm_state"].numpy(), ours.tensor("ssm_state"))
    assert theirs["qkvz"].view(dtype=__import__("torch").uint16).numpy().tolist() == ours.tensor("qkvz").tolist()


def test_a_generated_capture_is_made_where_it_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The shipped one holds a manifest; its files come from the seed into the cache, and have the sha256 it states."""
    monkeypatch.setenv("B70_CACHE", str(tmp_path))
    capture = open_capture(locate("qwen36-states-generated"))
    assert capture.holds == "states"
    assert [f.is_relative_to(tmp_path) for f in capture.files] == [True, True]
    file = open_states(capture.files[0])
    assert capture.manifest is not None
    check_states(file, capture.manifest.geometry)
    assert 12 < np.abs(file.tensor("ssm_state")).max() < 18
    assert file.caches["ssm_state"].stride == (131072, 16384, 128, 1)


def test_cases_are_sequences_of_one_token(tmp_path: Path) -> None:
    """Rows with states make windows in order; padding has its place and no state; an id finds its case again."""
    slots = np.arange(20, dtype=np.int32) % 5
    slots[1] = -1
    capture = open_capture(state_file(tmp_path, slot=slots))
    found = list(cases(capture, Select(windows=(2,), start_indices="0,3"), SMALL, posed, 7))
    assert [c.states.sequences for c in found] == [
        (Sequence(0, (0,)), Sequence(-1, (1,))), (Sequence(3, (3,)), Sequence(4, (4,))),
    ]  # fmt: skip
    assert find(capture, found[1].id) == found[1]
    with pytest.raises(InputError, match="rows with states"):
        list(cases(capture, Select(start_indices="5"), SMALL, posed, 7))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (changed("ssm_state", where=(3, 1, 2, 0), value=np.nan), r"ssm_state\[3, 1, 2, 0\]: expected a finite number"),
        (changed("qkvz", where=(7, 9), value=0x7F80), r"qkvz\[7, 9\]: expected a finite number"),
        (changed("slot", where=3, value=1), r"slot\[3\]: expected a slot of its own at step 0, got 1, which row 1 has \(sequences 1 and 3\)"),
        (changed("slot", where=2, value=-3), r"slot\[2\]: expected −1 or more, got -3"),
        (changed("state_row", where=0, value=5), r"state_row\[0\]: expected −1 ≤ row < 5, got 5"),
        ({"dt_bias": np.zeros(4, np.uint16)}, r"dt_bias: expected f32 \(mode dt_bias=f32\), got bf16"),
        ({"dt_bias": np.zeros(4, np.float32), "modes": {"dt_bias": "bf16"}}, r"expected bf16 \(mode dt_bias=bf16\), got f32"),
        ({"conv_bias": np.zeros(512, np.uint16)}, r"conv_bias: expected what mode conv_bias=off says, got a tensor"),
        ({"modes": {"conv_bias": "bias_last"}}, r"conv_bias: expected what mode conv_bias=bias_last says, got none"),
        ({"A_log": np.zeros(3, np.float32)}, r"A_log: expected shape \(4,\)"),
    ],
    ids=lambda c: next(iter(c)) if isinstance(c, dict) else "",
)  # fmt: skip
def test_what_is_wrong_is_told_in_one_line(change: dict[str, np.ndarray], told: str, tmp_path: Path) -> None:
    """Tensor and row, expected, got."""
    file = open_states(state_file(tmp_path, **change))
    with pytest.raises(InputError, match=told) as caught:
        check_states(file, SMALL)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda data: data[:4], "a safetensors file"),
        (lambda data: b"\xff" * 16 + data, "a header of"),
        (lambda data: data.replace(b"b70-state/1", b"b70-state/9"), "expected b70-state/1, got b70-state/9"),
        (lambda data: data.replace(b'"F32"', b'"F64"', 1), "expected one of BF16, F16, F32, I32, got F64"),
        (lambda data: data[:-100], "a gap or an overlap"),
        (lambda data: data + bytes(8), "a gap or an overlap"),
        (lambda data: data.replace(b'"shape":[20],', b'"shape":[-9],', 1), "sizes of 0 or more"),
        (lambda data: data.replace(b'"shape":[20],', b'"shape":[]  ,', 1), "one of them for an index"),
    ],
)  # fmt: skip
def test_a_file_that_is_none(edit: object, told: str, tmp_path: Path) -> None:
    """Cut, foreign or of another form: one line."""
    path = state_file(tmp_path)
    path.write_bytes(edit(path.read_bytes()))  # type: ignore[operator]  # one of the lambdas above
    with pytest.raises(InputError, match=told):
        open_states(path)


def test_two_files_of_one_layer(tmp_path: Path) -> None:
    """A case id holds the layer's name alone: two files may not share it."""
    capture = open_capture(state_file(tmp_path))
    twice = dataclasses.replace(capture, files=capture.files * 2)
    with pytest.raises(InputError, match=r"layer: expected another than layer-0\.safetensors has"):
        check_capture(twice, SMALL)


def test_names_of_layers() -> None:
    """The layer's number, or the name as it is."""
    assert layer_label("model.layers.21.linear_attn") == "L21"
    assert layer_label("draft/gdn") == "draft_gdn"
    assert layer_label("mtp.layers.0.linear_attn") == "mtp.layers.0.linear_attn"


def test_a_mode_that_no_stage_has_is_refused(tmp_path: Path, cli: Cli) -> None:
    """A tag that nothing looks at would be a promise that nobody keeps."""
    file = state_file(tmp_path, modes={"l2norm_mode": "eps_out"})
    done = cli("--state", file)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{file}: mode name: expected one of batch, conv_bias, ")
    assert done.stderr.endswith("got 'l2norm_mode'\n")


def test_the_manifest_is_small() -> None:
    """What travels with the package is a description, not megabytes."""
    folder = locate("qwen36-states-generated")
    assert [p.name for p in folder.iterdir()] == ["manifest.json"]
    assert json.loads((folder / "manifest.json").read_text())["origin"] == "generated"
