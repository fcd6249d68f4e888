"""`capture record` with a server in vLLM's place, whose recorder is the real one; and what makes the command fail."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, Cli


@pytest.fixture
def port() -> int:
    """A free one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(port: int, *words: str) -> list[str]:
    """The line that serves."""
    return [sys.executable, "-m", "tests.engine.stand_in", "serve", "model", "--port", str(port), *words]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Three, one of them with fields."""
    path = tmp_path / "prompts.txt"
    path.write_text('one line\n\n{"prompt": "another", "max_tokens": 3}\nand a third\n')
    return path


def left(port: int) -> list[int]:
    """The server's processes, by its port."""
    words = {"tests.engine.stand_in", str(port)}
    return [p.pid for p in psutil.process_iter(["cmdline"]) if words <= set(p.info["cmdline"] or [])]


def test_from_a_server_to_a_capture(cli: Cli, tmp_path: Path, prompts: Path, port: int) -> None:
    """Closed, checked and told; the server, its log and its answers are gone or beside it."""
    out = tmp_path / "capture"
    done = cli(
        "capture",
        "record",
        "-o",
        out,
        "--prompts",
        prompts,
        "--max-tokens",
        5,
        "--concurrency",
        2,
        "--",
        *command(port),
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert "13 steps, " in done.stdout
    assert "0 dropped; ended: the prompts were answered" in done.stdout
    assert "µs of the engine's thread each" in done.stdout
    assert sorted(p.name for p in (out / "recording").iterdir()) == ["answers.jsonl", "engine.toml", "server.log"]
    answers = [json.loads(line) for line in (out / "recording" / "answers.jsonl").read_text().splitlines()]
    assert [a["completion_tokens"] for a in answers] == [5, 3, 5]
    assert cli("capture", "validate", out).returncode == 0
    assert not left(port)
    again = cli("capture", "record", "-o", out, "--prompts", prompts, "--", *command(port), cwd=ROOT)
    assert again.returncode == 2
    assert "-o: expected an empty or new folder" in again.stderr


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("empty", 3, "at least one recorded row, got none in 0 steps"), ("slow", 3, "steps were dropped: the writer did not keep up"),
        ("dies", 5, "the server ended with 7 before it was ready"), ("silent", 5, "install b70-replay into the server's environment"),
        ("500", 5, "HTTPStatusError"),
    ],
)  # fmt: skip
def test_what_makes_it_fail(cli: Cli, tmp_path: Path, prompts: Path, port: int, fault: str, code: int, said: str) -> None:
    """Each told, none of them with a process left."""
    out, engine = tmp_path / "capture", tmp_path / "engine.toml"
    what = '["routes", "weights", "hidden", "gdn", "states", "states_after", "logits"]'
    engine.write_text(f"[record]\nfolder = 'x'\nwhat = {what}\nstates_every = 1\nbuffer_mib = 1\n")
    line = command(port, "--fault", fault)
    done = cli("capture", "record", "-o", out, "--prompts", prompts, "--engine", engine, "--max-tokens", 9, "--", *line, cwd=ROOT)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stderr
    assert not left(port)
    if fault == "dies":
        assert "no memory left for the weights" in done.stderr
    if fault == "slow":
        assert " 0 dropped" not in done.stdout
        assert "STEPS DROPPED" in cli("capture", "validate", out).stdout


def test_bad_input_costs_nothing(cli: Cli, tmp_path: Path, prompts: Path, port: int) -> None:
    """A taken port, a program that is none, prompts and fields that are wrong: one line, and what exit code."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        done = cli("capture", "record", "-o", tmp_path / "a", "--prompts", prompts, "--", *command(port), cwd=ROOT)
        assert (done.returncode, f"port {port}: expected a free one" in done.stderr) == (5, True)
    done = cli("capture", "record", "-o", tmp_path / "b", "--prompts", prompts, "--", "no-such-program", "--port", port)
    assert (done.returncode, "no-such-program: expected a program" in done.stderr) == (5, True)
    bad = tmp_path / "bad.txt"
    bad.write_text('fine\n{"prompt": 3}\n')
    done = cli("capture", "record", "-o", tmp_path / "c", "--prompts", bad, "--", *command(port))
    assert (done.returncode, f"{bad}:2: line: expected text, or an object" in done.stderr) == (2, True)
    assert not (tmp_path / "c").exists()
    done = cli("capture", "record", "-o", tmp_path / "d", "--what", "routes,fuel", "--", *command(port))
    assert (done.returncode, "--what" in done.stderr) == (2, True)
    done = cli("capture", "close", tmp_path)
    assert (done.returncode, "expected a recording" in done.stderr) == (2, True)


def test_until_it_is_interrupted(tmp_path: Path, port: int) -> None:
    """Without prompts the server stays; Ctrl-C ends and closes the recording."""
    import httpx

    out = tmp_path / "capture"
    words = [sys.executable, "-m", "replay", "capture", "record", "-o", str(out), "--", *command(port)]
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)
    for _ in range(300):
        time.sleep(0.1)
        try:
            httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "mine", "max_tokens": 3}, timeout=5)
            break
        except httpx.HTTPError:
            continue
    time.sleep(1.0)
    os.kill(running.pid, signal.SIGINT)
    out_text, error = running.communicate(timeout=60)
    assert running.returncode == 0, error
    assert "3 steps" in out_text
    assert "ended: interrupted" in out_text
    assert not left(port)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_its_command(number: signal.Signals, tmp_path: Path, port: int) -> None:
    """However the command ends: told to, it closes the recording; killed, the server is told by the kernel."""
    out = tmp_path / "capture"
    words = [sys.executable, "-m", "replay", "capture", "record", "-o", str(out), "--", *command(port)]
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)
    for _ in range(300):
        time.sleep(0.05)
        if (out / "rank0.journal").exists():
            break
    assert left(port)
    running.send_signal(number)
    running.communicate(timeout=60)
    for _ in range(100):
        if not left(port):
            break
        time.sleep(0.05)
    assert not left(port)


def test_a_folder_where_no_server_came_up_can_be_used_again(cli: Cli, tmp_path: Path, prompts: Path, port: int) -> None:
    """Nothing was recorded in it."""
    out = tmp_path / "capture"
    failed = cli("capture", "record", "-o", out, "--prompts", prompts, "--", *command(port, "--fault", "dies"), cwd=ROOT)
    assert failed.returncode == 5
    assert len([line for line in failed.stderr.splitlines() if not line.startswith("  ")]) == 1
    done = cli("capture", "record", "-o", out, "--prompts", prompts, "--max-tokens", 2, "--", *command(port), cwd=ROOT)
    assert done.returncode == 0, done.stderr
