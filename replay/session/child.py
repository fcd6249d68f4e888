"""What runs in a child process: the judging of one kernel; sampling.py has the timing of the green ones together.

A child never holds an expected output: it sends back what the kernel wrote, and the parent, which never runs a kernel,
compares. Messages are the dataclasses below, over one pipe.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

import replay
from replay.devices import Device
from replay.errors import EnvironmentRefused, InputError
from replay.exactness import Got
from replay.exactness.judge import TWIN
from replay.kernels.registry import checked_file, load_file
from replay.model import Case, Ceilings, Finding, Kernel, MemoryRates, Prepack, Sample, Twin
from replay.session.arms import Arms
from replay.session.buffers import POISON_BYTES, checksum
from replay.stages import STAGES
from replay.stages.stage import Outputs, Tensors
from replay.stages.vary import twin_of
from replay.timing.ceilings import Calibration, calibrate
from replay.timing.watch import Watched


@dataclass(frozen=True)
class Found:
    """A device is there; the facts of it that an identity keeps."""

    facts: dict[str, Any]


@dataclass(frozen=True)
class Tested:
    """What the device answered to its self-tests."""

    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Listed:
    """The kernels that a user's file registers."""

    kernels: tuple[Kernel, ...]


@dataclass(frozen=True)
class Refused:
    """The fields of an InputError."""

    where: str
    field: str
    expected: str
    got: str


@dataclass(frozen=True)
class Measured:
    """What the device reaches."""

    calibration: Calibration


@dataclass(frozen=True)
class Started:
    """A case was begun; the parent's clock for a time-out starts here."""

    index: int


@dataclass(frozen=True)
class Ran:
    """A kernel came back on every repeat; ``twins`` are its answers to the case's twins, ``trespasses`` what it wrote
    outside its outputs."""

    index: int
    repeats: tuple[Got, ...]
    twins: dict[Twin, Got]
    trespasses: tuple[str, ...]
    prepack: Prepack | None


@dataclass(frozen=True)
class Linked:
    """One step of a chain, taken twice: what the kernel wrote, and what it wrote that it must not."""

    outputs: Outputs
    again: Outputs
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
    """All samples of one case; outputs snatched from timed calls and, at the same addresses, on the second case's
    bytes (arm → outputs); what arms wrote that they must not; and the memory ceilings before and behind."""

    index: int
    samples: tuple[Sample, ...]
    outputs: dict[str, Got]
    second: dict[str, Got]
    trespasses: dict[str, str]
    memory: tuple[MemoryRates, MemoryRates] | None = None


@dataclass(frozen=True)
class Looked:
    """What went on beside the samples of this process."""

    watched: Watched


@dataclass(frozen=True)
class Done:
    """The child has nothing left to do; ``files`` are those it had loaded by then, as ``loaded_files`` lists them."""

    files: tuple[str, ...] = ()


Message = Found | Listed | Refused | Measured | Tested | Started | Ran | Linked | Raised | Ceiled | Sampled | Looked | Done

_PR_SET_PDEATHSIG = 1
# How long a kernel may go on in secret before its outputs are looked at once more.
LINGER_S = 0.01
# Of the memory that is free when a child begins, what it may take.
MEMORY_SHARE = 0.9


def raised(index: int, error: BaseException) -> Raised:
    """An exception as a message, whatever its text is made of."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = f"{type(error).__name__}: (its text cannot be shown)"
    lines = text.strip().splitlines() or [type(error).__name__]
    return Raised(index, _printable(lines[0]), _printable("".join(traceback.format_exception(error))))


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def loaded_files() -> tuple[str, ...]:
    """Native libraries mapped into this process, device binaries its SYCL runtime was given, and Python modules that
    are neither this package's, the standard library's nor an installed distribution's. A library that was replaced on
    disk since it was mapped ends in ``(deleted)``, as the kernel says it."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        mapped = {fields[5] for line in maps if len(fields := line.rstrip("\n").split(maxsplit=5)) == 6}
    libraries = {path for path in mapped if path.startswith("/") and ".so" in Path(path).name}
    runtime = sys.modules.get("replay.kernels.sycl.runtime")
    binaries = {str(path) for path in runtime.binaries} if runtime else set()
    folders = (*(sysconfig.get_path(p) for p in ("stdlib", "purelib", "platlib")), str(Path(replay.__file__).parent))
    known = tuple(folder + os.sep for folder in folders)
    specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
    origins = {spec.origin for spec in specs if spec is not None and isinstance(spec.origin, str)}
    users = {o for o in origins if os.path.isabs(o) and not o.startswith(known) and os.path.isfile(o)}
    return tuple(sorted(libraries | binaries | users))


