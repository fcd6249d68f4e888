"""What stands between a launcher and a start: versions, variables, memory, workers left behind, a port."""

import socket
import subprocess
import sys
from typing import Any

import msgspec
import psutil
import pytest

from replay.devices import cpu_facts
from replay.endpoint import preflight
from replay.endpoint.launcher import Promotion
from replay.endpoint.promote import locate_endpoint
from replay.endpoint.spec import read
from replay.identity import collect
from tests.endpoint.test_launcher import free_port, promotion


@pytest.fixture
def promoted() -> Promotion:
    """A promotion measured on this machine, now."""
    endpoint, _ = read(locate_endpoint("tiny-cpu"))
    identity = collect(argv=(), outside=(), seed=7, capture_sha256="0" * 64, device=cpu_facts())
    return promotion(endpoint, identity=identity, port=free_port(), min_free_gib=0.0)


def test_the_same_machine_differs_in_nothing(promoted: Promotion) -> None:
    """Versions, device, memory and port as they were."""
    assert list(preflight._versions(promoted)) == []
    assert list(preflight._devices(promoted)) == []
    assert list(preflight._port(promoted)) == []


@pytest.mark.parametrize(
    ("field", "name", "value"),
    [
        ("packages", "torch", "2.0.0"), ("device", "driver", "other"), ("sources", "replay", "0" * 64),
        ("compilers", "g++", "g++ 1.0"), ("numeric_flags", "sycl", ["-ffast-math"]),
    ],
)  # fmt: skip
def test_each_version_is_named(promoted: Promotion, field: str, name: str, value: Any) -> None:
    """Expected what was measured, got what is here."""
    identity = {**promoted.identity, field: {**promoted.identity[field], name: value}}
    (text,) = preflight._versions(msgspec.structs.replace(promoted, identity=identity))
    assert text.startswith(f"{field}.{name}: expected {value}, got ")


def test_packages_that_had_no_part_are_pinned_by_the_endpoint(promoted: Promotion) -> None:
    """Absent when it was measured is no demand; a version in the endpoint file is one."""
    identity = {**promoted.identity, "packages": {**promoted.identity["packages"], "torch": "absent"}}
    changed = msgspec.structs.replace(promoted, identity=identity)
    assert list(preflight._versions(changed)) == []
    pinned = msgspec.structs.replace(changed, packages={"no-such-package": "1.0"})
    assert list(preflight._versions(pinned)) == ["packages.no-such-package: expected 1.0, got absent"]


def test_variables(promoted: Promotion) -> None:
    """Watched ones must be those of the identity, no more and no less; the launcher's own caches are left out."""
    wanted = {**promoted.environment, "PATH": "/bin", "SYCL_CACHE_DIR": "/tmp/c", "VLLM_CACHE_ROOT": "/tmp/v"}
    assert list(preflight._variables(promoted, wanted)) == []
    wanted.pop("SYCL_CACHE_PERSISTENT")
    got = {**wanted, "IGC_X": "1"}
    assert list(preflight._variables(promoted, got)) == [
        "IGC_X: expected 'unset', got '1'", "SYCL_CACHE_PERSISTENT: expected '1', got 'unset'"
    ]  # fmt: skip


def test_memory_and_devices(promoted: Promotion) -> None:
    """Too little free memory, and a device that is not there."""
    (text,) = preflight._devices(msgspec.structs.replace(promoted, min_free_gib=1e6))
    assert text.startswith("cpu: free memory: expected 1e+06 GiB or more, got ")
    import torch

    if not torch.xpu.is_available():
        found = list(preflight._devices(msgspec.structs.replace(promoted, device="xpu", devices=2)))
        assert [t.partition(": expected a device that computes")[0] for t in found] == ["xpu:0", "xpu:1"]


def test_a_taken_port(promoted: Promotion) -> None:
    """Somebody listens there."""
    with socket.socket() as server:
        server.bind(("", promoted.port))
        server.listen()
        (text,) = preflight._port(promoted)
    assert text.startswith(f"port {promoted.port}: expected a free one, got ")


def test_workers_left_behind() -> None:
    """A process of an engine whose parent is gone is named with its pid, one whose parent lives is not."""
    worker = "import sys, time; sys.argv; time.sleep(60)"
    starter = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {worker!r}, 'VLLM::Worker'], stdout=-3); print(p.pid)"
    done = subprocess.run([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True, check=True, start_new_session=True)
    orphan, child = psutil.Process(int(done.stdout)), subprocess.Popen([sys.executable, "-c", worker, "VLLM::Worker"])
    try:
        found = list(preflight._orphans())
        if orphan.ppid() == 1:  # a machine may have another process that takes orphans in
            assert any(f"process {orphan.pid} " in text for text in found)
        assert not any(f"process {child.pid} " in text for text in found)
    finally:
        orphan.kill()
        child.kill()
        child.wait()


def test_main_prints_a_line_each(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 5 with names; 0 with nothing to say is tested by the launcher that starts."""
    assert preflight.main([str(tmp_path), "launch", "identity.json=" + "0" * 64, "engine.toml=" + "1" * 64]) == 5
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": expected")[0] for line in lines] == [
        f"launch.sh: {tmp_path}/identity.json", f"launch.sh: {tmp_path}/engine.toml"
    ]  # fmt: skip
