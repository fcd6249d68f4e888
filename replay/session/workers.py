"""Start children and listen to them: time-outs, deaths and logs are turned into messages here.

Children are forked from a server process that has imported torch and run nothing, so a fresh process costs
milliseconds and shares nothing with a kernel that ran before it.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from replay.devices import cpu_facts
from replay.errors import EnvironmentRefused
from replay.session.child import (
    Done,
    Found,
    Measured,
    Message,
    Raised,
    Started,
    Tested,
    calibrate_main,
    health_main,
    probe_main,
)
from replay.session.journal import Selftested
from replay.session.selftest import selftest_main, unasked
from replay.timing.ceilings import Calibration

_context = multiprocessing.get_context("forkserver")
PROBE_TIMEOUT_S = 60.0
CALIBRATE_TIMEOUT_S = 300.0
SELFTEST_TIMEOUT_S = 300.0  # the first time on a machine it compiles
PRELOAD = ["numpy", "torch", "replay.session.child", "replay.kernels.eager"]


def warm_start() -> None:
    """Let the fork server import torch while the parent reads the capture."""
    from multiprocessing import forkserver

    _context.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()


def probe(device: str) -> dict[str, Any]:
    """The facts of a device that an identity keeps; asked in a child, since this process imports no torch.

    EnvironmentRefused where the device is not there.
    """
    if device == "cpu":
        return cpu_facts()
    worker = Worker(probe_main, device, timeout_s=PROBE_TIMEOUT_S)
    facts: dict[str, Any] = {}
    for message in worker.listen():
        if isinstance(message, Found):
            facts = message.facts
        if isinstance(message, Raised):
            raise EnvironmentRefused(message.summary)
        if isinstance(message, Died):
            raise EnvironmentRefused(f"--device: {device}: the probe died: {message.how}")
    return facts


def calibrated(device: str) -> Calibration:
    """What a device reaches, measured in a child. EnvironmentRefused where it does not come back."""
    worker = Worker(calibrate_main, device, timeout_s=CALIBRATE_TIMEOUT_S)
    for message in worker.listen():
        if isinstance(message, Measured):
            return message.calibration
        if isinstance(message, Died):
            raise EnvironmentRefused(f"--device: {device}: the calibration died: {message.how}: {message.log_tail}")
    raise EnvironmentRefused(f"--device: {device}: the calibration ended without an answer")


def selftested(device: str) -> Selftested:
    """What the device answers to its self-tests, asked in a child."""
    if why := unasked(device):
        return Selftested((), unasked=why)
    worker = Worker(selftest_main, device, timeout_s=SELFTEST_TIMEOUT_S)
    found = Selftested((), died="ended without an answer")
    for message in worker.listen():
        if isinstance(message, Tested):
            found = Selftested(message.findings)
        if isinstance(message, Died):
            found = Selftested((), died=f"{message.how}: {message.log_tail}")
    return found


Ending = Literal["CRASHED", "TIMEOUT", "DEVICE_LOST"]

# What the runtimes say when a device is gone: Unified Runtime, Level Zero, CUDA, in whatever sentence.
_LOST = re.compile(r"DEVICE_LOST|device (is |was |has been )?lost|GPU is lost|fallen off the bus", re.IGNORECASE)


def device_lost(text: str) -> bool:
    """Whether an error's text says that the device is gone."""
    return _LOST.search(text) is not None


def healthy(device: str) -> bool:
    """Whether a fresh process can compute on the device."""
    worker = Worker(health_main, device, timeout_s=PROBE_TIMEOUT_S)
    return any(isinstance(message, Found) for message in worker.listen())


@dataclass(frozen=True)
class Died:
    """The child ended or fell silent before it was done; ``index`` is the case it was at."""

    index: int
    timed_out: bool
    how: str
    log_tail: str

    @property
    def status(self) -> Ending:
        """What is recorded for the case it was at."""
        return "TIMEOUT" if self.timed_out else "DEVICE_LOST" if device_lost(self.log_tail) else "CRASHED"


class Worker:
    """One child process and its pipe. ``listen`` yields its messages and ends after Done or Died."""

    def __init__(self, main: Callable[..., None], *args: Any, timeout_s: float, shared: bool = False) -> None:
        fd, log = tempfile.mkstemp(prefix="b70-child-", suffix=".log")
        os.close(fd)
        self.log = Path(log)
        self.timeout_s = timeout_s
        self.at_arm = _context.RawValue("i", -1)
        self.pipe, theirs = _context.Pipe()
        head = (theirs, self.at_arm) if shared else (theirs,)
        self.process = _context.Process(target=main, args=(*head, *args, str(self.log)), daemon=True)
        self.process.start()
        theirs.close()

    def listen(self) -> Iterator[Message | Died]:
        """Messages as they come. A child that says nothing for ``timeout_s`` is killed."""
        index = 0
        try:
            while True:
                if not self.pipe.poll(self.timeout_s):
                    yield self._died(index, timed_out=True)
                    return
                try:
                    message: Message = self.pipe.recv()
                except (EOFError, ConnectionResetError):
                    yield self._died(index, timed_out=False)
                    return
                if isinstance(message, Done):
                    yield message
                    return
                if isinstance(message, Started):
                    index = message.index
                yield message
        finally:
            self.stop()

    def _died(self, index: int, *, timed_out: bool) -> Died:
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-8:])
        self.stop()
        how = f"silent for {self.timeout_s:.0f} s" if timed_out else _ending(self.process.exitcode)
        return Died(index, timed_out, how, tail)

    def stop(self) -> None:
        """End the child and whatever it started, wait for it, and remove its log."""
        self.process.join(0.2)
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.killpg(self.process.pid, signal.SIGKILL)  # type: ignore[arg-type]  # a started process has a pid
        self.process.join(5)
        self.pipe.close()
        self.log.unlink(missing_ok=True)


def _ending(code: int | None) -> str:
    if code is None:
        return "no exit code"
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
