"""A state fed back for K steps: does a kernel keep the contract's bits, and how far does it drift from f64?

The kernels of a case take their steps beside one another, each in a child of its own that holds no expected output; here the
contract (the f32 oracle) and f64 take the same steps on the same inputs, and whatever a child sends is held against both.
"""

import contextlib
import shlex
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from replay.exactness import Got
from replay.exactness.compare import compare, same_bits
from replay.exactness.trust import mistrust
from replay.identity import Hashes
from replay.kernels.registry import unavailable
from replay.model import Case, Kernel
from replay.session.child import Done, Linked, Message, Raised
from replay.session.journal import Plan, Selftested
from replay.session.workers import Died, Worker, device_lost, selftested
from replay.stages import STAGES
from replay.stages.gdn_chain import owned
from replay.stages.stage import Outputs
from replay.studies.curves import CONTRACT, Chain, Curve, Status
from replay.studies.links import chain_main
from replay.studies.truth import Numbers, Truth, errors, truths

OUTPUT_STEPS = 1.0  # how much farther than the contract's an output may be beside f32 states: one step of bf16
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Limits:
    """How long a chain is, what its steps find, and how far from f64 it may come."""

    steps: int
    reset: str
    max_scaled_ulp: float


@dataclass
class Trace:
    """What is known of one arm so far. The first fault is what it is told with; ``at`` is that one's step."""

    case: Case
    name: str
    kernel: Kernel | None
    state_ulp: list[float] = field(default_factory=list)
    out_ulp: list[float] = field(default_factory=list)
    status: Status = "BOUNDED"
    detail: str = ""
    differs: int | None = None
    farther: float = 0.0
    at: int | None = None
    ended: bool = False

    @property
    def dtype(self) -> str:
        """Of the states."""
        return self.case.problem.mode("ssm_state")

    def fault(self, status: Status, step: int, told: str) -> None:
        """Something is wrong at a step, counted from 1; DRIFTED gives way to what is graver."""
        if self.status == "BOUNDED" or (self.status == "DRIFTED" and status != "DRIFTED"):
            self.status, self.detail, self.at = status, f"step {step}: {told}", step
        elif self.ended:
            self.detail += f"; step {step}: {told}"

    def end(self, status: Status, step: int, told: str) -> None:
        """It takes no further step."""
        self.ended = True
        self.fault(status, step, told)

    def curve(self, plan: Plan, limits: Limits) -> Curve:
        """As it is kept."""
        case = self.case.id
        return Curve(
            case=str(case), layer=case.source.layer, kernel=self.name, dtype=self.dtype, state_ulp=tuple(self.state_ulp),
            out_ulp=tuple(self.out_ulp), status=self.status, detail=self.detail, differs=self.differs,
            budgeted=self.kernel is not None and self.kernel.budgeted, farther=self.farther,
            reproduce=_reproduction(plan, limits, str(case), self.kernel, self.at) if self.kernel and self.at else None,
        )  # fmt: skip


def _reproduction(plan: Plan, limits: Limits, case: str, kernel: Kernel, step: int) -> str:
    """The command that shows one arm again, as far as its first fault."""
    words = ["b70-replay", "chain", "--state", plan.capture_path, "--case", case, "--kernel", kernel.id]
    words += ["--load", kernel.file] if kernel.file else []
    words += ["--device", plan.device] if plan.device != "cpu" else []
    words += ["--steps", str(step), "--reset", limits.reset, "--max-scaled-ulp", f"{limits.max_scaled_ulp:g}"]
    return shlex.join([*words, "--timeout", str(plan.timeout_s)])


# ---------------------------------------------------------------- one step


def take(trace: Trace, number: int, truth: Truth, outputs: Outputs, limits: Limits) -> None:
    """One step of an arm: its bits, its errors, and what they come to.

    f32 itself drifts; what counts against a kernel is by how much farther from f64 it is than the contract, in any head. Beside
    f32 states an output, which is bf16, may be one step farther and no more.
    """
    step = number + 1
    if trace.kernel and trace.differs is None and (told := _differs(trace.kernel, truth, outputs)):
        trace.differs = step
        trace.fault("FAIL", step, told)
    state, out = errors(truth, outputs)
    for what, dtype, found in (("a state", trace.dtype, state), ("the output", "bf16", out)):
        if not np.isfinite(found).all():
            trace.end("OVERFLOWED", step, f"{what} is not finite in {dtype}")
            return
    trace.state_ulp.append(float(state.max(initial=0)))
    trace.out_ulp.append(float(out.max(initial=0)))
    if trace.kernel:
        most = limits.max_scaled_ulp
        _hold(trace, step, "the states are", state - truth.own[0], most)
        _hold(trace, step, "the output is", out - truth.own[1], min(most, OUTPUT_STEPS) if trace.dtype == "f32" else most)


def _hold(trace: Trace, step: int, what: str, farther: Numbers, limit: float) -> None:
    """Hold how much farther than the contract each head is against a limit."""
    worst = float(farther.max(initial=0))
    trace.farther = max(trace.farther, worst)
    if worst > limit:
        told = f"{what} {worst:.3g} scaled ulp farther from f64 than the contract's (limit {limit:g})"
        trace.fault("DRIFTED", step, told)


