"""Steps whose every number is known, through the recorder and the writer, to a capture."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from replay.captures import open_capture, recording
from replay.captures.close import close, survey
from replay.captures.manifest import Manifest
from replay.captures.recording import COUNTERS
from replay.captures.records import RecordedV1
from replay.captures.states import open_states
from replay.captures.tensors import decoded
from replay.errors import InputError
from tests.engine.synthetic import EVERYTHING, GDN, LAYERS, WRITERS, Engine, recorder


def records(capture: Path) -> list[RecordedV1]:
    """The routes of a capture."""
    return [msgspec.json.decode(line, type=RecordedV1) for line in (capture / "routes.jsonl").read_bytes().splitlines()]


def closed(folder: Path) -> Manifest:
    """The capture, once the process that wrote is gone: here its writers give their locks back."""
    for writer in WRITERS:
        writer.lock.release()
    WRITERS.clear()
    return close(folder)


def served(folder: Path, *, padding: int = 0, steps: int = 6, **asked: Any) -> Engine:
    """Two requests: a's prompt of three, then b's of two beside a's first token, then both decode."""
    engine = Engine(recorder(folder, **asked), {"a": 3, "b": 2}, padding)
    engine.step({"a": 3})
    engine.step({"a": 1, "b": 2})
    for _ in range(steps):
        engine.step({"a": 1, "b": 1})
    engine.recorder.close()
    return engine


def test_routes_and_whose_they_are(tmp_path: Path) -> None:
    """Ids and weights to the bit; request, step, phase, position, padding and rank in every record."""
    engine = served(tmp_path, padding=1)
    closed(tmp_path)
    found = records(tmp_path)
    assert len(found) == len(engine.routed) == 8 * len(LAYERS)
    for record, (layer, ids, weights) in zip(found, engine.routed, strict=True):
        assert record.layer == layer
        assert record.topk_ids == ids.tolist()
        assert record.topk_weights is not None
        assert torch.equal(torch.tensor(record.topk_weights, dtype=torch.float32), weights)
    first, second, third = (found[i * len(LAYERS)] for i in range(3))
    assert (first.phase, second.phase, third.phase) == ("prefill", "mixed", "decode")
    assert (first.requests, first.positions) == (["a", "a", "a", ""], [0, 1, 2, 0])
    assert second.requests == ["a", "b", "b", ""]
    assert second.positions == [3, 0, 1, 0]
    assert third.padding == [False, False, True]
    assert [r.step for r in found[:: len(LAYERS)]] == list(range(8))
    assert {r.rank for r in found} == {"0"}


def test_states_inputs_and_logits(tmp_path: Path) -> None:
    """States before the first step of decode and each second after it; the requests' names travel with the rows."""
    served(tmp_path, what=EVERYTHING, states_every=2)
    manifest = closed(tmp_path)
    assert manifest.recorded is not None
    assert manifest.geometry.preset == "tiny-moe-16"
    assert {f.holds for f in manifest.files} == {"routes", "states", "logits", "gates"}
    capture = open_capture(tmp_path, "states")
    file = open_states(capture.files[0])
    assert file.layer == GDN
    assert capture.modes == {"state_layout": "k_v", "dt_bias": "bf16", "ssm_state": "f32"}
    names = decoded(file.path, file.meta, "requests", list[str])
    whose = [
        (int(s), names[i], int(p)) for s, i, p in zip(*(file.tensor(n) for n in ("step", "sequence", "position")), strict=True)
    ]
    assert whose[:3] == [(1, "a", 3), (2, "a", 4), (2, "b", 2)]
    has = sorted({s for (s, _, _), at in zip(whose, file.index["state_row"], strict=True) if at >= 0})
    assert has == [1, 3, 5, 7]
    assert file.tensor("ssm_state_after").shape == file.tensor("ssm_state").shape


