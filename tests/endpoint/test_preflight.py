"""What stands between a launcher and a start: versions, variables, memory, workers left behind, a port."""

import socket
import subprocess
import sys
import time
from typing import Any

import msgspec
import psutil
import pytest

from replay.captures.manifest import file_sha256
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
    identity = collect(argv=(), sources=(), seed=7, capture_sha256="0" * 64, device=cpu_facts())
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
    """A worker whose parent is no part of vLLM is named with its pid, whoever took it in; one that is served is not."""
    server = {10: (1, ["python", "-m", "vllm.entrypoints.openai.api_server"]), 11: (10, ["VLLM::EngineCore"])}
    workers = {12: (11, ["VLLM::Worker_TP0"]), 13: (1, ["VLLM::Worker_TP1"]), 14: (20, ["VLLM::Worker_TP2"])}
    others = {1: (0, ["init"]), 20: (1, ["systemd", "--user"]), 30: (1, ["bash"])}
    assert list(preflight.orphans({**server, **workers, **others})) == [
        f"workers: expected none left behind, got process {pid} (VLLM::Worker_TP{n})" for pid, n in ((13, 1), (14, 2))
    ]


def test_a_worker_of_this_machine_is_seen() -> None:
    """The processes are really looked at: a child named as a worker, whose parent is this test."""
    worker = [sys.executable, "-c", "import time; time.sleep(60)", "VLLM::Worker"]
    with subprocess.Popen(worker) as child:
        try:
            while "VLLM::Worker" not in psutil.Process(child.pid).cmdline():
                time.sleep(0.01)
            assert any(f"process {child.pid} " in text for text in preflight._orphans())
        finally:
            child.kill()


def test_main_prints_a_line_each(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 5 with names; 0 with nothing to say is tested by the launcher that starts."""
    assert preflight.main([str(tmp_path), "launch", "0" * 64]) == 5
    path = tmp_path / "identity.json"
    assert capsys.readouterr().err == f"launch.sh: {path}: expected sha256 {'0' * 64}, got no such file or directory\n"
    path.write_text('{"form": "b70-promotion/0"}')
    assert preflight.main([str(tmp_path), "launch", file_sha256(path)]) == 5
    assert f"{path}: expected the form of b70-replay" in capsys.readouterr().err
