"""Every cheat is caught with the status it deserves; the honest kernels beside them keep their verdicts."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import judge_here, make_case

CHEATS = Path(__file__).with_name("cheats.py")
HONEST = ("eager:moe.route", "honest:moe.route", "eager:moe.combine")

# kernel → status, and a word of its detail. Those that are BITWISE did all the work in the end: their time must show it.
DESERVED = {
    "moe.route:by_pointer": ("FAIL", "in a timed call"),
    "moe.route:by_shape": ("FAIL", "on other bytes"),
    "moe.route:by_fingerprint": ("BITWISE", ""),
    "moe.route:by_some_bytes": ("FAIL", ""),
    "moe.route:by_fingerprint_across_prepares": ("BITWISE", ""),
    "moe.route:left_from_before": ("NONDETERMINISTIC", "1 of 16 repeats right"),
    "moe.route:if_not_there": ("BITWISE", ""),
    "moe.route:later": ("FAIL or NONDETERMINISTIC", ""),  # a late thread may meet another call's buffers, or none
    # A late write shows after the call, or in its output where the machine was slow to read that.
    "moe.route:once_more": ("FAIL or NONDETERMINISTIC", ""),
    "moe.route:nothing": ("FAIL", ""),
    "moe.route:remembers_when_strided": ("FAIL", "on strided inputs"),
    "moe.route:peeks_at_the_harness": ("FAIL", "left its outputs untouched in"),
    "moe.route:after_the_clock": ("FAIL", "traced the function that timed it"),
    "moe.route:at_the_next_line": ("FAIL", "traced the function that timed it"),
    "moe.route:slows_the_others": ("FAIL", "changed torch's number of threads from"),
    "moe.route:patches_the_clock": ("BITWISE", ""),
    "moe.combine:all_nan": ("FAIL", ""),
    "moe.combine:another_tensor": ("FAIL", ""),
    "moe.combine:wider": ("FAIL", "wrote outside out"),
    "moe.combine:mutates": ("FAIL", "changed its input y"),
    "moe.combine:from_the_collector": ("FAIL", ""),
    "moe.combine:skips_padding": ("BITWISE", ""),  # no row of this capture is padding: the next test has one
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of all cheats with honest kernels between them: kernel → row."""
    import subprocess
    import sys

    folder = tmp_path_factory.mktemp("cheats")
    command = [
        sys.executable, "-m", "replay", "run", "--capture", "qwen36-generated", "--route-layer-regex", r"\.9\.", "--max-cases",
        "1", "--stage", "moe.route", "--stage", "moe.combine", "--load", str(CHEATS), "--kernel", "cheat:*", "--quick", "--blocks", "20",
        *(word for kernel in HONEST for word in ("--kernel", kernel)), "-o", "run",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    found = json.loads((folder / "run" / "result.json").read_text())["rows"]
    return {row["kernel"].removeprefix("cheat:"): row for row in found}


def test_every_cheat_is_in_the_run(rows: dict[str, Any]) -> None:
    """None is left out, none is without an expectation."""
    assert set(rows) == {*DESERVED, *HONEST}


@pytest.mark.parametrize("kernel", DESERVED)
def test_a_cheat_gets_what_it_deserves(rows: dict[str, Any], kernel: str) -> None:
    """Its status and, for a lie, where it showed."""
    outcome = rows[kernel]["outcome"]
    status, word = DESERVED[kernel]
    assert outcome.get("status", outcome.get("grade")) in status.split(" or "), outcome
    assert word in outcome.get("detail", "")


@pytest.mark.parametrize("kernel", [k for k, (s, _) in DESERVED.items() if s == "BITWISE" and k.startswith("moe.route")])
def test_a_cheat_that_is_right_has_worked_for_it(rows: dict[str, Any], kernel: str) -> None:
    """A cache that never hits, an output that is never there, a clock that was read before: all take the honest time."""
    honest = rows["honest:moe.route"]["outcome"]["timing"]["us"]["mid"]
    assert rows[kernel]["outcome"]["timing"]["us"]["mid"] > 0.6 * honest


@pytest.mark.parametrize("kernel", HONEST)
def test_the_honest_keep_their_verdicts(rows: dict[str, Any], kernel: str) -> None:
    """Right, timed, and with a label."""
    assert rows[kernel]["outcome"]["grade"] == "BITWISE"
    assert rows[kernel]["outcome"]["timing"] is not None
    assert rows[kernel]["verdict"]["label"] in ("BASELINE", "SAME", "INCONCLUSIVE", "FASTER", "SLOWER", "INVALID")


def test_padding_rows_that_matter_are_not_skipped() -> None:
    """A token without experts is exactly zero; whoever leaves it alone is wrong at that row."""
    case = make_case("moe.combine", tokens=5, seed=11)
    ids = tuple((-1,) * len(row) if t == 2 else row for t, row in enumerate(case.routes.topk_ids))
    import msgspec

    case = msgspec.structs.replace(case, held=msgspec.structs.replace(case.routes, topk_ids=ids))
    outcome = judge_here("cheat:moe.combine:skips_padding", case, load=str(CHEATS))
    assert getattr(outcome, "status", "") == "FAIL"
    assert getattr(outcome, "row", -1) == 2
    assert getattr(judge_here("eager:moe.combine", case), "grade", "") == "BITWISE"
