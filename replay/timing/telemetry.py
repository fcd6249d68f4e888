"""A device's clock frequency, throttling, power and temperature, each as far as this machine tells; what it does not tell is
None, which is shown as unknown and never taken for fine.

Sources: Linux's cpufreq and thermal_throttle for a CPU, torch's device module and NVML for CUDA, torch's device module and
the xe driver's files for XPU. All of it is optional.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from replay.devices import Device
from replay.model import Value

SYS = Path("/sys")


class Machine(Value, frozen=True):
    """What a device says of itself at one moment: MHz, °C, W, the governor of its clock; None is unknown."""

    mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_cap_w: float | None = None
    governor: str | None = None
    throttled: bool | None = None


class Telemetry:
    """Reads one device. ``sys`` is where Linux's files are."""

    def __init__(self, device: Device, sys: Path = SYS) -> None:
        self.sources = _cpu(sys) if device.kind == "cpu" else _accelerator(device, sys)

    def _read(self, name: str) -> Any:
        source = self.sources.get(name)
        if source is None:
            return None
        try:
            return source()
        except Exception:  # a source that fails, in whatever way its library has, tells nothing and is not asked again
            del self.sources[name]
            return None

    def mhz(self) -> int | None:
        """The clock frequency now."""
        found = self._read("mhz")
        return round(found) if found and found > 0 else None  # zero and less are what a device says that does not know

    def throttled(self) -> bool | None:
        """Whether the device holds itself back now, or did since this was last asked."""
        found = self._read("throttled")
        return None if found is None else bool(found)

    def machine(self) -> Machine:
        """Everything that is known now; ``throttled`` is whether it was at any time since this was first asked."""
        known = {name: self._read(name) for name in Machine.__struct_fields__}
        return Machine(**known | {"mhz": self.mhz(), "throttled": self._read("ever_throttled")})


Sources = dict[str, Callable[[], Any]]


def _cpu(sys: Path) -> Sources:
    cpus = [sys / f"devices/system/cpu/cpu{number}" for number in sorted(os.sched_getaffinity(0))]
    sources: Sources = {}
    frequencies = [path for cpu in cpus if (path := cpu / "cpufreq/scaling_cur_freq").is_file()]
    if frequencies:
        sources["mhz"] = lambda: max(int(path.read_text()) for path in frequencies) / 1e3  # the file holds kHz
    governor = cpus[0] / "cpufreq/scaling_governor"
    if governor.is_file():
        sources["governor"] = lambda: governor.read_text().strip()
    counts = [path for cpu in cpus if (path := cpu / "thermal_throttle/core_throttle_count").is_file()]
    if counts:
        count = _Count(lambda: sum(int(path.read_text()) for path in counts))
        sources |= {"throttled": count.grew, "ever_throttled": count.ever}
    sources["temperature_c"] = _cpu_temperature
    return sources


class _Count:
    """A counter that only goes up."""

    def __init__(self, read: Callable[[], int]) -> None:
        self.read = read
        self.first: int | None = None
        self.last = 0

    def grew(self) -> bool:
        """Whether it went up since this was last asked."""
        before, self.last = self.last, self.read()
        if self.first is None:
            self.first = before = self.last
        return self.last > before

    def ever(self) -> bool:
        """Whether it went up since it was first asked for."""
        now = self.read()
        if self.first is None:
            self.first = self.last = now
        return now > self.first


def _cpu_temperature() -> float | None:
    import psutil

    sensors = psutil.sensors_temperatures()
    return max((entry.current for name in ("coretemp", "k10temp") for entry in sensors.get(name, [])), default=None)


def _accelerator(device: Device, sys: Path) -> Sources:
    module = device.module
    sources: Sources = {}
    watts = {"cuda": 1e-3, "xpu": 1.0}[device.kind]  # torch gives a CUDA device's power in mW, an XPU's in W
    for field, attribute, scale in (
        ("mhz", "clock_rate", 1.0),
        ("temperature_c", "temperature", 1.0),
        ("power_w", "power_draw", watts),
    ):
        if hasattr(module, attribute):
            sources[field] = functools.partial(_scaled, getattr(module, attribute), device.name, scale)
    files = _nvml(device) if device.kind == "cuda" else _xe(sys, module.device_count(), int(device.name.partition(":")[2] or 0))
    sources |= files
    if "throttled" in sources:
        sources["ever_throttled"] = sources["throttled"]  # a device's flag is of the moment
    return sources


def _scaled(read: Callable[[str], float], name: str, scale: float) -> float:
    return read(name) * scale


def _nvml(device: Device) -> Sources:
    """Throttle reasons and the power cap, through NVML where its Python module is there."""
    try:
        import pynvml  # type: ignore[import-not-found]  # optional: nvidia-ml-py

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{device.module.get_device_properties(device.name).uuid}")
        slow = (
            pynvml.nvmlClocksThrottleReasonHwSlowdown | pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
            | pynvml.nvmlClocksThrottleReasonSwPowerCap
        )  # fmt: skip
    except Exception:  # no module, no library, or no right to ask it: nothing is known
        return {}
    return {
        "throttled": lambda: bool(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & slow),
        "power_cap_w": lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
    }


def _xe(sys: Path, count: int, index: int) -> Sources:
    """The xe driver's files of the card that torch gives this index; nothing where it cannot be told which one that is."""
    cards = sorted(sys.glob("class/drm/card*/device/tile0/gt0/freq0"), key=str)
    if len(cards) != count or index >= count:
        return {}
    freq = cards[index]
    caps = sorted(freq.parents[2].glob("hwmon/hwmon*/power1_max"))
    return dict(_existing(
        ("mhz", freq / "act_freq", float), ("throttled", freq / "throttle/status", lambda text: int(text) > 0),
        ("power_cap_w", caps[0] if caps else freq / "none", lambda text: int(text) / 1e6),  # the file holds µW
    ))  # fmt: skip


def _existing(*files: tuple[str, Path, Callable[[str], Any]]) -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, path, parse in files:
        with contextlib.suppress(OSError, ValueError):
            parse(path.read_text())
            yield name, lambda path=path, parse=parse: parse(path.read_text())  # type: ignore[misc]  # both are bound