def begin(load: tuple[str, ...]) -> None:
    """Die with the parent, leave Ctrl-C to it, lead a group that ends together, stay within the memory that is there, and
    know the user's kernels."""
    os.setsid()
    _limit_memory()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for file in load:
        load_file(file)


def _limit_memory() -> None:
    """Let a kernel that asks for too much fail by itself, before the machine ends whomever it likes."""
    used = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:"))
    limit = (int(used.split()[1]) << 10) + int(MEMORY_SHARE * psutil.virtual_memory().available)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def log_to(log: str) -> None:
    """Send this process's stdout and stderr, native code's included, to a file."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def probe_main(pipe: Connection, device_name: str, log: str) -> None:
    """Say whether a device is there, and what it is."""
    log_to(log)
    try:
        pipe.send(Found(Device(device_name).facts()))
    except EnvironmentRefused as error:
        pipe.send(Raised(0, str(error), ""))
    pipe.send(Done())


def kernels_main(pipe: Connection, file: str, log: str) -> None:
    """List the kernels of a user's file."""
    log_to(log)
    begin(())
    try:
        pipe.send(Listed(checked_file(file)))
    except InputError as error:
        pipe.send(Refused(error.where, error.field, error.expected, error.got))
    pipe.send(Done())


def calibrate_main(pipe: Connection, device_name: str, log: str) -> None:
    """Measure the ceilings of a device, and what lies below them."""
    log_to(log)
    begin(())
    pipe.send(Measured(calibrate(Device(device_name))))
    pipe.send(Done())


def health_main(pipe: Connection, device_name: str, log: str) -> None:
    """Say so when the device computes."""
    log_to(log)
    if Device(device_name).healthy():
        pipe.send(Found({}))
    pipe.send(Done())


def judge_main(
    pipe: Connection, kernel: Kernel, cases: tuple[Case, ...], device_name: str, repeats: int, load: tuple[str, ...], log: str
) -> None:
    """Run one kernel on each case, ``repeats`` times each on fresh addresses, and send back what it wrote."""
    log_to(log)
    with contextlib.suppress(BrokenPipeError):
        try:
            begin(load)
            arms = Arms(Device(device_name))
        except Exception as error:  # told once a case, as the parent expects an answer to each
            for index in range(len(cases)):
                pipe.send(raised(index, error))
            pipe.send(Done())
            return
        for index, case in enumerate(cases):
            pipe.send(Started(index))
            try:
                pipe.send(_run_case(arms, kernel, case, index, repeats))
            except BaseException as error:  # the boundary to user code: whatever it raises is this case's outcome
                pipe.send(raised(index, error))
        pipe.send(Done(loaded_files()))


def _run_case(arms: Arms, kernel: Kernel, case: Case, index: int, repeats: int) -> Ran:
    inputs = arms.begin(case)
    second = STAGES[case.problem.stage].inputs(case.twinned("second"))
    weights = arms.weights(kernel, inputs)

    def work() -> Ran:
        # The second case comes between two repeats of the first: whatever is remembered from one shows in the other.
        ran = _calls(arms, kernel, weights, index, [inputs, second, *[inputs] * (repeats - 1)])
        first, other, *rest = ran.repeats
        ran = replace(ran, repeats=(first, *rest), twins={"second": other})
        ran = _run_strided(arms, kernel, weights, case, ran) if "strided" in kernel.layouts else ran
        return _run_edges(arms, kernel, weights, case, ran) if STAGES[case.problem.stage].edges else ran

    return _leaving(weights, work)