def _differs(kernel: Kernel, truth: Truth, outputs: Outputs) -> str | None:
    """The worst row that has not the contract's bits. What a budgeted kernel may sum in another order is not looked at; a NaN in
    a slot that is nobody's is the NaN that lay there."""
    case = truth.case
    stage, problem = STAGES[case.problem.stage], case.problem
    if kernel.budgeted:
        outputs = dict(outputs)
        for name in stage.budgets(problem):
            mine = owned(truth.inputs) if name.endswith("_state") else truth.rows
            outputs[name] = np.array(outputs[name])
            outputs[name][mine] = truth.want[name][mine]
    found = compare(stage.specs(problem), truth.want, Got(stage.canonical(problem, truth.inputs, outputs), 0))
    if found:
        return found.text(stage.label(case, found.output, found.row))
    for name in (n for n in outputs if n.endswith("_state")):
        for slot in np.setdiff1d(np.arange(len(outputs[name])), owned(truth.inputs)).tolist():
            if outputs[name][slot].tobytes() != truth.want[name][slot].tobytes():
                return f"row {slot} ({stage.label(case, name, slot)}) of {name}: another NaN than lay there"
    return None


# ---------------------------------------------------------------- the study


def study(plan: Plan, limits: Limits, identity: dict[str, Any], progress: Progress) -> Chain:
    """Every case of a plan through every kernel of its stage. Ctrl-C ends it with what there is by then."""
    found = Found()
    with contextlib.suppress(KeyboardInterrupt):
        tested = selftested(plan.device)
        for name in plan.stages():
            cases = [c for c in plan.cases if c.problem.stage == name]
            doubt = mistrust(STAGES[name], cases)
            for case in cases:
                traces = _traces(plan, case, tested, doubt)
                try:
                    _follow(case, traces, plan, limits, found, progress)
                finally:
                    found.curves += [trace.curve(plan, limits) for trace in traces]
        found.whole = True
    return Chain(
        capture=plan.capture, device=plan.device, stages=tuple(plan.stages()), steps=limits.steps, reset=limits.reset,
        max_scaled_ulp=limits.max_scaled_ulp, captured=found.captured, curves=tuple(found.curves), interrupted=not found.whole,
        identity=identity, loaded=found.loaded,
    )  # fmt: skip


@dataclass
class Found:
    """What a study has so far; ``whole`` when nothing is left to do."""

    curves: list[Curve] = field(default_factory=list)
    captured: dict[str, int] = field(default_factory=dict)
    loaded: dict[str, str] = field(default_factory=dict)
    whole: bool = False


def _traces(plan: Plan, case: Case, tested: Selftested, doubt: str | None) -> list[Trace]:
    """The contract's arm and one a kernel; those that take no step have ended."""
    stage = STAGES[case.problem.stage]
    traces = [Trace(case, CONTRACT, None)]
    for kernel in plan.kernels_of(stage.name):
        trace = Trace(case, kernel.id, kernel)
        if why := unavailable(kernel, case.problem, plan.device) or tested.lacks(kernel.rests_on):
            trace.status, trace.detail, trace.ended = "UNAVAILABLE", why, True
        elif why := doubt or tested.doubt((*stage.rests_on, *kernel.rests_on)):
            trace.status, trace.detail, trace.ended = "MISTRUSTED", why, True
        traces.append(trace)
    return traces


def _follow(case: Case, traces: Sequence[Trace], plan: Plan, limits: Limits, found: Found, progress: Progress) -> None:
    """All arms of a case, step by step."""
    hashes, workers = Hashes(), []
    listening: dict[str, Generator[Message | Died, None, None]] = {}
    try:
        for trace in traces:
            if trace.kernel and not trace.ended:
                load = (trace.kernel.file,) if trace.kernel.file else ()
                args = trace.kernel, case, limits.steps, limits.reset, plan.device, load
                workers.append(Worker(chain_main, *args, timeout_s=plan.timeout_s))
                listening[trace.name] = workers[-1].listen()
        for number, truth in zip(range(limits.steps), truths(case, limits.reset), strict=False):
            found.captured[str(case.id)] = found.captured.get(str(case.id), 0) + truth.captured
            for trace in (t for t in traces if not t.ended):
                if trace.kernel is None:
                    take(trace, number, truth, truth.want, limits)
                else:
                    _hear(trace, number, truth, next(listening[trace.name]), limits)
            progress(f"chain {case.problem.stage} {case.id.source.layer}", number + 1, limits.steps)
        for trace in (t for t in traces if t.kernel and not t.ended):
            if isinstance(last := next(listening[trace.name]), Done):
                found.loaded |= hashes.of(last.files)
    finally:
        for worker in workers:
            worker.stop()


def _hear(trace: Trace, number: int, truth: Truth, message: Message | Died, limits: Limits) -> None:
    """What a child says of a step."""
    step = number + 1
    if isinstance(message, Linked):
        for told in message.trespasses:
            trace.fault("FAIL", step, told)
        take(trace, number, truth, message.outputs, limits)
        specs = STAGES[trace.case.problem.stage].specs(trace.case.problem)
        if other := same_bits(specs, message.outputs, message.again):
            told = f"taken again at other addresses it wrote something else, first in row {other[1][0]} of {other[0]}"
            trace.fault("FAIL", step, told)
    elif isinstance(message, Raised):
        trace.end("DEVICE_LOST" if device_lost(message.summary) else "CRASHED", step, message.summary)
    elif isinstance(message, Died):
        trace.end(message.status, step, message.how)
    else:
        trace.end("CRASHED", step, "ended without an answer")
