"""A state fed back for K steps: does a kernel keep the contract's bits, and how far does it drift from f64?

The kernels of a case take their steps beside one another, each in a child of its own that holds no expected output; here the
contract (the f32 oracle) and f64 take the same steps on the same inputs, and whatever a child sends is held against both.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.errors import InputError
from replay.exactness import Got
from replay.exactness.compare import compare
from replay.exactness.trust import mistrust
from replay.exactness.ulp import ulp
from replay.kernels.registry import unavailable
from replay.model import Case, Kernel, Value
from replay.oracle import gdn64
from replay.oracle.arith import bf16_to_f32
from replay.oracle.gdn import gates, split_heads, widen
from replay.session.child import Linked, Message, Raised
from replay.session.journal import Plan
from replay.session.workers import Died, Worker, device_lost, selftested
from replay.stages import STAGES
from replay.stages.gdn_chain import carried, links, owned
from replay.stages.gdn_tensors import heads_of
from replay.stages.stage import Outputs, Tensors
from replay.studies.links import chain_main

CONTRACT = "the contract (f32 oracle)"
Status = Literal[
    "BOUNDED", "DRIFTED", "OVERFLOWED", "FAIL", "MISTRUSTED", "CRASHED", "TIMEOUT", "DEVICE_LOST", "UNAVAILABLE", "INTERRUPTED"
]
Progress = Callable[[str, int, int], None]
Numbers = NDArray[np.float64]


class Curve(Value, frozen=True, kw_only=True):
    """One kernel on one case: after each step the largest error of the states and of the output against f64, in ulp of their
    dtype at what was reduced (semantics: WITHIN_ULP), and how it ended. ``differs``: the first step without the contract's
    bits, where a ``budgeted`` kernel's sums are not looked at. ``farther``: by how much at most it was farther from f64 than
    the contract at the same step. ``reproduce``: the command that shows again what is wrong with it."""

    case: str
    layer: str
    kernel: str
    dtype: str
    state_ulp: tuple[float, ...]
    out_ulp: tuple[float, ...]
    status: Status
    detail: str = ""
    differs: int | None = None
    budgeted: bool = False
    farther: float = 0.0
    reproduce: str | None = None


class Chain(Value, frozen=True, kw_only=True):
    """What ``chain`` found. ``captured``: case → steps whose inputs the capture has; the others were drawn."""

    capture: str
    device: str
    stages: tuple[str, ...]
    steps: int
    reset: str
    max_scaled_ulp: float
    captured: dict[str, int]
    curves: tuple[Curve, ...]
    identity: dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """How long a chain is, what its steps find, and how far from f64 it may come."""

    steps: int
    reset: str
    max_scaled_ulp: float


@dataclass
class Trace:
    """What is known of one arm so far."""

    case: Case
    name: str
    kernel: Kernel | None
    dtype: str
    state_ulp: list[float] = field(default_factory=list)
    out_ulp: list[float] = field(default_factory=list)
    status: Status = "BOUNDED"
    detail: str = ""
    differs: int | None = None
    farther: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether no further step says anything."""
        return self.status not in ("BOUNDED", "DRIFTED", "FAIL")

    def end(self, status: Status, detail: str) -> None:
        """It takes no further step."""
        self.status, self.detail = status, detail

    def curve(self, plan: Plan, limits: Limits) -> Curve:
        """As it is kept."""
        case = self.case.id
        red = self.kernel and self.status not in ("BOUNDED", "UNAVAILABLE", "INTERRUPTED")
        return Curve(
            case=str(case), layer=case.source.layer, kernel=self.name, dtype=self.dtype, state_ulp=tuple(self.state_ulp),
            out_ulp=tuple(self.out_ulp), status=self.status, detail=self.detail, differs=self.differs,
            budgeted=self.kernel is not None and self.kernel.budgeted, farther=self.farther,
            reproduce=_reproduction(plan, limits, str(case), self.name) if red else None,
        )  # fmt: skip


@dataclass(frozen=True)
class Truth:
    """One step as it should be: what it was given, the contract's outputs, f64, and whether its inputs were captured."""

    inputs: Tensors
    want: Outputs
    exact: gdn64.Step
    captured: bool


