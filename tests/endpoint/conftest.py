"""One real run of five processes, and copies of it in which times are drawn or a single thing is changed.

Times of a real run depend on the machine's mood. Where a test is about reasons, the samples are drawn: the candidate
takes half the baseline's time, the null arm the baseline's own, with 0.1 % of noise. Everything else stays as it was run.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from replay.endpoint.evidence import Now, examine, look
from replay.endpoint.reasons import Refusal
from replay.model import NULL, Interval, Sample
from replay.results.seen import Seen
from replay.session import journal as j
from replay.timing.watch import Watched
from tests.conftest import ROOT

BASE, MINE, SECOND, RED = "eager:moe.combine", "sycl:moe.combine:rows", "mine:moe.combine:same", "mine:moe.combine:flips"
KERNELS = """
from replay.kernels.eager import prepare_combine
from replay.model import Kernel

def flips(problem, weights):
    right = prepare_combine(problem, weights)
    def run(t):
        right(t)
        t["out"][0, 0] *= -1
    return run

KERNELS = [
    Kernel(id="mine:moe.combine:same", prepare=":prepare_combine"),
    Kernel(id="mine:moe.combine:flips", prepare=":flips"),
    Kernel(id="mine:moe.combine:elsewhere", prepare=":prepare_combine", devices=("xpu",)),
]
"""
Change = Callable[[j.Record], j.Record | None]


class Run:
    """A run's folder with its records, capture and kernel file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.capture, self.kernels = folder / "capture", folder / "mine.py"
        self.journal = folder / "run" / j.NAME

    def records(self) -> list[j.Record]:
        """What the journal holds."""
        return j.read(self.journal)

    def write(self, records: list[j.Record]) -> "Run":
        """Another journal with true seals in the place of this one."""
        self.journal.unlink()
        with j.Journal(self.journal) as journal:
            for record in records:
                journal.write(record)
        return self

    def now(self) -> Now:
        """What is here today."""
        return look(Seen(self.records()))

    def refused(self, kernel: str = MINE, claim: str = "faster", now: Now | None = None) -> list[Refusal]:
        """Every reason against."""
        return examine(self.journal, kernel, claim, now).refusals

    def codes(self, kernel: str = MINE, claim: str = "faster") -> list[str]:
        """The codes of every reason against, each once."""
        return sorted({r.code for r in self.refused(kernel, claim)})


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run as it was: one case, five processes of thirty blocks, right and wrong kernels."""
    folder = tmp_path_factory.mktemp("promote")
    shutil.copytree(ROOT / "captures" / "qwen36-generated", folder / "capture")
    (folder / "mine.py").write_text(KERNELS)
    command = [
        sys.executable, "-m", "replay", "run", "--capture", "capture", "--route-layer-regex", r"\.9\.", "--max-cases", "1",
        "--stage", "moe.combine", "--kernel", "*", "--load", "mine.py", "--processes", "5", "-o", "run",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    return Run(folder)


@pytest.fixture
def steady(real: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A copy whose times and ceilings are those of a quiet machine."""
    for name in ("run", "capture"):
        shutil.copytree(real.folder / name, tmp_path / name)
    shutil.copyfile(real.kernels, tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(3)
    records = real.records()
    ceilings = still(next(r.ceilings for r in records if isinstance(r, j.Calibrated)))

    last = {(r.process, r.case): r for r in records if isinstance(r, j.Timed)}

    def moved(path: str) -> str:
        return path.replace(str(real.folder), str(tmp_path))

    def change(record: j.Record) -> j.Record | None:
        if isinstance(record, j.Begun):
            kernels = tuple(msgspec.structs.replace(k, file=k.file and moved(k.file)) for k in record.plan.kernels)
            identity = json.loads(moved(json.dumps(record.identity)))
            plan = msgspec.structs.replace(record.plan, kernels=kernels, capture_path=moved(record.plan.capture_path))
            return j.Begun(plan, identity)
        if isinstance(record, j.Loaded):
            return j.Loaded(record.where, {moved(path): sha256 for path, sha256 in record.files.items()})
        if isinstance(record, j.Attended):
            return j.Attended(record.process, Watched(1_000_000_000, 1_000_000_000, {}))
        if isinstance(record, j.Calibrated):
            return msgspec.structs.replace(record, ceilings=ceilings)
        if isinstance(record, j.Timed):
            if record is not last[record.process, record.case]:
                return None  # the real machine's rates had moved
            samples = tuple(drawn(s, {MINE: 100_000}.get(s.arm, 200_000), rng) for s in record.samples)
            return msgspec.structs.replace(record, samples=samples, memory=(still(record.memory[0]),) * 2)
        return record

    return Run(tmp_path).write(changed(records, change))


def still(ceilings: Any) -> Any:
    """The same rates with intervals of 1 %, whatever the machine was like when they were measured."""
    fields = ("read_gbs", "copy_gbs", "inplace_gbs", "hot_gbs", "launch_us")
    mids = {name: getattr(ceilings, name).mid for name in fields if hasattr(ceilings, name)}
    return msgspec.structs.replace(ceilings, **{n: Interval(mid, 0.995 * mid, 1.005 * mid) for n, mid in mids.items()})


def drawn(sample: Sample, ns: float, rng: np.random.Generator) -> Sample:
    """A sample of so many nanoseconds a call, with 0.1 % of noise, and no flags."""
    return msgspec.structs.replace(sample, span_ns=int(ns * sample.calls * np.exp(rng.normal(0, 0.001))), flags=())


def scaled(arm: str, factor: float) -> Change:
    """All times of one arm multiplied."""

    def change(record: j.Record) -> j.Record:
        if not isinstance(record, j.Timed):
            return record
        samples = (msgspec.structs.replace(s, span_ns=int(s.span_ns * factor)) if s.arm == arm else s for s in record.samples)
        return msgspec.structs.replace(record, samples=tuple(samples))

    return change


def without(arm: str) -> Change:
    """No sample of one arm."""

    def change(record: j.Record) -> j.Record:
        if not isinstance(record, j.Timed):
            return record
        return msgspec.structs.replace(record, samples=tuple(s for s in record.samples if s.arm != arm))

    return change


def changed(records: list[j.Record], change: Change) -> list[j.Record]:
    """The records after a change; None leaves one out."""
    return [new for record in records if (new := change(record)) is not None]


__all__ = ["BASE", "MINE", "NULL", "RED", "SECOND", "Change", "Run", "changed", "scaled", "without"]
