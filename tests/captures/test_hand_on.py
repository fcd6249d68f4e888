"""Captures for others: the lab's form, and copies that name nobody."""

import json
from pathlib import Path

import msgspec
import pytest

from replay.captures import Select, cases, open_capture
from replay.captures.close import close
from replay.captures.hand_on import anonymise, export
from replay.errors import InputError
from replay.model import Problem, preset
from tests.engine.synthetic import EVERYTHING, Engine, recorder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of two requests with names that tell, and a row of padding."""
    folder = tmp_path_factory.mktemp("recorded") / "capture"
    engine = Engine(recorder(folder, what=EVERYTHING, states_every=2), {"alice-secret": 3, "bob-secret": 2}, padding=1)
    engine.step({"alice-secret": 3})
    engine.step({"alice-secret": 1, "bob-secret": 2})
    for _ in range(4):
        engine.step({"alice-secret": 1, "bob-secret": 1})
    engine.recorder.close()
    engine.recorder.writer.lock.release()
    close(folder)
    return folder


def test_export_replays_the_same(recorded: Path, tmp_path: Path) -> None:
    """The lab's form of a capture has the same rows, padding left out."""
    geometry = preset("tiny-moe-16", 1)
    assert export(open_capture(recorded), tmp_path / "lab.jsonl") == 18
    ours, theirs = (
        {
            c.id.source.layer: c.routes.topk_ids
            for c in cases(open_capture(p), Select(start_indices="0"), geometry, lambda g, r: Problem("moe.layer", g, r, ()), 7)
        }
        for p in (recorded, tmp_path / "lab.jsonl")
    )
    assert ours == theirs
    assert len(ours) == 3
    first = json.loads((tmp_path / "lab.jsonl").read_text().splitlines()[0])
    assert first["topk_ids"][3] == [-1] * 4
    assert sum(first["counts"]) == first["assignments"] == 12
    with pytest.raises(InputError, match="a new file"):
        export(open_capture(recorded), tmp_path / "lab.jsonl")


def test_anonymous_copies_name_nobody(recorded: Path, tmp_path: Path) -> None:
    """No request, time or process in any byte of it; rows, tensors and hashes hold."""
    assert anonymise(recorded, tmp_path / "copy") == 2
    for path in (tmp_path / "copy").rglob("*"):
        assert b"secret" not in path.read_bytes(), path
    lines = [json.loads(line) for line in (tmp_path / "copy" / "routes.jsonl").read_text().splitlines()]
    assert {name for line in lines for name in line["requests"]} == {"r0", "r1", ""}
    assert not {"ts", "pid"} & set(lines[0])
    before = [json.loads(line) for line in (recorded / "routes.jsonl").read_text().splitlines()]
    assert [line["topk_ids"] for line in lines] == [line["topk_ids"] for line in before]
    for holds in ("states", "logits", "gates"):
        one, other = open_capture(recorded, holds), open_capture(tmp_path / "copy", holds)  # type: ignore[arg-type]  # kinds
        assert [p.name for p in one.files] == [p.name for p in other.files]
    with pytest.raises(InputError, match="a new or empty folder"):
        anonymise(recorded, tmp_path / "copy")


def test_unknown_fields_are_left_out(tmp_path: Path) -> None:
    """What this version does not know may name somebody."""
    path = tmp_path / "routes.jsonl"
    record = {
        "v": 1, "layer": "model.layers.0.mlp.experts", "stage": "router", "step": 0, "phase": "decode", "num_tokens": 1, "top_k": 2,
        "num_experts": 4, "topk_ids": [[1, 2]], "requests": ["me"], "user": "me", "ts": 3.5,
    }  # fmt: skip
    path.write_bytes(msgspec.json.encode(record) + b"\n")
    assert anonymise(path, tmp_path / "copy.jsonl") == 1
    assert b"me" not in (tmp_path / "copy.jsonl").read_bytes().replace(b'"phase":"decode"', b"")


def test_nothing_is_left_half_written(recorded: Path, tmp_path: Path) -> None:
    """A line that breaks in the middle of a file: no file and no folder; nor where there is no place to write."""
    routes = tmp_path / "routes.jsonl"
    routes.write_bytes((recorded / "routes.jsonl").read_bytes() + b'{"v":1,')
    for act in (lambda: export(open_capture(routes), tmp_path / "out.jsonl"), lambda: anonymise(routes, tmp_path / "out.jsonl")):
        with pytest.raises(InputError, match="truncated"):
            act()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["routes.jsonl"]
    with pytest.raises(InputError, match="a place that can be written"):
        export(open_capture(recorded), tmp_path / "none" / "out.jsonl")


def test_compressed_routes_stay_compressed(recorded: Path, tmp_path: Path) -> None:
    """And can be read."""
    import zstandard

    packed = tmp_path / "routes.jsonl.zst"
    packed.write_bytes(zstandard.compress((recorded / "routes.jsonl").read_bytes()))
    assert anonymise(packed, tmp_path / "copy.jsonl.zst") == 2
    assert export(open_capture(tmp_path / "copy.jsonl.zst"), tmp_path / "lab.jsonl") == 18