def truths(case: Case, reset: str) -> Iterator[Truth]:
    """The contract's steps and those of f64, without end."""
    stage, problem = STAGES[case.problem.stage], case.problem
    first = stage.inputs(case)
    at_first = states(case, first, first["ssm_state"]).astype(np.float64)
    rows = np.asarray(first["slots"]) >= 0
    exact, want = at_first, None
    for link in links(case, reset):
        inputs: Tensors = {**link.inputs, **carried(case, reset, first, want)}
        want = stage.expected(problem, inputs)
        q, k, v = split_heads(link.qkv[rows], heads_of(problem), problem.mode("l2norm"))
        log_a, dt_bias = np.asarray(inputs["A_log"]), widen(np.asarray(inputs["dt_bias"]))
        g, beta = gates(bf16_to_f32(link.a[rows]), bf16_to_f32(link.b[rows]), log_a, dt_bias, problem.mode("softplus"))
        found = gdn64.step(at_first if reset == "fresh" else exact, q, k, v, g, beta)
        exact = found.state
        yield Truth(inputs, want, found, link.captured)


def states(case: Case, first: Tensors, table: Any) -> NDArray[np.float32]:
    """The states that sequences own, [N, Hv, V, K] in f32, as a table holds them."""
    held = widen(np.asarray(table)[owned(first)])
    return held if case.problem.mode("state_layout") == "v_k" else held.swapaxes(2, 3)


def _reproduction(plan: Plan, limits: Limits, case: str, kernel: str) -> str:
    """The command that shows one arm again."""
    file = next(k.file for k in plan.kernels if k.id == kernel)
    words = ["b70-replay", "chain", "--state", plan.capture_path, "--case", case, "--kernel", kernel]
    words += ["--load", file] if file else []
    words += ["--device", plan.device] if plan.device != "cpu" else []
    words += ["--steps", str(limits.steps), "--reset", limits.reset, "--max-scaled-ulp", f"{limits.max_scaled_ulp:g}"]
    return shlex.join(words)


# ---------------------------------------------------------------- errors


def errors(case: Case, truth: Truth, outputs: Outputs) -> tuple[float, float]:
    """(of the states, of the output): the largest |got − f64| in ulp at what was reduced; inf where one is not finite."""
    rows = np.asarray(truth.inputs["slots"]) >= 0
    dtype = case.problem.mode("ssm_state")
    state = states(case, truth.inputs, outputs["ssm_state"])
    largest = np.abs(truth.exact.state).max(axis=3, keepdims=True)
    out = widen(outputs["core_attn_out"][rows])
    scale = np.maximum(truth.exact.terms, np.abs(truth.exact.out))
    return _largest(state, truth.exact.state, ulp(largest, dtype)), _largest(out, truth.exact.out, ulp(scale, "bf16"))


def _largest(got: NDArray[np.float32], want: Numbers, step: Numbers) -> float:
    if not np.isfinite(got).all():
        return float("inf")
    return float((np.abs(got.astype(np.float64) - want) / step).max(initial=0))


def take(trace: Trace, number: int, truth: Truth, outputs: Outputs, limits: Limits) -> None:
    """One step of an arm: its errors, its bits, and what they come to.

    f32 itself drifts; what counts against a kernel is by how much farther from f64 it is than the contract.
    """
    state, out = errors(trace.case, truth, outputs)
    if not np.isfinite([state, out]).all():
        what = "a state" if not np.isfinite(state) else "the output"
        trace.end("OVERFLOWED", f"step {number + 1}: {what} is not finite in {trace.dtype}")
        return
    trace.state_ulp.append(state)
    trace.out_ulp.append(out)
    if trace.kernel and trace.differs is None and (told := _differs(trace.case, trace.kernel, truth, outputs)):
        trace.differs = number + 1
        trace.status, trace.detail = "FAIL", f"step {number + 1}: {told}"
    own = errors(trace.case, truth, truth.want) if trace.kernel else (state, out)
    farther = max(state - own[0], out - own[1])
    trace.farther = max(trace.farther, farther)
    if farther > limits.max_scaled_ulp and trace.status == "BOUNDED":
        trace.status = "DRIFTED"
        limit = f"limit {limits.max_scaled_ulp:g}"
        trace.detail = f"step {number + 1}: {farther:.3g} scaled ulp farther from f64 than the contract ({limit})"


