"""A server in a process group of its own: started, waited for, asked, and ended with everybody that it started.

What is wrong is a ``ServerError`` with a reason and the log's last lines; whatever happens, ``stop`` leaves no process behind.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from replay.endpoint.spec import Endpoint
from replay.errors import InputError, ReplayError

TAIL_LINES = 15
T = TypeVar("T")


class ServerError(ReplayError):
    """A server that does not come up, dies, or answers with an error."""

    exit_code = 5


class Answer(msgspec.Struct, frozen=True):
    """What a server said to one prompt: its id there, token ids, log-probabilities, and how many tokens went in and out."""

    id: str
    prompt: str
    text: str
    token_ids: list[int]
    logprobs: list[float]
    prompt_tokens: int
    completion_tokens: int


class Server:
    """``command`` (``vllm serve MODEL …``) under ``environment``, its output in ``log``."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.command, self.log = list(command), log
        self.host, port = word_after(command, "--host", "127.0.0.1"), word_after(command, "--port", "8000")
        if not port.isdigit():
            raise InputError("server", "--port", "a number", repr(port))
        self.port = int(port)
        self.environment = {**os.environ, **(environment or {})}
        self.process: subprocess.Popen[bytes] | None = None
        self.model = ""

    @property
    def url(self) -> str:
        """Where it listens."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "") else self.host  # noqa: S104  # compared, not bound
        return f"http://{host}:{self.port}"

    def start(self) -> None:
        """Start it; ServerError where the port is taken or the command is none."""
        import socket

        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", self.port))
            except OSError as error:
                raise ServerError(
                    f"port {self.port}: expected a free one, got {(error.strerror or str(error)).lower()}"
                ) from None
        with self.log.open("wb") as out:
            try:
                self.process = subprocess.Popen(
                    self.command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=self.environment,
                    start_new_session=True, preexec_fn=end_with_parent,  # one call of the C library
                )  # fmt: skip
            except OSError as error:
                raise ServerError(
                    f"{self.command[0]}: expected a program, got {(error.strerror or str(error)).lower()}"
                ) from None

    def wait(self, timeout_s: float, say: Callable[[str], None] = lambda text: None) -> float:
        """Seconds until it answers; ServerError where it dies before, or does not come up in time."""
        import httpx

        begin = time.monotonic()
        while (waited := time.monotonic() - begin) < timeout_s:
            self.check_alive("before it was ready")
            try:
                if self._get("/health", 5).status_code == 200:
                    self.model = self._get("/v1/models", 30).json()["data"][0]["id"]
                    return waited
            except httpx.HTTPError:
                pass
            except (ValueError, LookupError, TypeError) as error:
                raise self.error(f"/v1/models: expected a list of models, got {error}") from None
            say(f"waiting for the server: {waited:.0f} s")
            time.sleep(0.5)
        raise self.error(f"not ready in {timeout_s:.0f} s")

    def check_alive(self, when: str) -> None:
        """ServerError where the server has ended."""
        assert self.process is not None  # started
        if (code := self.process.poll()) is not None:
            raise self.error(f"the server ended with {code} {when}")

    def error(self, why: str) -> ServerError:
        """An error with the log's last lines."""
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:] if self.log.is_file() else []
        return ServerError("\n".join([f"{why}; the end of {self.log}:", *("  " + line[:300] for line in lines)]))

    def stop(self, timeout_s: float = 30) -> None:
        """End the whole group and wait for it: SIGTERM, and where that is not enough, or at a second Ctrl-C, SIGKILL."""
        if self.process is None:
            return
        try:
            self._end(timeout_s)
        finally:
            self.kill()

    def _end(self, timeout_s: float) -> None:
        assert self.process is not None  # as stop has seen
        _signal(self.process.pid, signal.SIGTERM, only=True)
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and group(self.process.pid):
            self.process.poll()
            time.sleep(0.05)

    def kill(self, timeout_s: float = 30) -> None:
        """End the whole group at once; ServerError where somebody of it does not end."""
        if self.process is None:
            return
        end = time.monotonic() + timeout_s
        while left := group(self.process.pid):
            if time.monotonic() > end:
                raise ServerError(f"workers: expected none left behind, got {', '.join(map(str, left))} after SIGKILL")
            _signal(self.process.pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.05)
        self.process.wait()

    # ------------------------------------------------------------ asking

    def complete(self, prompt: str, max_tokens: int, timeout_s: float = 300, **parameters: Any) -> Answer:
        """One greedy completion; ServerError for an answer that is none."""
        import httpx

        asked = {
            "model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "seed": 1, "logprobs": 1,
            "return_token_ids": True, **parameters,
        }  # fmt: skip
        try:
            answer = httpx.post(f"{self.url}/v1/completions", json=asked, timeout=timeout_s, trust_env=False)
            answer.raise_for_status()
            body = answer.json()
            choice, usage = body["choices"][0], body["usage"]
            return Answer(
                body["id"], prompt, choice["text"], choice["token_ids"], choice["logprobs"]["token_logprobs"],
                usage["prompt_tokens"], usage["completion_tokens"],
            )  # fmt: skip
        except httpx.HTTPError as error:
            self.check_alive("while it was asked")
            raise self.error(f"{type(error).__name__}: {error}") from None
        except (ValueError, LookupError, TypeError) as error:
            got = f"{type(error).__name__}: {error}"
            raise self.error(f"/v1/completions: expected a completion with token ids, got {got}") from None

    def _get(self, path: str, timeout_s: float) -> Any:
        """A proxy of the environment's is not for a server of our own."""
        import httpx

        return httpx.get(f"{self.url}{path}", timeout=timeout_s, trust_env=False)

    def metrics(self) -> dict[str, float]:
        """The numbers of ``/metrics``, labels summed over."""
        found: dict[str, float] = {}
        for line in self._get("/metrics", 30).text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
        return found


