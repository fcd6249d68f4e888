"""kill −9, fifty times, on a process that records synthetic steps: what is left is a valid capture."""

import subprocess
import sys
from pathlib import Path

import pytest

from replay.captures import open_capture, read_batches
from replay.captures.close import close, survey
from replay.captures.recording import read_counters
from replay.captures.states import check_capture, open_states
from tests.conftest import ROOT
from tests.engine.synthetic import GEOMETRY, LAYERS

# One process imports torch; its children each begin a recording and are killed in the middle of it.
FORKER = """
import os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from replay.captures.recording import read_counters
from tests.engine.synthetic import EVERYTHING, Engine, recorder
folder, kills = Path(sys.argv[1]), int(sys.argv[2])
order = random.Random(7)
for turn in range(kills):
    child = os.fork()
    if not child:
        engine = Engine(recorder(folder / str(turn), what=EVERYTHING, states_every=2), {"a": 2, "b": 1}, padding=1)
        engine.step({"a": 2, "b": 1})
        while True:
            engine.step({"a": 1, "b": 1})
    # One in five at once, where it may be in its first frame; the others in the middle of their steps.
    counters = folder / str(turn) / "rank0.counters"
    while not counters.exists() or (turn % 5 and read_counters(counters)["written"] < 2):
        time.sleep(0.001)
    time.sleep(order.uniform(0.0, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""
KILLS = 50


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of fifty recordings that nobody ended."""
    folder = tmp_path_factory.mktemp("killed")
    subprocess.run([sys.executable, "-c", FORKER, str(folder), str(KILLS)], check=True, cwd=ROOT, timeout=120)
    return folder


def test_what_is_left_is_valid(killed: Path) -> None:
    """Each closes to as many whole steps as its journal has, no more; the torn ones are known to be torn."""
    recorded = 0
    for turn in range(KILLS):
        folder = killed / str(turn)
        if not (folder / "rank0.journal").stat().st_size:
            continue  # killed before the first byte
        seen = survey(folder)
        counted = read_counters(folder / "rank0.counters")
        assert seen.steps[0] >= counted["written"]  # a step is counted when it is on its way to the disk
        if not seen.steps[0]:
            continue
        recorded += 1
        manifest = close(folder)
        assert manifest.recorded is not None
        assert manifest.recorded.steps == seen.steps[0]
        assert manifest.recorded.ended == "the writer was stopped before it could say why"
        records = sum(len(batch.layers) for batch in read_batches(folder / "routes.jsonl"))
        assert records == seen.steps[0] * len(LAYERS)
        states = open_capture(folder, "states")
        check_capture(states, GEOMETRY)
        assert len(open_states(states.files[0]).index["step"]) >= 2 * (seen.steps[0] - 1)
    assert recorded >= KILLS * 4 // 5
