"""A kernel within its budget: told, timed, and never promoted; a baseline may be one."""

import msgspec

from replay.model import NULL
from replay.session import journal as j
from tests.endpoint.conftest import BASE, MINE, Run, changed


def test_a_budget_is_no_promotion(steady: Run) -> None:
    """WITHIN_ULP is told, timed and refused."""

    def change(record: j.Record) -> j.Record:
        if isinstance(record, j.Judged) and record.kernel == MINE:
            return budgeted(record)
        return otherwise(record, MINE)

    assert steady.write(changed(steady.records(), change)).codes() == ["not_bitwise"]


def test_a_budget_needed_in_one_timed_call_is_no_promotion(steady: Run) -> None:
    """BITWISE when judged, and within its budget on the bytes of one process: its grade is the lesser."""

    def change(record: j.Record) -> j.Record:
        if isinstance(record, j.Timed) and record.process == 2:
            within = {MINE: "in a timed call: out within other_order: 1 of 2 …"}
            return otherwise(msgspec.structs.replace(record, within=within), MINE)
        return record

    found = steady.write(changed(steady.records(), change)).refused()
    assert [(r.code, r.detail) for r in found] == [
        ("not_bitwise", "WITHIN_ULP: in a timed call: out within other_order: 1 of 2 …")
    ]


def budgeted(record: j.Judged) -> j.Judged:
    """A green line within a budget: other bits than the oracle's, in every answer."""
    outcome = msgspec.structs.replace(record.outcome, grade="WITHIN_ULP", detail="out within other_order: 1 of 2 …")
    other = j.Answer(255, "1" * 64)
    twins = dict.fromkeys(record.twins, other)
    return msgspec.structs.replace(record, outcome=outcome, answers=(other,) * len(record.answers), twins=twins)


def otherwise(record: j.Record, kernel: str) -> j.Record:
    """The answers of a kernel's timed calls, other than the oracle's."""
    if not isinstance(record, j.Timed):
        return record
    other = j.Answer(255, "1" * 64)
    return msgspec.structs.replace(
        record,
        answers={arm: other if arm.removesuffix(NULL) == kernel else a for arm, a in record.answers.items()},
        second={arm: other if arm.removesuffix(NULL) == kernel else a for arm, a in record.second.items()},
    )


def test_a_baseline_within_its_budget_may_be_compared_with(steady: Run) -> None:
    """Its bits are not the oracle's, and nothing is claimed of them."""

    def change(record: j.Record) -> j.Record:
        if isinstance(record, j.Judged) and record.kernel == BASE:
            return budgeted(record)
        return otherwise(record, BASE)

    assert steady.write(changed(steady.records(), change)).codes() == []
