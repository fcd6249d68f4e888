"""What went on beside the timed spans: the kernel's own clock, who else used the processors, how the device was.

The kernel's clock is read as text from ``/proc/uptime``, which nothing that patches ``time`` reaches.
"""

from dataclasses import dataclass
from pathlib import Path

import psutil

from replay.model import Value
from replay.timing import clocks
from replay.timing.telemetry import Machine, Telemetry

# Two clocks that part by more than this, over seconds, are not both right; the kernel's is read in steps of 10 ms.
CLOCKS_AGREE = 0.05
CLOCK_STEP_NS = 20_000_000
# A foreign process that kept a tenth of a core busy all the time disturbs what is timed beside it.
BUSY_CORES = 0.1


class Watched(Value, frozen=True):
    """Nanoseconds by the spans' clock and by the kernel's, the cores that each foreign process kept busy (``name (pid)`` →
    cores, those below a hundredth left out), and what the device said of itself before and after."""

    clock_ns: int
    kernel_ns: int
    foreign: dict[str, float]
    before: Machine = Machine()
    after: Machine = Machine()


@dataclass(frozen=True)
class Watch:
    """The state of both clocks, of the device, and of every foreign process: name and CPU seconds by pid and time of birth."""

    telemetry: Telemetry
    machine: Machine
    clock_ns: int
    kernel_ns: int
    used: dict[tuple[int, float], tuple[str, float]]

    def until_now(self) -> Watched:
        """What went on since."""
        now = begin(self.telemetry)
        elapsed = max((now.kernel_ns - self.kernel_ns) / 1e9, 1e-9)
        foreign = {}
        for who, (name, seconds) in sorted(now.used.items()):
            cores = (seconds - self.used.get(who, ("", 0.0))[1]) / elapsed
            if cores >= 0.01:
                foreign[f"{name} ({who[0]})"] = round(cores, 3)
        return Watched(now.clock_ns - self.clock_ns, now.kernel_ns - self.kernel_ns, foreign, self.machine, now.machine)


KERNEL_THREADS = 2  # the pid that all of Linux's own threads descend from: nobody can stop them


def begin(telemetry: Telemetry) -> Watch:
    """Begin to watch, in the process that times. Those it descends from are not foreign, nor what the run itself started."""
    me = psutil.Process()
    above = me.parents()
    family = {me.pid, *(p.pid for p in above), *(p.pid for run in above[:2] for p in run.children(recursive=True))}
    used = {}
    for process in psutil.process_iter(["pid", "ppid", "name", "create_time", "cpu_times"]):
        told = process.info
        if told["pid"] not in family and KERNEL_THREADS not in (told["pid"], told["ppid"]) and told["cpu_times"] is not None:
            used[told["pid"], told["create_time"]] = told["name"], told["cpu_times"].user + told["cpu_times"].system
    uptime = Path("/proc/uptime").read_text().split()[0]
    return Watch(telemetry, telemetry.machine(), clocks.host_ns(), round(float(uptime) * 1e9), used)


def clocks_agree(watched: Watched) -> bool:
    """Whether the spans' clock went as fast as the kernel's."""
    apart = abs(watched.clock_ns - watched.kernel_ns)
    return apart <= CLOCKS_AGREE * watched.kernel_ns + CLOCK_STEP_NS


def busy(watched: Watched) -> list[str]:
    """The foreign processes that were in the way."""
    return [who for who, cores in watched.foreign.items() if cores >= BUSY_CORES]