def _run_strided(arms: Arms, kernel: Kernel, weights: dict[str, Any], case: Case, ran: Ran) -> Ran:
    """Two more calls, on strided inputs: the case's bytes and the other ones, under either poison. The weights are the
    same, since a case that has any is not doubled."""
    print(TWIN["strided"], flush=True)  # what a log ends with, should the kernel die here
    stage = STAGES[case.problem.stage]
    try:
        given = arms.begin(twin_of(stage, case, "strided")), stage.inputs(twin_of(stage, case, "strided second"))
        strided = _calls(arms, kernel, weights, ran.index, list(given))
    except Exception as error:
        raise RuntimeError(f"{TWIN['strided']}{type(error).__name__}: {error}") from error
    found = [TWIN["strided"] + t for t in strided.trespasses if t not in ran.trespasses]
    answers: dict[Twin, Got] = dict(zip(("strided", "strided second"), strided.repeats, strict=True))
    return replace(ran, twins=ran.twins | answers, trespasses=(*ran.trespasses, *found))


def _run_edges(arms: Arms, kernel: Kernel, weights: dict[str, Any], case: Case, ran: Ran) -> Ran:
    """A call on the case's edges, under the poison that no index has; prepared anew, since they are more rows. Only stages
    without weights have any."""
    print(TWIN["edges"], flush=True)  # as above
    try:
        given = arms.begin(twin_of(STAGES[case.problem.stage], case, "edges"))
        edges = _calls(arms, kernel, weights, ran.index, [given, given])
    except Exception as error:
        raise RuntimeError(f"{TWIN['edges']}{type(error).__name__}: {error}") from error
    found = [TWIN["edges"] + t for t in edges.trespasses if t not in ran.trespasses]
    return replace(ran, twins=ran.twins | {"edges": edges.repeats[-1]}, trespasses=(*ran.trespasses, *found))


def judged_calls(arms: Arms, kernel: Kernel, case: Case, index: int, calls: list[Tensors]) -> Ran:
    """One call for each set of inputs, all with the weights of the first; poisoned, guarded, at fresh addresses."""
    weights = arms.weights(kernel, calls[0])
    return _leaving(weights, lambda: _calls(arms, kernel, weights, index, calls))


def _leaving(weights: dict[str, Any], work: Callable[[], Ran]) -> Ran:
    """What comes of some calls that must leave the weights as they are; looked at once, since the tables are large."""
    before = checksum(weights)
    ran = work()
    return ran if checksum(weights) == before else replace(ran, trespasses=(*ran.trespasses, "changed the weights"))


def _calls(arms: Arms, kernel: Kernel, weights: dict[str, Any], index: int, calls: list[Tensors]) -> Ran:
    run = arms.prepare(kernel, weights)
    kept: list[Got] = []
    trespasses: list[str] = []
    bindings = []  # kept alive, so that every call has addresses of its own
    for call, given in enumerate(calls):
        binding = arms.binding(given, weights)
        binding.poison_outputs(POISON_BYTES[call % len(POISON_BYTES)])
        bindings.append(binding)
        run(binding.tensors)
        arms.device.synchronize()
        kept.append(Got(binding.outputs(), binding.poison))
        trespasses += [t for t in binding.trespasses() if t not in trespasses]
    time.sleep(LINGER_S)
    if any(not _same(got.outputs, binding.outputs()) for got, binding in zip(kept, bindings, strict=True)):
        trespasses.append("went on writing after it had returned")
    return Ran(index, tuple(kept), {}, tuple(trespasses), arms.prepack_of(kernel))


def _same(before: Outputs, after: Outputs) -> bool:
    return all(before[name].tobytes() == after[name].tobytes() for name in before)
