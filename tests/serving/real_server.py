"""Recording from a real vLLM server on a CPU: eager and compiled, one rank and two, four requests at a time, and killed.

Run by `make test-endpoint`, in whose environment the server lives (ENDPOINT, its folder); the kernels are replayed in this one.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from replay.captures import open_capture, recording
from replay.captures.close import close, survey
from replay.captures.records import RecordedV1
from replay.captures.states import open_states
from replay.captures.tensors import decoded
from replay.endpoint.recorder import flush, prepare
from replay.endpoint.server import Answer, Server, at_a_time, group, serve_command
from replay.endpoint.spec import prompt_of, read
from replay.engine.config import Record
from tests.conftest import ROOT

ENDPOINT = Path(os.environ["ENDPOINT"]).resolve()
SPEC, _ = read(ROOT / "bench" / "endpoints" / "tiny-cpu.toml")
MODEL = ROOT / SPEC.model
EVERYTHING = ("routes", "weights", "hidden", "gdn", "states", "states_after", "outputs", "logits")
PROMPTS = [prompt_of(SPEC, item) for item in (*SPEC.canary, *SPEC.quality[:5])]
TOKENS = 36


def command(port: int, *, compiled: bool, ranks: int) -> list[str]:
    """The line that serves the tiny model."""
    line = serve_command(SPEC, str(ENDPOINT / "bin" / "vllm"), model=str(MODEL), port=port)
    tp = ["-tp", str(ranks)] if ranks > 1 else []
    return [word for word in line if not (compiled and word == "--enforce-eager")] + tp


def variables(folder: Path, *, compiled: bool, ranks: int) -> dict[str, str]:
    """The environment of that line; compiled code is kept where the test keeps its own."""
    found = {**SPEC.env, "VLLM_CACHE_ROOT": str(folder / "vllm-cache"), "PATH": f"{ENDPOINT / 'bin'}:{os.environ['PATH']}"}
    if compiled:
        del found["TORCHDYNAMO_DISABLE"]
    return found | ({"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if ranks > 1 else {})


@dataclass(frozen=True)
class Served:
    """What a server answered, and its recording where there was one."""

    folder: Path
    together: list[Answer]
    alone: list[Answer]


def serve(folder: Path, port: int, *, record: bool, compiled: bool, ranks: int) -> Served:
    """Four requests at a time, then one at a time; the recording is closed."""
    target = folder / "capture"
    environment = variables(folder.parent, compiled=compiled, ranks=ranks)
    if record:
        engine = prepare(target, Record(folder=str(target), what=EVERYTHING))
        environment["B70_ENGINE"] = str(engine)
    server = Server(command(port, compiled=compiled, ranks=ranks), folder / "server.log", environment)
    try:
        server.start()
        server.wait(400)
        together = list(at_a_time(lambda p: server.complete(p, TOKENS, ignore_eos=True), PROMPTS, 4))
        alone = [server.complete(prompt, TOKENS) for prompt in PROMPTS[:4]]
        if record:
            assert recording.refusal(target) is None
            flush(target)
    finally:
        server.stop()
    assert not group(server.process.pid if server.process else 0)
    if record:
        close(target, "recorded", "tests", "the test ended")
    return Served(target, together, alone)


KINDS = [(False, 1), (False, 2), (True, 1), (True, 2)]
_PORT = iter(range(8310, 8400))
_SERVED: dict[tuple[bool, bool, int], Served] = {}


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool, bool, int], Served]:
    """One server a kind, started when it is first asked for."""

    def get(record: bool, compiled: bool, ranks: int) -> Served:
        key = record, compiled, ranks
        if key not in _SERVED:
            folder = (
                tmp_path_factory.mktemp("served", numbered=False) if not _SERVED else tmp_path_factory.getbasetemp() / "served"
            )
            mine = folder / f"{'on' if record else 'off'}-{'compiled' if compiled else 'eager'}-{ranks}"
            mine.mkdir()
            begin = time.monotonic()
            _SERVED[key] = serve(mine, next(_PORT), record=record, compiled=compiled, ranks=ranks)
            print(f"\n{mine.name}: {time.monotonic() - begin:.0f} s", file=sys.stderr)
        return _SERVED[key]

    return get


def records(capture: Path) -> Iterator[RecordedV1]:
    """The route records of a capture."""
    for line in (capture / "routes.jsonl").read_bytes().splitlines():
        yield msgspec.json.decode(line, type=RecordedV1)


def b70(*words: object) -> subprocess.CompletedProcess[str]:
    """The tool, in this environment."""
    return subprocess.run(
        [sys.executable, "-m", "replay", *map(str, words)], capture_output=True, text=True, check=False, cwd=ROOT
    )


@pytest.mark.parametrize(("compiled", "ranks"), KINDS)
def test_each_row_belongs_to_its_request(served: Callable[..., Served], compiled: bool, ranks: int) -> None:
    """Of every request each token that was computed is there once in every layer: as many as the server counts, and no other."""
    done = served(True, compiled, ranks)
    seen: dict[tuple[str, str], list[int]] = {}
    for record in records(done.folder):
        assert record.requests is not None
        assert record.padding is not None
        assert record.positions is not None
        for name, padded, position in zip(record.requests, record.padding, record.positions, strict=True):
            if not padded:
                seen.setdefault((record.layer, name), []).append(position)
    layers = {layer for layer, _ in seen}
    assert len(layers) == 4
    names = {name for _, name in seen}
    answers = [*done.together, *done.alone]
    assert len(names) == len(answers)
    for answer in answers:
        (name,) = (n for n in names if n.startswith(answer.id))
        computed = answer.prompt_tokens + answer.completion_tokens - 1
        for layer in layers:
            assert sorted(seen[layer, name]) == list(range(computed)), (layer, name)


@pytest.mark.parametrize(("compiled", "ranks"), KINDS)
def test_logits_are_those_that_were_sampled(served: Callable[..., Served], compiled: bool, ranks: int) -> None:
    """The largest logit of a row is the token that the server gave its request next."""
    done = served(True, compiled, ranks)
    file = next(iter(open_capture(done.folder, "logits").files))
    from replay.captures.logits import open_logits

    held = open_logits(file)
    names = decoded(file, held.meta, "requests", list[str])
    rows = held.tensor("logits")
    wide = (rows.astype(np.uint32) << 16).view(np.float32) if rows.dtype == np.uint16 else rows
    answers = {n: a for n in names for a in (*done.together, *done.alone) if n.startswith(a.id)}
    for row, request, position in zip(wide, held.tensor("request"), held.tensor("position"), strict=True):
        answer = answers[names[request]]
        assert row.argmax() == answer.token_ids[position - answer.prompt_tokens + 1]


@pytest.mark.parametrize(("compiled", "ranks"), KINDS)
def test_states_follow_one_another(served: Callable[..., Served], compiled: bool, ranks: int) -> None:
    """Of both ranks there is a file a GDN layer, and each valid; a row's inputs are those of a decoding request."""
    done = served(True, compiled, ranks)
    files = open_capture(done.folder, "states").files
    assert len(files) == 3 * ranks
    for path in files:
        file = open_states(path)
        assert (file.index["slot"] >= 0).all()
        assert (file.index["state_row"] >= 0).sum() >= 8
    valid = b70("capture", "validate", done.folder)
    assert valid.returncode == 0, valid.stderr
    manifest = json.loads((done.folder / "manifest.json").read_text())
    assert manifest["recorded"]["ranks"] == ranks
    assert manifest["recorded"]["dropped"] == 0


