"""What went on beside the timed spans: the kernel's own clock, and who else used the processors.

The kernel's clock is read as text from ``/proc/uptime``, which nothing that patches ``time`` reaches.
"""

from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns

import psutil

from replay.model import Value

_clock = perf_counter_ns

# Two clocks that part by more than this, over seconds, are not both right; the kernel's is read in steps of 10 ms.
CLOCKS_AGREE = 0.05
CLOCK_STEP_NS = 20_000_000
# A foreign process that kept a tenth of a core busy all the time disturbs what is timed beside it.
BUSY_CORES = 0.1


class Watched(Value, frozen=True):
    """Nanoseconds by the spans' clock and by the kernel's, and the cores that each foreign process kept busy
    (``name (pid)`` → cores), those below a hundredth left out."""

    clock_ns: int
    kernel_ns: int
    foreign: dict[str, float]


@dataclass(frozen=True)
class Watch:
    """The state of both clocks and the CPU seconds of every foreign process at one moment."""

    clock_ns: int
    kernel_ns: int
    seconds: dict[tuple[int, str], float]

    def until_now(self) -> Watched:
        """What went on since."""
        now = begin()
        elapsed = max((now.kernel_ns - self.kernel_ns) / 1e9, 1e-9)
        used = {who: (seconds - self.seconds.get(who, 0.0)) / elapsed for who, seconds in now.seconds.items()}
        foreign = {f"{name} ({pid})": round(cores, 3) for (pid, name), cores in sorted(used.items()) if cores >= 0.01}
        return Watched(now.clock_ns - self.clock_ns, now.kernel_ns - self.kernel_ns, foreign)


def begin() -> Watch:
    """Begin to watch, in the process that times. Those it descends from are not foreign, nor what the run itself started."""
    me = psutil.Process()
    above = me.parents()
    family = {me.pid, *(p.pid for p in above), *(p.pid for run in above[:2] for p in run.children(recursive=True))}
    seconds = {}
    for process in psutil.process_iter(["pid", "name", "cpu_times"]):
        times = process.info["cpu_times"]
        if process.info["pid"] not in family and times is not None:
            seconds[process.info["pid"], process.info["name"]] = times.user + times.system
    uptime = Path("/proc/uptime").read_text().split()[0]
    return Watch(_clock(), round(float(uptime) * 1e9), seconds)


def clocks_agree(watched: Watched) -> bool:
    """Whether the spans' clock went as fast as the kernel's."""
    apart = abs(watched.clock_ns - watched.kernel_ns)
    return apart <= CLOCKS_AGREE * watched.kernel_ns + CLOCK_STEP_NS


def busy(watched: Watched) -> list[str]:
    """The foreign processes that were in the way."""
    return [who for who, cores in watched.foreign.items() if cores >= BUSY_CORES]
