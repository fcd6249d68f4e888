"""The shipped sample: made by its seed, described by its manifest, and like the lab's file where that matters."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from replay.captures import open_capture, read_batches
from replay.captures.describe import gini, overlap, repeat_rate, summarise
from replay.captures.generate import RouterModel, generate
from replay.captures.manifest import MANIFEST
from replay.data import path as data_path
from replay.errors import InputError
from replay.model import preset
from tests.conftest import LAB_ROUTES, needs_lab

SHIPPED = data_path("captures", "qwen36-generated")
Rows = dict[str, list[tuple[int, ...]]]


def rows_of(path: Path) -> Rows:
    """Token rows per layer."""
    found: Rows = {}
    for batch in read_batches(path):
        assert batch.topk_ids is not None
        for layer, ids in zip(batch.layers, batch.topk_ids, strict=True):
            found.setdefault(layer, []).extend(tuple(row) for row in ids.tolist())
    return found


def test_shipped_sample_is_what_its_seed_makes(tmp_path: Path) -> None:
    """`make captures` gives the bytes in the repository."""
    generate(tmp_path, "qwen36-generated", preset("qwen36", 4), RouterModel())
    for name in ("routes.jsonl", MANIFEST):
        assert (tmp_path / name).read_bytes() == (SHIPPED / name).read_bytes()


def test_manifest_says_generated() -> None:
    """Nobody can take the sample for a recording."""
    capture = open_capture(SHIPPED)
    assert capture.manifest is not None
    assert capture.manifest.origin == "generated"
    assert capture.name == "qwen36-generated"


def skew(rows: list[tuple[int, ...]]) -> float:
    """Gini coefficient over 256 experts."""
    return gini(np.bincount(np.ravel(rows), minlength=256))


@needs_lab
@pytest.mark.parametrize("figure", [skew, repeat_rate, overlap])
def test_sample_is_like_the_labs_routes(figure: Callable[[list[tuple[int, ...]]], float]) -> None:
    """Expert skew, repeat rate and overlap of neighbours are within 10 % of the lab's, mean over layers."""
    ours, labs = (float(np.mean([figure(rows) for rows in rows_of(p).values()])) for p in (SHIPPED / "routes.jsonl", LAB_ROUTES))
    assert ours == pytest.approx(labs, rel=0.1)


@needs_lab
def test_lab_overlap_is_the_published_one() -> None:
    """2.89 of 8 on layer 9: the figure that the definition must reproduce."""
    assert overlap(rows_of(LAB_ROUTES)["language_model.model.layers.9.mlp.experts"]) == pytest.approx(2.89, abs=0.005)


def test_summary_counts_what_the_plain_functions_count() -> None:
    """The streaming figures of inspect agree with the definitions."""
    rows = rows_of(SHIPPED / "routes.jsonl")["language_model.model.layers.9.mlp.experts"]
    figures = summarise(open_capture(SHIPPED))["L9", "router", "0"].figures()
    assert [figures[4], *figures[6:]] == [f"{skew(rows):.3f}", f"{repeat_rate(rows):.3f}", f"{overlap(rows):.2f}"]
    assert figures[5] == str(len({frozenset(row) for row in rows}))


def test_manifest_guards_its_files(tmp_path: Path) -> None:
    """A changed byte, a missing file, a path outside, a manifest of another form: each is refused by name."""
    manifest = generate(tmp_path, "x", preset("qwen36", 4), RouterModel(tokens=4, layers=(9,)))
    routes = tmp_path / "routes.jsonl"
    text = routes.read_bytes()
    routes.write_bytes(text.replace(b"decode", b"Decode", 1))
    with pytest.raises(InputError, match="sha256: expected"):
        open_capture(tmp_path)
    routes.write_bytes(text + b"\n")
    with pytest.raises(InputError, match="bytes: expected"):
        open_capture(routes)
    routes.unlink()
    with pytest.raises(InputError, match="no such file"):
        open_capture(tmp_path)
    outside = msgspec.structs.replace(manifest, files=[msgspec.structs.replace(manifest.files[0], path="../x")])
    (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(outside))
    with pytest.raises(InputError, match="inside the folder"):
        open_capture(tmp_path)
    (tmp_path / MANIFEST).write_bytes(b'{"form": "b70-capture/2"}')
    with pytest.raises(InputError, match="form b70-capture/1"):
        open_capture(tmp_path)
    for geometry, told in (
        ({"preset": "nope"}, "geometry: preset 'nope': expected one of qwen36"),
        ({"tp": 0}, "geometry: tp: expected a positive number, got 0"),
        ({"inter": 0}, "geometry: inter: expected 1 or more, got 0"),
    ):
        odd = msgspec.structs.replace(manifest, geometry=msgspec.structs.replace(manifest.geometry, **geometry))
        (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(odd))
        with pytest.raises(InputError, match=told):
            open_capture(tmp_path)
