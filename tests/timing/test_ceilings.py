"""When the memory ceilings are asked again, and what a first and a later calibration settle for."""

import pytest

from replay.devices import Device
from replay.timing import ceilings
from replay.timing.ceilings import Ceiling


@pytest.mark.parametrize(
    ("quick", "after_ns", "due"), [(False, 0, True), (True, 1_900_000_000, False), (True, 2_000_000_000, True)]
)
def test_a_look_asks_every_two_seconds(quick: bool, after_ns: int, due: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full run asks between any two cases, since it may time one again."""
    monkeypatch.setattr("replay.kernels.probes.probes", lambda device, nbytes: [])
    now = [5_000_000_000]
    monkeypatch.setattr(ceilings, "host_ns", lambda: now[0])
    ceiling = Ceiling(Device("cpu"), quick=quick)
    ceiling.measured_ns = now[0]
    now[0] += after_ns
    assert ceiling.due() == due
