"""What goes on beside timed spans: another clock, and other processes."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from replay.devices import Device
from replay.timing.telemetry import Telemetry
from replay.timing.watch import Watched, begin, busy, clocks_agree
from tests.conftest import Cli

SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("clock", "kernel", "agree"),
    [
        (10 * SECOND, 10 * SECOND, True), (10 * SECOND, 10.4 * SECOND, True), (10 * SECOND, SECOND, False),
        (SECOND, 10 * SECOND, False), (0, 2 * SECOND, False), (0, 10_000_000, True),
    ],
)  # fmt: skip
def test_two_clocks_agree_or_not(clock: float, kernel: float, agree: bool) -> None:
    """Ten times too fast, too slow, or standing still is seen; a step of the kernel's clock is not."""
    assert clocks_agree(Watched(int(clock), int(kernel), {})) == agree


def test_its_own_family_is_not_foreign() -> None:
    """Neither this process nor a child of it that spins, and the clocks agree over half a second."""
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        watching = begin(Telemetry(Device("cpu")))
        time.sleep(0.5)
        watched = watching.until_now()
    finally:
        spinning.kill()
        spinning.wait()
    assert clocks_agree(watched)
    assert not [who for who in watched.foreign if f"({spinning.pid})" in who]
    assert busy(Watched(1, 1, {"cc1plus (7)": 0.4, "sshd (8)": 0.02})) == ["cc1plus (7)"]


SKEWED = """
import time
real, scale = time.perf_counter_ns, {scale}
zero = real()
time.perf_counter_ns = lambda: zero + int((real() - zero) * scale)
"""
TWO = (
    "run", "--capture", "qwen36-generated", "--route-layer-regex", r"\.9\.", "--max-cases", 1, "--stage", "moe.remap",
    "--quick", "--blocks", 5, "--repeats", 2, "-o", "run",
)  # fmt: skip


@pytest.mark.parametrize("scale", [10, 0.1])
def test_a_clock_that_lies_makes_every_time_invalid(cli: Cli, tmp_path: Path, scale: float) -> None:
    """Ten times fast or slow, patched before anything of ours was imported."""
    import os

    (tmp_path / "sitecustomize.py").write_text(SKEWED.format(scale=scale))
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = cli(*TWO, env=os.environ | {"PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("eager:", "sycl:"))]
    assert len(lines) == 2
    assert all("INVALID" in line and "clock_disagrees" in line for line in lines)


def test_a_busy_machine_caps_every_verdict(cli: Cli) -> None:
    """A process beside the run is named, though it takes a third of one core, and nothing is claimed."""
    third = "import time\nwhile True:\n    end = time.thread_time() + 0.01\n    while time.thread_time() < end: pass\n    time.sleep(0.02)"
    spinning = subprocess.Popen([sys.executable, "-c", third])
    try:
        done = cli(*TWO)
    finally:
        spinning.kill()
        spinning.wait()
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("sycl:"))
    assert "INCONCLUSIVE" in line or "INVALID" in line
    assert "foreign_process" in line
    assert re.search(rf"other processes kept the processors busy \(.*python\S* \({spinning.pid}\)", done.stdout)