@pytest.mark.parametrize(("compiled", "ranks"), KINDS)
def test_replays_bitwise(served: Callable[..., Served], compiled: bool, ranks: int, tmp_path: Path) -> None:
    """Our kernels are BITWISE on recorded routes and states; the engine's own outputs are within the oracle's stated budget."""
    done = served(True, compiled, ranks)
    few = ("--max-cases", 1, "--quick", "--blocks", 5, "--repeats", 2, "--route-layer-regex", r"layers\.[02]\.")
    for stage, kernels, rows in (("moe.layer", "sycl:moe.layer*", "1,4"), ("gdn.step", "sycl:gdn.step*", "1,3")):
        ran = b70("run", "--capture", done.folder, "--stage", stage, "--kernel", kernels, "--route-window-size", rows, *few,
                  "-o", tmp_path / stage)  # fmt: skip
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "sycl:" in ran.stdout
        assert "BITWISE" in ran.stdout
        print(ran.stdout, file=sys.stderr)
    agreed = b70("capture", "agree", done.folder)
    print(agreed.stdout, file=sys.stderr)
    assert agreed.returncode == 0, agreed.stdout + agreed.stderr


@pytest.mark.parametrize("compiled", [False, True])
def test_what_a_client_sees_is_the_same(served: Callable[..., Served], compiled: bool) -> None:
    """At concurrency 1, ids and logprobs are bit-equal with recording on and off."""
    on, off = served(True, compiled, 1), served(False, compiled, 1)
    assert [(a.token_ids, a.logprobs) for a in on.alone] == [(a.token_ids, a.logprobs) for a in off.alone]
    assert all(a.token_ids for a in on.alone)


