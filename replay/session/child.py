"""What runs in a child process: the judging of one kernel, and the timing of the green ones together.

A child never holds an expected output: it sends back what the kernel wrote, and the parent, which never runs a kernel,
compares. Messages are the dataclasses below, over one pipe.
"""

import contextlib
import ctypes
import os
import signal
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from replay.devices import Device
from replay.exactness import Got
from replay.kernels.registry import load_file
from replay.model import Case, Ceilings, Kernel, Sample
from replay.session.arms import Arms, Ring
from replay.session.buffers import POISON_BYTES, checksum
from replay.timing import spans


@dataclass(frozen=True)
class Started:
    """A case was begun; the parent's clock for a time-out starts here."""

    index: int


@dataclass(frozen=True)
class Ran:
    """A kernel came back on every repeat; ``trespasses`` is what it wrote outside its outputs."""

    index: int
    repeats: tuple[Got, ...]
    trespasses: tuple[str, ...]


@dataclass(frozen=True)
class Raised:
    """A kernel raised; the child goes on with the next case."""

    index: int
    summary: str
    trace: str


@dataclass(frozen=True)
class Ceiled:
    """Ceilings, measured ``before`` or ``after`` the samples."""

    when: str
    ceilings: Ceilings


@dataclass(frozen=True)
class Sampled:
    """All samples of one case, and outputs snatched from timed calls: kernel → binding's inputs' set and outputs."""

    index: int
    samples: tuple[Sample, ...]
    outputs: dict[str, Got]


@dataclass(frozen=True)
class Done:
    """The child has nothing left to do."""


Message = Started | Ran | Raised | Ceiled | Sampled | Done

_PR_SET_PDEATHSIG = 1


def _begin(load: tuple[str, ...]) -> None:
    """Die with the parent, leave Ctrl-C to it, and know the user's kernels."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for file in load:
        load_file(file)


def _log_to(log: str) -> None:
    """Send this process's stdout and stderr, native code's included, to a file."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def judge_main(
    pipe: Connection, kernel: Kernel, cases: tuple[Case, ...], device_name: str, repeats: int, load: tuple[str, ...], log: str
) -> None:
    """Run one kernel on each case, ``repeats`` times each on fresh addresses, and send back what it wrote."""
    _log_to(log)
    with contextlib.suppress(BrokenPipeError):
        try:
            _begin(load)
            arms = Arms(Device(device_name))
        except Exception as error:  # told once a case, as the parent expects an answer to each
            for index in range(len(cases)):
                pipe.send(Raised(index, f"{type(error).__name__}: {error}", traceback.format_exc()))
            pipe.send(Done())
            return
        for index, case in enumerate(cases):
            pipe.send(Started(index))
            try:
                pipe.send(_run_case(arms, kernel, case, index, repeats))
            except Exception as error:  # the boundary to user code: whatever it raises is this case's outcome
                pipe.send(Raised(index, f"{type(error).__name__}: {error}".splitlines()[0], traceback.format_exc()))
        pipe.send(Done())


def _run_case(arms: Arms, kernel: Kernel, case: Case, index: int, repeats: int) -> Ran:
    inputs = arms.begin(case)
    weights = arms.weights(kernel, inputs)
    before = checksum(weights)
    run = arms.prepare(kernel, weights)
    kept, trespasses = [], []
    bindings = []  # kept alive, so that every repeat has addresses of its own
    for repeat in range(repeats):
        binding = arms.binding(inputs, weights)
        binding.poison_outputs(POISON_BYTES[repeat % len(POISON_BYTES)])
        bindings.append(binding)
        run(binding.tensors)
        arms.device.synchronize()
        kept.append(Got(binding.outputs(), binding.poison))
        trespasses += [t for t in binding.trespasses() if t not in trespasses]
    if checksum(weights) != before:
        trespasses.append("changed the weights")
    return Ran(index, tuple(kept), tuple(trespasses))


def time_main(
    pipe: Connection,
    at_arm: Any,
    jobs: tuple[tuple[Case, tuple[Kernel, ...]], ...],
    device_name: str,
    options: spans.Options,
    load: tuple[str, ...],
    log: str,
) -> None:
    """Time the green kernels of each case in blocks. ``at_arm`` is shared: the index of the arm being called."""
    _log_to(log)
    with contextlib.suppress(BrokenPipeError):
        _begin(load)
        device = Device(device_name)
        arms = Arms(device)
        pipe.send(Ceiled("before", spans.ceilings(device)))
        for index, (case, kernels) in enumerate(jobs):
            pipe.send(Started(index))
            inputs = arms.begin(case)
            ring = Ring(arms, case, inputs, options.cache)
            runs = {}
            for number, kernel in enumerate(kernels):
                at_arm.value = number
                runs[kernel.id] = ring.runs(kernel)
            flags = () if ring.cold or options.cache == "warm" or ring.slots is None else ("not_cold",)
            timer = spans.Timer(device, ring.bindings, runs, options, flags, at_arm)
            samples, outputs = timer.blocks(str(case.id))
            at_arm.value = -1
            pipe.send(Sampled(index, samples, outputs))
        pipe.send(Ceiled("after", spans.ceilings(device)))
        pipe.send(Done())
