"""What came of it: grades, failures, and a row of a result."""

from typing import Literal

from replay.model.measured import Comparison, Floor, Timing, Verdict
from replay.model.value import Value


class Prepack(Value, frozen=True):
    """What a kernel's prepack made of the weights: sha256 of the active experts' rows, bytes of the whole table."""

    sha256: str
    table_bytes: int


Grade = Literal["BITWISE", "TIE_EQUIVALENT", "WITHIN_ULP"]
GRADES: tuple[Grade, ...] = ("BITWISE", "TIE_EQUIVALENT", "WITHIN_ULP")  # the best first


class Exact(Value, frozen=True, tag="exact", tag_field="kind"):
    """A green row: the only kind that can hold a time. ``detail`` says what a grade below BITWISE consists in."""

    grade: Grade
    repeats: int
    timing: Timing | None = None
    prepack: Prepack | None = None
    detail: str = ""


class Inexact(Value, frozen=True, tag="inexact", tag_field="kind"):
    """A red row: the output was wrong, not the same twice, or its bits say nothing: the check could not have failed, or the
    device fails a self-test that they rest on."""

    status: Literal["FAIL", "NONDETERMINISTIC", "MISTRUSTED"]
    row: int
    detail: str


class NotRun(Value, frozen=True, tag="not_run", tag_field="kind"):
    """No answer: the kernel could not run here, or did not come back."""

    status: Literal["UNAVAILABLE", "CRASHED", "TIMEOUT", "DEVICE_LOST"]
    detail: str
    log_tail: str = ""


Outcome = Exact | Inexact | NotRun


class Row(Value, frozen=True, kw_only=True):
    """One kernel on one case. ``floor_impl_us`` is the floor with the kernel's own number of launches, where it is known."""

    case: str
    kernel: str
    outcome: Outcome
    floor: Floor | None = None
    floor_impl_us: float | None = None
    comparison: Comparison | None = None
    verdict: Verdict | None = None
    reproduce: str | None = None
    degenerate: bool = False
