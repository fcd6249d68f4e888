"""``capture record``: a server with the plugin, its prompts, its end, and the capture that is left."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from replay.captures import manifest as m
from replay.captures import recording
from replay.captures.close import close
from replay.captures.manifest import Manifest
from replay.endpoint.server import Answer, Server, ServerError, at_a_time
from replay.engine import config
from replay.errors import InputError, ReplayError

FLUSH_S = 60.0
BESIDE = "recording"  # the engine file, the server's log and its answers: no part of the capture


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a prompt file."""

    prompt: str
    max_tokens: int = 0
    ignore_eos: bool = False


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What to serve, what to ask it, what to record. Without prompts the server stays until a limit or an interrupt."""

    command: Sequence[str]
    folder: Path
    record: config.Record
    prompts: Sequence[Prompt] | None
    max_tokens: int = 64
    concurrency: int = 1
    ready_s: float = 600
    name: str | None = None
    made_by: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What came of it: the capture, or why there is none; ``problems`` make the command fail."""

    manifest: Manifest | None
    answers: Sequence[Answer]
    problems: Sequence[str]
    counters: Mapping[str, int]


def read_prompts(path: Path) -> list[Prompt]:
    """A line a prompt: text as it is, or a ``Prompt`` as JSON. InputError names the line."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(str(path), "--prompts", "a readable text file", str(error)) from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.startswith("{"):
            found += [Prompt(line)] if line.strip() else []
            continue
        try:
            prompt = msgspec.json.decode(line, type=Prompt)
            if not prompt.prompt or prompt.max_tokens < 0:
                raise InputError(f"{path}:{number}", "line", "a prompt, and max_tokens of 1 or more", line[:80])
            found.append(prompt)
        except msgspec.DecodeError as error:
            expected = "text, or an object with prompt, max_tokens and ignore_eos"
            raise InputError(f"{path}:{number}", "line", expected, str(error)) from None
    if not found:
        raise InputError(str(path), "--prompts", "at least one prompt", "none")
    return found


def prepare(folder: Path, record: config.Record) -> Path:
    """The engine file in a new or empty folder; InputError for a folder with anything in it."""
    import tomli_w

    try:
        folder.mkdir(parents=True, exist_ok=True)
        if {path.name for path in folder.iterdir()} - {BESIDE, recording.REFUSAL}:  # those are left where no server came up
            raise InputError(str(folder), "-o", "an empty or new folder", "one with files in it")
        (folder / recording.REFUSAL).unlink(missing_ok=True)
        (folder / BESIDE).mkdir(exist_ok=True)
        path = folder / BESIDE / "engine.toml"
        path.write_text(tomli_w.dumps({"record": msgspec.to_builtins(record)}))
    except OSError as error:
        raise InputError(str(folder), "-o", "a folder that can be written", (error.strerror or str(error)).lower()) from None
    return path


def record(asked: Asked, say: Callable[[str], None] = lambda text: None) -> Outcome:
    """Serve, ask, end and close. ServerError and InputError as their causes have them; no process is left in any case."""
    engine = prepare(asked.folder, asked.record)
    variables = {config.VARIABLE: str(engine.resolve()), **_plugins()}
    server = Server(asked.command, asked.folder / BESIDE / "server.log", {**asked.environment, **variables})
    answers: list[Answer] = []
    problems: list[str] = []
    ended = "the prompts were answered"
    with _told_to_end():
        try:
            server.start()
            server.wait(asked.ready_s, say)
            _check_begun(asked.folder, server)
            if asked.prompts is None:
                ended = _until_stopped(asked.folder, server, say)
            else:
                for answer in _ask(asked, server, say):
                    answers.append(answer)
            if not flush(asked.folder):
                problems.append(f"the writers did not write what they were given in {FLUSH_S:.0f} s")
        except ServerError as error:
            problems.append(str(error))
            ended = "the server failed"
        except KeyboardInterrupt:
            problems.append("interrupted")
            ended = "interrupted"
        finally:
            server.stop()
    counted = counters(asked.folder)
    if answers:
        (asked.folder / BESIDE / "answers.jsonl").write_bytes(b"".join(msgspec.json.encode(answer) + b"\n" for answer in answers))
    manifest = None
    try:
        if recording.journals(asked.folder) or not problems:
            manifest = close(asked.folder, asked.name, asked.made_by, ended)
    except ReplayError as error:
        problems.append(str(error))
    if manifest and manifest.recorded:
        problems += _faults(manifest.recorded)
    return Outcome(manifest, answers, problems, counted)


def _faults(r: m.Recorded) -> Iterator[str]:
    if r.dropped:
        yield f"{r.dropped} steps were dropped: the writer did not keep up"
    if r.lost:
        yield f"{r.lost} steps were lost"
    yield from (f"broken off: {fault}" for fault in r.faults)


@contextlib.contextmanager
def _told_to_end() -> Iterator[None]:
    """SIGTERM and SIGHUP end a recording as Ctrl-C does, so that the server ends too."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # nobody else may set handlers
        yield
        return
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _plugins() -> dict[str, str]:
    """vLLM loads only the plugins that VLLM_PLUGINS names, where it is set."""
    allowed = os.environ.get("VLLM_PLUGINS")
    return {} if allowed is None or "b70_replay" in allowed.split(",") else {"VLLM_PLUGINS": f"{allowed},b70_replay".lstrip(",")}


def _check_begun(folder: Path, server: Server) -> None:
    """ServerError where the server came up and nothing will be recorded."""
    if why := recording.refusal(folder):
        raise ServerError(why)
    if not recording.journals(folder):
        raise server.error("the server is ready and the plugin is not there: install b70-replay into the server's environment")


def _ask(asked: Asked, server: Server, say: Callable[[str], None]) -> Iterator[Answer]:
    prompts = asked.prompts or ()

    def one(p: Prompt) -> Answer:
        return server.complete(p.prompt, p.max_tokens or asked.max_tokens, ignore_eos=p.ignore_eos)

    for number, answer in enumerate(at_a_time(one, prompts, asked.concurrency), 1):
        yield answer
        counted = counters(asked.folder)
        say(f"{number} of {len(prompts)} prompts, {counted['written']} steps, {counted['dropped']} dropped")


def _until_stopped(folder: Path, server: Server, say: Callable[[str], None]) -> str:
    """Why: a limit, or Ctrl-C."""
    try:
        while True:
            server.check_alive("while it was recorded")
            counted = counters(folder)
            if counted["ended"]:
                return "the recording ended by itself"
            say(f"{counted['written']} steps, {counted['tokens']} rows, {counted['dropped']} dropped; Ctrl-C ends the recording")
            time.sleep(0.5)
    except KeyboardInterrupt:
        return "interrupted"


def flush(folder: Path) -> bool:
    """Wait until the writers have written what they were given, since vLLM kills its workers when it is told to end; whether they
    have."""
    end = time.monotonic() + FLUSH_S
    while time.monotonic() < end:
        ranks = [recording.read_counters(path.with_suffix(".counters")) for path in recording.journals(folder)]
        if all(c["ended"] or c["offered"] == c["written"] + c["dropped"] for c in ranks):
            return True
        time.sleep(0.05)
    return False


def counters(folder: Path) -> dict[str, int]:
    """The largest of each counter over the ranks."""
    ranks = [recording.read_counters(path.with_suffix(".counters")) for path in recording.journals(folder)]
    return {name: max((c[name] for c in ranks), default=0) for name in recording.COUNTERS}