def test_the_model_answers(served: Callable[..., Served]) -> None:
    """The tiny model says what the canaries and the quality suite expect of it."""
    done = served(True, False, 1)
    items = (*SPEC.canary, *SPEC.quality[:5])[:4]
    assert [a.text for a in done.alone] == [item.expect for item in items]


def test_kill_9_leaves_a_valid_capture(tmp_path: Path) -> None:
    """Three servers whose writing process is killed in the middle of a request: what is whole validates, and becomes a capture."""
    ports = [next(_PORT) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda turn: _killed(tmp_path / str(turn), ports[turn], turn), range(3)))


def _killed(folder: Path, port: int, turn: int) -> None:
    target = folder / "capture"
    engine = prepare(target, Record(folder=str(target), what=EVERYTHING))
    environment = {**variables(folder, compiled=False, ranks=1), "B70_ENGINE": str(engine)}
    server = Server(command(port, compiled=False, ranks=1), folder / "server.log", environment)
    try:
        server.start()
        server.wait(400)
        pid = recording.Journal(recording.journals(target)[0]).head.pid
        asking = subprocess.Popen([sys.executable, "-c", _ASK, server.url, server.model], stderr=subprocess.DEVNULL)
        moment = 20 + random.Random(turn).randrange(150)  # steps of the 440, whatever the machine's speed
        while recording.read_counters(recording.counters_path(target, 0))["written"] < moment:
            time.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        asking.wait(60)
    finally:
        server.kill()
    seen = survey(target)
    assert moment <= seen.steps[0] < 440
    told = b70("capture", "validate", target)
    assert told.returncode == 0, told.stderr
    assert f"valid up to step {seen.steps[0]:,}" in told.stdout
    manifest = close(target)
    assert manifest.recorded is not None
    assert manifest.recorded.steps == seen.steps[0]
    assert b70("capture", "validate", target).returncode == 0


_ASK = """
import httpx, sys
url, model = sys.argv[1:]
httpx.post(url + '/v1/completions', json=dict(model=model, prompt='On Monday the ferry', max_tokens=440, ignore_eos=True), timeout=60)
"""


def test_the_command(tmp_path: Path) -> None:
    """`capture record` serves, asks, ends everything that it started, closes, and says what it cost; a speculative server is
    refused by name, and the command fails."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(json.dumps({"prompt": p}) for p in PROMPTS))
    tool = ENDPOINT / "bin" / "b70-replay"
    environment = {**os.environ, **variables(tmp_path, compiled=False, ranks=1)}

    def record(folder: str, *more: str) -> subprocess.CompletedProcess[str]:
        line = command(next(_PORT), compiled=False, ranks=1)
        words = [
            "capture",
            "record",
            "-o",
            str(tmp_path / folder),
            "--prompts",
            str(prompts),
            "--concurrency",
            "4",
            "--",
            *line,
            *more,
        ]
        return subprocess.run([str(tool), *words], capture_output=True, text=True, check=False, env=environment)

    more = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}']
    with ThreadPoolExecutor(2) as pool:
        done, refused = pool.map(lambda words: record(*words), (["good"], ["speculative", *more]))
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout, file=sys.stderr)
    assert "0 dropped" in done.stdout
    assert "µs of the engine's thread each" in done.stdout
    assert refused.returncode in (3, 5)
    assert "--speculative-config" in refused.stderr
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
