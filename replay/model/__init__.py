"""Every value that walks the pipeline, from a captured row to a result.

Values only: no tensor, no file and no device is touched here, and msgspec is the one import. All structs are frozen
and refuse unknown fields, so that a journal line which claims more than its kind may hold does not parse.
"""

from replay.model.case import (
    DTYPE_BYTES,
    HELD,
    LAYOUTS,
    SELFTESTS,
    Case,
    CaseId,
    Kernel,
    Layout,
    Logits,
    Problem,
    Routes,
    Sequence,
    Source,
    Spec,
    States,
    Twin,
)
from replay.model.geometry import PRESETS, Geometry, preset
from replay.model.measured import (
    NULL,
    Ceilings,
    Comparison,
    Effect,
    Finding,
    Floor,
    Interval,
    MemoryRates,
    Sample,
    Timing,
    Verdict,
    Work,
)
from replay.model.outcome import GRADES, Exact, Grade, Inexact, NotRun, Outcome, Prepack, Row
from replay.model.value import Value

__all__ = [
    "DTYPE_BYTES",
    "GRADES",
    "HELD",
    "LAYOUTS",
    "NULL",
    "PRESETS",
    "SELFTESTS",
    "Case",
    "CaseId",
    "Ceilings",
    "Comparison",
    "Effect",
    "Exact",
    "Finding",
    "Floor",
    "Geometry",
    "Grade",
    "Inexact",
    "Interval",
    "Kernel",
    "Layout",
    "Logits",
    "MemoryRates",
    "NotRun",
    "Outcome",
    "Prepack",
    "Problem",
    "Routes",
    "Row",
    "Sample",
    "Sequence",
    "Source",
    "Spec",
    "States",
    "Timing",
    "Twin",
    "Value",
    "Verdict",
    "Work",
    "preset",
]