def at_a_time(ask: Callable[[T], Answer], items: Sequence[T], concurrency: int) -> Iterator[Answer]:
    """The answer to each item in their order, so many asked at a time."""
    with ThreadPoolExecutor(concurrency) as pool:
        yield from pool.map(ask, items)


def decode_seconds(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[float, float]:
    """(seconds of decode, tokens made in them) between two looks at the metrics. A request's first token comes of its prompt."""
    seconds, tokens, requests = (
        after[name] - before.get(name, 0.0)
        for name in (
            "vllm:request_decode_time_seconds_sum",
            "vllm:generation_tokens_total",
            "vllm:request_decode_time_seconds_count",
        )
    )
    return seconds, tokens - requests


def serve_command(endpoint: Endpoint, program: str = "vllm", *, model: str | None = None, port: int | None = None) -> list[str]:
    """The line that serves an endpoint, or another model or on another port as it says."""
    return [
        program, "serve", model or endpoint.model, "--host", endpoint.host, "--port", str(port or endpoint.port),
        "--served-model-name", endpoint.served_name, *endpoint.args,
    ]  # fmt: skip


def end_with_parent() -> None:
    """In a child: SIGTERM where the process that started it is gone, killed for one."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def word_after(command: Sequence[str], option: str, default: str) -> str:
    """The value of an option in a command line, ``--option value`` or ``--option=value``."""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word == option:
            return following
        if word.startswith(option + "="):
            return word.partition("=")[2]
    return default


def group(leader: int) -> list[int]:
    """The processes of a session that a server was started in, zombies left out."""
    import psutil

    found = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if os.getsid(process.pid) == leader and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.Error):
            continue
    return found


def _signal(leader: int, what: signal.Signals, *, only: bool = False) -> None:
    """Signal the leader alone, or everybody of its session."""
    for pid in [leader] if only else group(leader):
        try:
            os.kill(pid, what)
        except ProcessLookupError:
            continue
