"""The sidecar of a route file: the same cases with it and without, and what it refuses."""

from pathlib import Path

import pytest

from replay.captures import Select, cases, open_capture
from replay.captures.cases import shape_hits
from replay.captures.index import build, load, sidecar
from replay.errors import InputError
from replay.model import Case, Geometry, Problem, preset
from tests.conftest import LAB_ROUTES, ROOT, needs_lab

TINY = ROOT / "captures" / "tiny-moe-256" / "routes.jsonl"


def picked(path: Path, geometry: Geometry, **select: object) -> list[Case]:
    """The cases of a selection."""
    chosen = Select(**select)  # type: ignore[arg-type]  # each field gets its own type
    return list(cases(open_capture(path), chosen, geometry, lambda g, rows: Problem("moe.layer", g, rows, ()), 7))


SELECTIONS = [
    {}, {"windows": (1, 4)}, {"start_indices": "0,5:40:7", "windows": (3,)}, {"layer_regex": r"layers\.[12]\."}, {"max_cases": 2},
]  # fmt: skip


@pytest.mark.parametrize("select", SELECTIONS, ids=str)
def test_the_same_cases(select: dict[str, object], tmp_path: Path) -> None:
    """Row for row, as a reading of the whole file gives them."""
    path = tmp_path / "routes.jsonl"
    lines = TINY.read_bytes().splitlines(keepends=True)[:300]
    path.write_bytes(b"".join(lines))
    geometry = preset("tiny-moe-256", 1)
    without = sorted(picked(path, geometry, **select), key=lambda c: str(c.id))
    build(open_capture(path))
    assert load(open_capture(path)) is not None
    assert sorted(picked(path, geometry, **select), key=lambda c: str(c.id)) == without


@needs_lab
def test_of_the_labs_form(tmp_path: Path) -> None:
    """Several layers and stages, and calls of several tokens with padding among them."""
    path = tmp_path / "routes.jsonl"
    path.write_bytes(LAB_ROUTES.read_bytes())
    geometry, select = preset("qwen36", 4), {"windows": (1, 8), "min_num_tokens": 1}
    without = sorted(picked(path, geometry, **select), key=lambda c: str(c.id))
    build(open_capture(path))
    assert sorted(picked(path, geometry, **select), key=lambda c: str(c.id)) == without
    assert shape_hits(open_capture(path), Select(), geometry)


def test_what_it_refuses(tmp_path: Path) -> None:
    """A file that changed, an index that is none, a start past the end, and a compressed file."""
    path = tmp_path / "routes.jsonl"
    lines = TINY.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:30]))
    build(open_capture(path))
    with pytest.raises(InputError, match="start \\+ window"):
        picked(path, preset("tiny-moe-256", 1), start_indices="50")
    with pytest.raises(InputError, match="num_experts, top_k: expected 512, 10"):
        picked(path, preset("qwen3-next", 1))
    path.write_bytes(b"".join(lines[:31]))
    with pytest.raises(InputError, match="sha256: expected that of the routes"):
        load(open_capture(path))
    sidecar(path).write_bytes(b"no index")
    with pytest.raises(InputError, match="one that `b70-replay capture index` made"):
        load(open_capture(path))
    packed = tmp_path / "routes.jsonl.zst"
    packed.write_bytes(b"")
    with pytest.raises(InputError, match="a plain JSONL file"):
        build(open_capture(packed))
