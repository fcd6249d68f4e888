"""Start children and listen to them: time-outs, deaths and logs are turned into messages here.

Children are forked from a server process that has imported torch and run nothing, so a fresh process costs
milliseconds and shares nothing with a kernel that ran before it.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from replay.devices import SPIN_COUNT, cpu_facts
from replay.errors import EnvironmentRefused, InputError
from replay.model import Kernel
from replay.session.child import (
    Done,
    Found,
    Listed,
    Measured,
    Message,
    Raised,
    Refused,
    Started,
    Tested,
    calibrate_main,
    health_main,
    kernels_main,
    probe_main,
)
from replay.session.journal import Selftested
from replay.session.selftest import selftest_main, unasked
from replay.timing.ceilings import Calibration

context = multiprocessing.get_context("forkserver")
PROBE_TIMEOUT_S = 60.0
CALIBRATE_TIMEOUT_S = 300.0
IMPORT_TIMEOUT_S = 120.0
SELFTEST_TIMEOUT_S = 300.0  # the first time on a machine it compiles
PRELOAD = ["numpy", "torch", "replay.session.child", "replay.kernels.eager"]


def warm_start() -> None:
    """Let the fork server import torch while the parent reads the capture."""
    from multiprocessing import forkserver

    os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    context.set_forkserver_preload(PRELOAD)
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
    """What a device reaches, measured in a child. EnvironmentRefused where it is not there or does not come back."""
    probe(device)
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


def kernels_of_file(file: str) -> tuple[Kernel, ...]:
    """The kernels of a user's file, imported in a child: this process runs nobody's code. InputError as ``load_file`` says."""
    worker = Worker(kernels_main, file, timeout_s=IMPORT_TIMEOUT_S)
    found: tuple[Kernel, ...] = ()
    for message in worker.listen():
        if isinstance(message, Listed):
            found = message.kernels
        if isinstance(message, Refused):
            raise InputError(message.where, message.field, message.expected, message.got)
        if isinstance(message, Died):
            raise InputError(file, "--load", "a file that imports", message.how)
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
    """The child ended or fell silent before it was done; ``index`` is the case it was at, ``seat`` its place among those that
    take turns."""

    index: int
    timed_out: bool
    how: str
    log_tail: str
    seat: int = 0

    @property
    def status(self) -> Ending:
        """What is recorded for the case it was at."""
        return "TIMEOUT" if self.timed_out else "DEVICE_LOST" if device_lost(self.log_tail) else "CRASHED"


class Worker:
    """One child process and its pipe. ``listen`` yields its messages and ends after Done or Died."""

    def __init__(self, main: Callable[..., None], *args: Any, timeout_s: float, seat: int = 0) -> None:
        fd, log = tempfile.mkstemp(prefix="b70-child-", suffix=".log")
        os.close(fd)
        self.log = Path(log)
        self.timeout_s = timeout_s
        self.index, self.seat = 0, seat  # index: of the case that it is at
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=main, args=(theirs, *args, str(self.log)), daemon=True)
        self.process.start()
        theirs.close()

    def listen(self) -> Generator[Message | Died, None, None]:
        """Messages as they come. A child that says nothing for its ``timeout_s`` is killed."""
        return listen([self], self.timeout_s)

    def receive(self) -> Message | Died:
        """The next message, which is there; or how it ended."""
        try:
            message: Message = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            return self.died()
        if isinstance(message, Started):
            self.index = message.index
        return message

    def died(self, silent_s: float | None = None) -> Died:
        """What is to be told of a child that ended before it was done, or was silent for so long; it is no more then."""
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-8:])
        self.stop()
        how = _ending(self.process.exitcode) if silent_s is None else f"silent for {silent_s:.0f} s"
        return Died(self.index, silent_s is not None, how, tail, self.seat)

    def stop(self) -> None:
        """End the child and whatever it started, wait for it, and remove its log."""
        self.process.join(0.2)
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.killpg(self.process.pid, signal.SIGKILL)  # type: ignore[arg-type]  # a started process has a pid
        self.process.join(5)
        self.pipe.close()
        self.log.unlink(missing_ok=True)


def listen(workers: Sequence[Worker], timeout_s: float) -> Generator[Message | Died, None, None]:
    """What some workers say, as it comes. It ends when all are done, one has died, or all were silent for ``timeout_s``."""
    talking = {worker.pipe: worker for worker in workers}
    try:
        while talking:
            ready = multiprocessing.connection.wait(list(talking), timeout_s)
            if not ready:
                yield next(iter(talking.values())).died(timeout_s)
                return
            for pipe in ready:
                message = talking[pipe].receive()  # type: ignore[index]  # they are the pipes that were waited for
                if isinstance(message, Done):
                    del talking[pipe]  # type: ignore[arg-type]
                yield message
                if isinstance(message, Died):
                    return
    finally:
        for worker in workers:
            worker.stop()


def _ending(code: int | None) -> str:
    if code is None:
        return "no exit code"
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
