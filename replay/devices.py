"""The one module that knows cpu, xpu and cuda apart.

A device is named ``cpu``, ``xpu``, ``cuda``, or with an index ``xpu:1``. SYCL kernels run on ``cpu`` through the SYCL
CPU device and on ``xpu`` on the stream torch uses, so one table can hold eager and SYCL arms side by side.
"""

import functools
import math
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from replay.errors import EnvironmentRefused, InputError

if TYPE_CHECKING:
    import torch

KINDS = ("cpu", "xpu", "cuda")
UNKNOWN = "unknown"
# Operands that pass the last-level cache so many times leave nothing of themselves in it.
CACHE_PASSES = 3
# How often torch's OpenMP threads on a CPU look for more work before they sleep: some 80 µs, where by themselves they keep a core
# for four milliseconds behind every operation, the harness's own included, and SYCL's threads from it. After SPIN_NS it is over.
SPIN_COUNT, SPIN_NS = 3000, 150_000


def parse(name: str) -> str:
    """Check a device name without touching the device; InputError otherwise."""
    kind, colon, index = name.partition(":")
    if kind not in KINDS or (colon and not index.isdigit()) or (kind == "cpu" and colon):
        raise InputError("--device", "name", "cpu, xpu[:N] or cuda[:N]", repr(name))
    return name


