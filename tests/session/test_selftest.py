"""The self-test is right on this device, and would see a device that is not."""

import numpy as np
import pytest

from replay.devices import Device
from replay.session import selftest as module
from tests.conftest import Cli


def test_this_device_passes(cli: Cli) -> None:
    """Every line right, exit 0."""
    done = cli("doctor", "--selftest")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" right, ") == len(module.TESTS) == 6


@pytest.mark.parametrize("number", range(6))
def test_a_wrong_answer_is_seen(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """One bit of one answer flipped: that test, and only it, counts it."""
    device = Device("cpu")
    honest = module.answer

    def lying(*args: object, **kwargs: object) -> dict[str, module.Array]:
        found = honest(*args, **kwargs)  # type: ignore[arg-type]  # forwarded
        first = next(iter(found.values()))
        first.view(np.uint8)[0] ^= 1
        return found

    assert module.TESTS[number](device).wrong == 0
    monkeypatch.setattr(module, "answer", lying)
    assert module.TESTS[number](device).wrong == 1


def test_where_there_is_no_sycl_it_is_refused(cli: Cli) -> None:
    """A device without the runtime is no device that failed."""
    done = cli("doctor", "--selftest", "--device", "cuda")
    assert done.returncode == 5
    assert done.stderr.count("\n") == 1