def test_a_dummy_run_is_left_out(tmp_path: Path) -> None:
    """What layers see outside a step of the scheduler, as in warm-up and profiling, is nobody's."""
    made = recorder(tmp_path, what=EVERYTHING)
    made.route(LAYERS[0], torch.rand(4, 4), torch.arange(16).reshape(4, 4).int())
    made.logits(torch.rand(1, 512))
    made.close()
    with pytest.raises(InputError, match="at least one recorded row, got none in 0 steps"):
        closed(tmp_path)


@pytest.mark.parametrize(
    ("asked", "steps", "phases"),
    [({"every": 3}, [0, 3, 6], {"prefill", "decode"}), ({"phases": ("decode",)}, list(range(1, 8)), {"decode"}),
     ({"layers": "layers.1"}, list(range(8)), {"prefill", "mixed", "decode"}), ({"requests": "b"}, list(range(1, 8)), {"prefill", "decode"})],
)  # fmt: skip
def test_filters(asked: dict[str, Any], steps: list[int], phases: set[str], tmp_path: Path) -> None:
    """Every Nth step, phases, layers and requests."""
    served(tmp_path, **asked)
    closed(tmp_path)
    found = records(tmp_path)
    assert sorted({r.step for r in found}) == steps
    assert {r.phase for r in found} == phases
    assert {r.layer for r in found} == ({LAYERS[1]} if "layers" in asked else set(LAYERS))
    if "requests" in asked:
        assert {n for r in found for n in r.requests or ()} == {"b"}
        assert found[0].call_rows == 3


@pytest.mark.parametrize(("limit", "value"), [("max_tokens", 5), ("max_lines", 7), ("max_bytes", 3000)])
def test_a_limit_closes_cleanly(limit: str, value: int, tmp_path: Path) -> None:
    """The capture ends at a whole step and says which limit it was; the engine goes on."""
    engine = Engine(recorder(tmp_path, **{limit: value}), {"a": 1})
    for _ in range(30):
        engine.step({"a": 1})
        time.sleep(0.002)  # the writer's thread is to see the limit while steps come
    engine.recorder.close()
    manifest = closed(tmp_path)
    assert manifest.recorded is not None
    assert limit in manifest.recorded.ended
    assert 0 < manifest.recorded.steps < 30
    assert manifest.recorded.dropped == 0


def test_ranks_are_compared_and_stored_once(tmp_path: Path) -> None:
    """Equal routes are written once, each rank's states by themselves."""
    for rank in range(2):
        engine = Engine(recorder(tmp_path, rank=rank, ranks=2, what=EVERYTHING), {"a": 1})
        for _ in range(3):
            engine.step({"a": 1})
        engine.recorder.close()
    manifest = closed(tmp_path)
    assert manifest.recorded is not None
    assert manifest.recorded.ranks == 2
    assert len(records(tmp_path)) == 3 * len(LAYERS)
    assert sorted(f.path for f in manifest.files if f.holds == "states") == [
        "states-L0.safetensors", f"states-rank1.{GDN}.safetensors",
    ]  # fmt: skip


def test_ranks_that_differ_are_refused(tmp_path: Path) -> None:
    """By step, layer and row; nothing is thrown away."""
    for rank in range(2):
        engine = Engine(recorder(tmp_path, rank=rank, ranks=2), {"a": 1}, seed=rank)
        engine.step({"a": 1})
        engine.recorder.close()
    with pytest.raises(
        InputError, match=r"step 0, model\.layers\.0.*the routes of the first rank on rank 1, got other ids at row 0"
    ):
        closed(tmp_path)
    assert len(recording.journals(tmp_path)) == 2


def test_a_rank_that_ended_earlier_cuts_the_other(tmp_path: Path) -> None:
    """Only steps that every rank has are in the capture."""
    for rank, steps in enumerate((5, 3)):
        engine = Engine(recorder(tmp_path, rank=rank, ranks=2), {"a": 1})
        for _ in range(steps):
            engine.step({"a": 1})
        engine.recorder.close()
    manifest = closed(tmp_path)
    assert manifest.recorded is not None
    assert manifest.recorded.steps == 3