def _differs(case: Case, kernel: Kernel, truth: Truth, outputs: Outputs) -> str | None:
    """The worst row that has not the contract's bits. What a budgeted kernel may sum in another order is not looked at."""
    stage, problem = STAGES[case.problem.stage], case.problem
    if kernel.budgeted:
        outputs = dict(outputs)
        for name in stage.budgets:
            mine = owned(truth.inputs) if name.endswith("_state") else np.flatnonzero(np.asarray(truth.inputs["slots"]) >= 0)
            outputs[name] = np.array(outputs[name])
            outputs[name][mine] = truth.want[name][mine]
    found = compare(stage.specs(problem), truth.want, Got(stage.canonical(problem, truth.inputs, outputs), 0))
    return found.text(stage.label(case, found.output, found.row)) if found else None


# ---------------------------------------------------------------- the study


def study(plan: Plan, limits: Limits, identity: dict[str, Any], progress: Progress) -> Chain:
    """Every case of a plan through every kernel of its stage. Ctrl-C ends it with what there is by then."""
    curves: list[Curve] = []
    captured: dict[str, int] = {}
    tested = selftested(plan.device)
    for case in plan.cases:
        stage = STAGES[case.problem.stage]
        doubt = mistrust(stage, [case])
        traces = [Trace(case, CONTRACT, None, case.problem.mode("ssm_state"))]
        for kernel in plan.kernels_of(stage.name):
            trace = Trace(case, kernel.id, kernel, case.problem.mode("ssm_state"))
            if why := unavailable(kernel, case.problem, plan.device) or tested.lacks(kernel.rests_on):
                trace.end("UNAVAILABLE", why)
            elif why := doubt or tested.doubt((*stage.rests_on, *kernel.rests_on)):
                trace.end("MISTRUSTED", why)
            traces.append(trace)
        went_on = _follow(case, traces, plan, limits, captured, progress)
        curves += [trace.curve(plan, limits) for trace in traces]
        if not went_on:
            break
    return Chain(
        capture=plan.capture, device=plan.device, stages=tuple(plan.stages()), steps=limits.steps, reset=limits.reset,
        max_scaled_ulp=limits.max_scaled_ulp, captured=captured, curves=tuple(curves), identity=identity,
    )  # fmt: skip


def _follow(
    case: Case, traces: Sequence[Trace], plan: Plan, limits: Limits, captured: dict[str, int], progress: Progress
) -> bool:
    """All arms of a case, step by step. False where it was interrupted."""
    listening = {
        t.name: Worker(
            chain_main, t.kernel, case, limits.steps, limits.reset, plan.device, (t.kernel.file,) if t.kernel.file else (),
            timeout_s=plan.timeout_s,
        ).listen()
        for t in traces if t.kernel and not t.ended
    }  # fmt: skip
    try:
        for number, truth in zip(range(limits.steps), truths(case, limits.reset), strict=False):
            captured[str(case.id)] = captured.get(str(case.id), 0) + truth.captured
            for trace in traces:
                if trace.kernel is None and not trace.ended:
                    take(trace, number, truth, truth.want, limits)
                elif trace.name in listening and not trace.ended:
                    _hear(trace, number, truth, next(listening[trace.name]), limits)
            progress(f"chain {case.problem.stage} {case.id.source.layer}", number + 1, limits.steps)
    except KeyboardInterrupt:
        for trace in (t for t in traces if not t.ended):
            trace.end("INTERRUPTED", f"after step {len(trace.state_ulp)}")
        return False
    finally:
        for messages in listening.values():
            messages.close()
    return True


def _hear(trace: Trace, number: int, truth: Truth, message: Message | Died, limits: Limits) -> None:
    """What a child says of a step."""
    if isinstance(message, Linked):
        if message.trespasses:
            trace.end("FAIL", f"step {number + 1}: {'; '.join(message.trespasses)}")
        else:
            take(trace, number, truth, message.outputs, limits)
    elif isinstance(message, Raised):
        status: Status = "DEVICE_LOST" if device_lost(message.summary) else "CRASHED"
        trace.end(status, f"step {number + 1}: {message.summary}")
    elif isinstance(message, Died):
        trace.end(message.status, f"step {number + 1}: {message.how}")
    else:
        raise TypeError(f"a step of {trace.name}: expected Linked, Raised or Died, got {type(message).__name__}")


def encode(chain: Chain) -> bytes:
    """chain.json."""
    return msgspec.json.encode(chain) + b"\n"


def decode(path: Path) -> Chain:
    """A chain.json; InputError where it is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Chain)
    except msgspec.DecodeError as error:
        raise InputError(str(path), "content", "what `chain` writes", str(error)) from None
