"""Every status has its line: the tables cover the types, and the page is made of the tables."""

import re
from typing import get_args, get_type_hints

import pytest

from replay import statuses, verdict
from replay.model import Exact, Inexact, NotRun, Verdict
from replay.studies.curves import Curve
from tests.conftest import ROOT


def literals(kind: type, field: str) -> set[str]:
    """The values that a field can hold."""
    return set(get_args(get_type_hints(kind)[field]))


def test_the_page_is_the_one_that_is_kept() -> None:
    """docs/statuses.md is what `python -m replay.statuses` prints."""
    assert (ROOT / "docs" / "statuses.md").read_text() == statuses.page()


def test_every_status_and_label_is_told() -> None:
    """None more, none less than the types allow."""
    assert set(statuses.EXACT) == literals(Exact, "grade") | literals(Inexact, "status") | literals(NotRun, "status")
    assert set(statuses.VERDICTS) == literals(Verdict, "label")
    assert literals(Curve, "status") == set(statuses.CHAINS) | (literals(Curve, "status") & set(statuses.EXACT))


@pytest.mark.parametrize("flag", statuses.FLAGS)
def test_what_a_flag_does_is_what_the_table_says(flag: str) -> None:
    """Flags that cap a row stand as INCONCLUSIVE, the others do not cap."""
    caps = statuses.FLAGS[flag].line == "INCONCLUSIVE" and flag != "interval_holds_zero"
    assert verdict.caps(flag) == caps


def test_no_flag_of_the_code_is_left_out() -> None:
    """Every reason code that verdict.py and results/ name has a row."""
    text = "".join((ROOT / "replay" / name).read_text() for name in ("verdict.py", "results/build.py", "timing/spans.py"))
    codes = set(re.findall(r'"(null_\w+|not_\w+|no_baseline|below_floor|ceiling_drift|interval_holds_zero)[":]', text))
    assert codes - {"null_"} <= set(statuses.FLAGS)
    assert len(codes) > 6


def test_exit_codes_of_errors_are_told() -> None:
    """Those that the error classes carry."""
    from replay import errors

    assert {errors.InputError.exit_code, errors.EnvironmentRefused.exit_code} <= set(statuses.EXITS)