def test_drops_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that is blocked: what does not fit is dropped, counted and told, and the engine's thread never waits."""
    made = recorder(tmp_path, what=EVERYTHING, buffer_mib=1, states_every=1)
    gate = threading.Event()
    write = made.writer._append
    monkeypatch.setattr(made.writer, "_append", lambda pieces: (gate.wait(), write(pieces)))
    engine = Engine(made, {"a": 1})
    begin = time.monotonic()
    for _ in range(20):
        engine.step({"a": 1})
    assert time.monotonic() - begin < 5
    gate.set()
    made.close()
    counted = recording.read_counters(recording.counters_path(tmp_path, 0))
    assert counted["offered"] == 20
    assert 0 < counted["dropped"] < 20
    assert counted["written"] == 20 - counted["dropped"]
    manifest = closed(tmp_path)
    assert manifest.recorded is not None
    assert manifest.recorded.dropped == counted["dropped"]


def test_a_full_disk_ends_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said, what was written before holds, and the engine goes on."""
    import os

    made = recorder(tmp_path)
    engine = Engine(made, {"a": 1})
    for _ in range(3):
        engine.step({"a": 1})
    while made.writer.counters[COUNTERS.index("written")] < 3:
        time.sleep(0.001)
    real = os.write

    def full(fd: int, data: Any) -> int:
        if fd == made.writer.fd:
            real(fd, memoryview(data)[:7])
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr("replay.engine.writer.os.write", full)
    for _ in range(3):
        engine.step({"a": 1})
    made.close()
    assert "no space left on device; the server goes on" in caplog.text
    assert "no space left on device" in str(recording.refusal(tmp_path))
    manifest = closed(tmp_path)
    assert manifest.recorded is not None
    assert manifest.recorded.steps == 3
    assert manifest.recorded.lost >= 1
    assert "no space left on device" in manifest.recorded.faults[0]


def test_a_disk_that_was_full_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end fits again: it is a fault all the same, and what came behind it is lost."""
    made = recorder(tmp_path)
    engine, write = Engine(made, {"a": 1}), made.writer._append
    engine.step({"a": 1})
    while made.writer.counters[COUNTERS.index("written")] < 1:
        time.sleep(0.001)

    def full_once(pieces: Any) -> None:
        monkeypatch.setattr(made.writer, "_append", write)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(made.writer, "_append", full_once)
    for _ in range(4):
        engine.step({"a": 1})
    made.close()
    manifest = closed(tmp_path)
    assert manifest.recorded is not None
    assert manifest.recorded.steps == 1
    assert manifest.recorded.lost >= 1
    assert manifest.recorded.faults == ["rank 0: the disk: no space left on device"]


def test_folders_that_are_not_to_be_had(tmp_path: Path) -> None:
    """A second writer, a recording that is there, a file in the folder's place."""
    first = recorder(tmp_path / "one")
    with pytest.raises(InputError, match="one that no other server writes to"):
        recorder(tmp_path / "one")
    first.close()
    first.writer.lock.release()
    with pytest.raises(InputError, match="one without a recording"):
        recorder(tmp_path / "one")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="a folder that can be written"):
        recorder(tmp_path / "file")


def test_a_fault_of_a_hook_ends_the_recording_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The engine's thread sees nothing of it."""
    engine = Engine(recorder(tmp_path), {"a": 1})
    engine.step({"a": 1})
    engine.recorder.begin()
    engine.recorder.route(LAYERS[0], None, None)
    engine.step({"a": 1})
    engine.recorder.writer.thread.join(10)
    assert "route: AttributeError" in caplog.text
    manifest = closed(tmp_path)
    assert manifest.recorded is not None
    assert manifest.recorded.steps == 1
    assert "route" in manifest.recorded.ended


def test_a_damaged_frame_ends_what_holds(tmp_path: Path) -> None:
    """One flipped byte in the third step: two are valid, and said to be."""
    served(tmp_path)
    path = recording.journal_path(tmp_path, 0)
    offsets = [0]
    journal = recording.Journal(path)
    for _ in journal.frames():
        offsets.append(journal.whole)
    data = bytearray(path.read_bytes())
    data[offsets[3] + 40] ^= 1
    path.write_bytes(data)
    seen = survey(tmp_path)
    assert seen.steps == {0: 2}
    assert seen.torn[0] == len(data) - offsets[3]
    assert closed(tmp_path).recorded is not None


