"""The self-test is right on this device, and would see a device that is not."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay.devices import Device
from replay.model import Exact, Finding, Inexact
from replay.results.write import write
from replay.session import selftest as module
from replay.session.folder import begin
from replay.session.journal import Selftested
from replay.session.plan import Asked, make_plan
from replay.session.run import Session
from tests.conftest import Cli


def test_this_device_passes(cli: Cli) -> None:
    """Every line right, exit 0."""
    done = cli("doctor", "--selftest")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" right, ") == len(module.TESTS) - 1 == 6
    assert re.search(r"^matrix engine +not there$", done.stdout, re.MULTILINE)


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


def test_the_matrix_engine_is_asked_through_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same question to a kernel that runs here is answered rightly, and a wrong answer is seen."""
    device = Device("cpu")
    asked = module._matrix(device, "sycl:moe.gemm1:rows")
    assert (asked.asked, asked.wrong) == (20 * 48, 0)
    honest = module.judged_calls

    def lying(*args: Any) -> Any:
        ran = honest(*args)
        ran.repeats[0].outputs["gate_up"][3, 5] ^= 1
        return ran

    monkeypatch.setattr(module, "judged_calls", lying)
    assert module._matrix(device, "sycl:moe.gemm1:rows").wrong == 1


def test_a_device_that_fails_gets_no_claim_that_rests_on_it(tmp_path: Path) -> None:
    """Division is wrong: what divides is MISTRUSTED and not timed, what does not divide is judged as ever."""
    stages = ("moe.quantize", "moe.remap")
    asked = Asked(capture="qwen36-generated", route_start_indices="0", route_layer_regex=r"\.9\.", stages=stages,
                  kernels=("eager:*",), blocks=5, processes=1, repeats=2, modes={})  # fmt: skip
    plan = make_plan(asked)
    folder, records, journal = begin(plan, tmp_path / "run", [])
    division = Finding("division", "division rounds correctly", 100, 3)
    tested = Selftested((division, Finding("bf16", "bf16 round trip", 100, 0)))
    with journal:
        journal.write(tested)
        Session(plan, journal, [*records, tested], lambda *_: None).run()
    rows = {r.kernel: r.outcome for r in write(folder, str(folder)).rows}
    assert rows["eager:moe.quantize"] == Inexact(
        "MISTRUSTED", -1, "the device fails its self-test: division rounds correctly (wrong in 3 of 100)"
    )
    assert isinstance(rows["eager:moe.remap"], Exact)
    assert rows["eager:moe.remap"].timing is not None


def test_where_there_is_no_sycl_it_is_refused(cli: Cli) -> None:
    """A device without the runtime is no device that failed."""
    done = cli("doctor", "--selftest", "--device", "cuda")
    assert done.returncode == 5
    assert done.stderr.count("\n") == 1