class Device:
    """Allocation, copies, waiting, events, graphs and facts of one device. Making one imports torch and looks for the device."""

    def __init__(self, name: str) -> None:
        import torch

        self.name = parse(name)
        self.kind = name.partition(":")[0]
        self.module: Any = torch.get_device_module(self.kind)
        if self.kind != "cpu" and not self.module.is_available():
            raise EnvironmentRefused(f"--device: {name}: torch {torch.__version__} sees no such device")
        if self.kind != "cpu":
            self.module.set_device(int(name.partition(":")[2] or 0))
        self.flushing: torch.Tensor | None = None

    def empty_bytes(self, nbytes: int) -> "torch.Tensor":
        """Uninitialised uint8 [nbytes] at a fresh address. On the CPU numpy asks for huge pages where it helps."""
        import torch

        if self.kind == "cpu":
            return torch.from_numpy(np.empty(max(nbytes, 1), np.uint8))[:nbytes]
        return torch.empty(nbytes, dtype=torch.uint8, device=self.name)

    def synchronize(self) -> None:
        """Wait for all work on the device, on whatever stream."""
        if self.kind != "cpu":
            self.module.synchronize()

    def event(self) -> Any:
        """An event that can be timed, for the current stream of an accelerator."""
        import torch

        return torch.Event(self.kind, enable_timing=True)

    def filler(self) -> tuple[Callable[[], object], int]:
        """(work that keeps an accelerator busy for longer than it takes to queue, its ns). It leaves half of the cache alone."""
        import torch

        # A product in f64: two square matrices that fill half of the cache and keep every multiplier busy.
        size = math.isqrt(self.llc_bytes() // 32) // 64 * 64
        a, b = (torch.ones(size, size, dtype=torch.float64, device=self.name) for _ in range(2))
        call = functools.partial(torch.mm, a, a, out=b)
        return call, min(self._event_ns(call) for _ in range(5))

    def _event_ns(self, call: Callable[[], object], calls: int = 8) -> int:
        begin, end = self.event(), self.event()
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        self.synchronize()
        return max(int(begin.elapsed_time(end) * 1e6) // calls, 1)

    def graph(self, work: Callable[[], None]) -> Callable[[], object]:
        """Capture what the work queues on the current stream, and return what replays it. An accelerator's only.

        The work has run before, outside of any capture. RuntimeError where it waits for the device in between.
        """
        import torch

        if hasattr(torch.accelerator, "Graph"):
            graph = torch.accelerator.Graph()
            with torch.Stream(self.kind), graph:
                work()
        else:
            graph = self.module.CUDAGraph() if self.kind == "cuda" else self.module.XPUGraph()
            with self.module.graph(graph):
                work()
        replay: Callable[[], object] = graph.replay
        return replay

    def flush(self) -> None:
        """Push everything out of the caches: read three times the size of the last one. What was written is written back then."""
        import torch

        if self.flushing is None:
            self.flushing = self.empty_bytes(CACHE_PASSES * self.llc_bytes() // 8 * 8)
            self.flushing.fill_(0)
        self.flushing.view(torch.int64).sum()

    def threads(self) -> int:
        """How many threads torch's CPU operations take."""
        import torch

        return torch.get_num_threads()

    def put_back(self, threads: int) -> str | None:
        """Let them take so many again: what somebody had made of it, or None. All other kernels would pay for it."""
        import torch

        if (found := self.threads()) == threads:
            return None
        torch.set_num_threads(threads)
        return f"changed torch's number of threads from {threads} to {found}"

    def llc_bytes(self) -> int:
        """Size of the last-level cache; 32 MiB where it cannot be read."""
        if self.kind == "cpu":
            return _cpu_llc_bytes()
        properties = self.module.get_device_properties(self.name)
        return int(getattr(properties, "L2_cache_size", 0) or getattr(properties, "last_level_cache_size", 0) or 32 << 20)

    def free_bytes(self) -> int:
        """Memory that is free on the device now."""
        if self.kind == "cpu":
            import psutil

            return int(psutil.virtual_memory().available)
        return int(self.module.mem_get_info(self.name)[0])

    def healthy(self) -> bool:
        """Whether a small sum comes out right; a lost device raises."""
        import torch

        n = 1 << 16
        return int(torch.arange(n, device=self.name).sum()) == n * (n - 1) // 2

    def description(self) -> str:
        """Model name, as the identity records it."""
        if self.kind == "cpu":
            return cpu_model()
        return str(self.module.get_device_name(self.name))

    def facts(self) -> dict[str, Any]:
        """What the identity keeps of the device: name, kind, driver, runtime, memory in bytes; unknown is ``unknown``."""
        import torch

        if self.kind == "cpu":
            return cpu_facts()
        properties = self.module.get_device_properties(self.name)
        runtime = {"xpu": getattr(torch.version, "xpu", None), "cuda": torch.version.cuda}[self.kind]
        return {
            "name": self.description(),
            "kind": self.kind,
            "driver": str(getattr(properties, "driver_version", None) or _nvidia_driver() or UNKNOWN),
            "runtime": str(runtime or UNKNOWN),
            "memory_bytes": int(getattr(properties, "total_memory", 0)) or UNKNOWN,
        }


# By data sheet: GB/s of memory, GOP/s of dense int8 and bf16 products. Part of a device's name → rates.
_DATA_SHEETS = {
    "B70": {"read_gbs": 608, "int8_gops": 367_000},
    "H200": {"read_gbs": 4800, "int8_gops": 1_979_000, "bf16_gops": 989_000},
}


def data_sheet(name: str) -> dict[str, int]:
    """What a known device is said to reach; empty for others."""
    return next((rates for part, rates in _DATA_SHEETS.items() if part in name), {})


def cpu_facts() -> dict[str, Any]:
    """The CPU as a device: its driver is the OpenCL runtime that SYCL kernels run through, where there is one."""
    import psutil

    def dist(name: str) -> str:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return "none"

    return {
        "name": cpu_model(),
        "kind": "cpu",
        "driver": dist("intel-opencl-rt"),
        "runtime": dist("intel-sycl-rt"),
        "memory_bytes": int(psutil.virtual_memory().total),
    }


def _nvidia_driver() -> str | None:
    """The NVIDIA kernel driver's version, as the driver itself says it."""
    try:
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        return None
    return next((word for word in first.split() if word[0].isdigit()), None)


def cpu_model() -> str:
    """The CPU's model name and core count."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or "unknown"
    import os

    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def _cpu_llc_bytes() -> int:
    sizes = [32 << 20]
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = index.read_text().strip()
        sizes.append(int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1], 0))
    return max(sizes[1:] or sizes)