def test_the_manifest_holds_no_folder(tmp_path: Path) -> None:
    """Where it was recorded is nobody's business."""
    served(tmp_path)
    closed(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert "folder" not in manifest["recorded"]["record"]
    assert np.isclose(records(tmp_path)[0].ts or 0, time.time(), atol=600)


def test_a_rank_that_is_missing_is_refused(tmp_path: Path) -> None:
    """One of two recorded: nothing says that the other chose the same experts."""
    engine = Engine(recorder(tmp_path, rank=0, ranks=2), {"a": 1})
    engine.step({"a": 1})
    engine.recorder.close()
    with pytest.raises(InputError, match="expected journals of 0, 1, got 0"):
        closed(tmp_path)


def test_a_rank_keeps_its_number(tmp_path: Path) -> None:
    """Recorded alone, rank 1 is rank 1 in routes, and its heads are no rank 0's."""
    made = recorder(tmp_path, rank=1, expected=(1,), what=EVERYTHING)
    engine = Engine(made, {"a": 1})
    engine.step({"a": 1})
    engine.step({"a": 1})
    made.close()
    manifest = closed(tmp_path)
    assert {r.rank for r in records(tmp_path)} == {"1"}
    assert [f.path for f in manifest.files if f.holds == "states"] == [f"states-rank1.{GDN}.safetensors"]


def test_drops_of_ranks_are_added(tmp_path: Path) -> None:
    """Each dropped another step: two are missing."""
    for rank in range(2):
        made = recorder(tmp_path, rank=rank, ranks=2)
        engine = Engine(made, {"a": 1})
        for step in range(4):
            made.writer.limit = -1 if step == rank else 1 << 30
            engine.step({"a": 1})
        made.close()
    manifest = closed(tmp_path)
    assert manifest.recorded is not None
    assert (manifest.recorded.steps, manifest.recorded.dropped) == (2, 2)


def test_a_live_recording_is_not_closed(tmp_path: Path) -> None:
    """While a server holds it; and a closed one is not recorded over."""
    made = recorder(tmp_path)
    engine = Engine(made, {"a": 1})
    engine.step({"a": 1})
    with pytest.raises(InputError, match="that no server writes any more, got rank 0 is being written"):
        close(tmp_path)
    made.close()
    closed(tmp_path)
    with pytest.raises(InputError, match=r"one without a recording, got manifest\.json"):
        recorder(tmp_path)
    with pytest.raises(InputError, match="a recording that was not closed, got a capture"):
        close(tmp_path)


def test_what_was_asked_for_and_is_not_there(tmp_path: Path) -> None:
    """Routes without the GDN that was asked for beside them are no capture of what was asked."""
    served(tmp_path, what=EVERYTHING, layers="experts")
    with pytest.raises(InputError, match="states, since gdn was asked for, got none in 8 steps"):
        closed(tmp_path)


def test_no_room_for_the_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journals are kept, and no half of a file."""
    from replay.errors import EnvironmentRefused

    served(tmp_path, what=EVERYTHING)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("replay.captures.gather.save_tensors", full)
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(
        EnvironmentRefused, match="expected room for the capture, got no space left on device; the journals are kept"
    ):
        closed(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == before


def test_gdn_steps_are_those_that_are_wanted(tmp_path: Path) -> None:
    """Steps of other requests do not use up the limit."""
    made = recorder(tmp_path, what=("gdn", "states"), requests="^b$", max_gdn_steps=2)
    engine = Engine(made, {"a": 1, "b": 1})
    for names in ("a", "a", "a", "b", "b", "b", "b"):
        engine.step({names: 1})
    made.close()
    closed(tmp_path)
    file = open_states(open_capture(tmp_path, "states").files[0])
    assert file.tensor("step").tolist() == [3, 4]
