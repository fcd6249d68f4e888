"""What a device says of itself, read from files of the forms that Linux has them in; what is missing is unknown."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replay.devices import Device
from replay.results.table import machine_text
from replay.timing.telemetry import Machine, Telemetry


def write(path: Path, text: str) -> Path:
    """A file with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_nothing_there_is_unknown(tmp_path: Path) -> None:
    """No file, no fact: never fine, never zero."""
    telemetry = Telemetry(Device("cpu"), tmp_path)
    assert telemetry.mhz() is None
    assert telemetry.throttled() is None
    assert telemetry.machine().governor is None
    assert machine_text(Machine(), Machine()) == "telemetry: clock, temperature, power, power cap, governor, throttling unknown."


def test_a_cpu(tmp_path: Path) -> None:
    """The busiest core's clock; throttling when a core's counter went up since it was last asked."""
    folders = [tmp_path / f"devices/system/cpu/cpu{n}" for n in sorted(os.sched_getaffinity(0))]
    for number, folder in enumerate(folders):
        write(folder / "cpufreq/scaling_cur_freq", f"{800_000 + number * 1000}\n")
        write(folder / "cpufreq/scaling_governor", "powersave\n")
        write(folder / "thermal_throttle/core_throttle_count", "7\n")
    telemetry = Telemetry(Device("cpu"), tmp_path)
    assert telemetry.mhz() == 800 + len(folders) - 1
    assert telemetry.throttled() is False
    assert telemetry.machine().throttled is False
    write(folders[0] / "thermal_throttle/core_throttle_count", "8\n")
    assert telemetry.throttled() is True
    assert telemetry.throttled() is False
    assert telemetry.machine() == Machine(
        800 + len(folders) - 1, telemetry.machine().temperature_c, None, None, "powersave", True
    )


def xpu(cards: int, index: int = 0, **module: Any) -> Any:
    """A stand-in for the XPU that torch would show."""
    return SimpleNamespace(kind="xpu", name=f"xpu:{index}", module=SimpleNamespace(device_count=lambda: cards, **module))


def card(sys: Path, number: int, mhz: int, throttled: int) -> None:
    """The xe driver's files of one card."""
    freq = sys / f"class/drm/card{number}/device/tile0/gt0/freq0"
    write(freq / "act_freq", f"{mhz}\n")
    write(freq / "throttle/status", f"{throttled}\n")
    write(sys / f"class/drm/card{number}/device/hwmon/hwmon{number}/power1_max", "230000000\n")


def test_a_card_by_the_files_of_its_driver(tmp_path: Path) -> None:
    """Clock, throttling and power cap of the card with torch's index; nothing where it cannot be told which it is."""
    card(tmp_path, 0, 2400, 0)
    card(tmp_path, 1, 1200, 1)
    telemetry = Telemetry(xpu(2, 1), tmp_path)
    assert (telemetry.mhz(), telemetry.throttled()) == (1200, True)
    assert telemetry.machine().power_cap_w == 230
    assert Telemetry(xpu(1), tmp_path).mhz() is None


@pytest.mark.parametrize("error", [RuntimeError("no sysman"), ModuleNotFoundError("pyzes"), OSError()])
def test_a_source_that_fails_tells_nothing(tmp_path: Path, error: Exception) -> None:
    """And is not asked again."""
    asked = []

    def clock_rate(name: str) -> float:
        asked.append(name)
        raise error

    telemetry = Telemetry(xpu(1, clock_rate=clock_rate), tmp_path)
    assert (telemetry.mhz(), telemetry.mhz()) == (None, None)
    assert asked == ["xpu:0"]


def test_the_devices_own_answer(tmp_path: Path) -> None:
    """torch's module tells MHz, °C and an XPU's W; a clock that it does not know it tells as −1."""
    telemetry = Telemetry(xpu(1, clock_rate=lambda _: 2350.0, temperature=lambda _: 61, power_draw=lambda _: 190.0), tmp_path)
    assert telemetry.machine() == Machine(2350, 61, 190.0)
    assert Telemetry(xpu(1, clock_rate=lambda _: -1.0), tmp_path).mhz() is None
    text = machine_text(Machine(2350.0, 61, 190.0, throttled=False), Machine(2400.0, 61, 190.0, throttled=False))
    assert (
        text
        == "telemetry: clock 2350 MHz → 2400 MHz; temperature 61 °C; power 190 W; throttling no; power cap, governor unknown."
    )
