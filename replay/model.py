"""Every value that walks the pipeline, from a captured row to a result.

Values only: no tensor, no file and no device is touched here, and msgspec is the one import. All structs are frozen
and refuse unknown fields, so that a journal line which claims more than its kind may hold does not parse.
"""

import re
from typing import Literal

import msgspec

DTYPE_BYTES = {"i8": 1, "bf16": 2, "f16": 2, "f32": 4, "i32": 4, "i64": 8}


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the values: frozen, comparable, closed to unknown fields."""


# ---------------------------------------------------------------- what is replayed


class Geometry(Value, frozen=True, kw_only=True):
    """Sizes of one tensor-parallel rank of a model; counts, never bytes."""

    preset: str
    tp: int
    hidden: int
    experts: int
    top_k: int
    inter: int
    k_heads: int
    v_heads: int
    head_dim: int
    conv_width: int
    vocab: int
    layers: int

    @property
    def conv_dim(self) -> int:
        """Channels of a GDN layer's q, k and v together."""
        return (2 * self.k_heads + self.v_heads) * self.head_dim

    def __str__(self) -> str:
        """``qwen36:tp4``, and behind a second colon whatever differs from that preset."""
        base = _PRESETS[self.preset](self.tp)
        changed = [f"{f}={getattr(self, f)}" for f in _SIZES if getattr(self, f) != getattr(base, f)]
        return f"{self.preset}:tp{self.tp}" + (":" + ",".join(changed) if changed else "")

    @classmethod
    def parse(cls, text: str) -> "Geometry":
        """Read back what ``str`` printed; ValueError names the part that is wrong."""
        match = re.fullmatch(r"([\w.-]+):tp(\d+)(?::([\w=,]+))?", text)
        if not match or match[1] not in _PRESETS:
            raise ValueError(f"geometry {text!r}: expected PRESET:tpN with PRESET one of {', '.join(_PRESETS)}")
        base = preset(match[1], int(match[2]))
        changes = dict(part.partition("=")[::2] for part in match[3].split(",")) if match[3] else {}
        if unknown := set(changes) - set(_SIZES):
            raise ValueError(f"geometry {text!r}: expected one of {', '.join(_SIZES)}, got {sorted(unknown)[0]!r}")
        if bad := [f"{n}={v}" for n, v in changes.items() if not v.isdigit()]:
            raise ValueError(f"geometry {text!r}: expected a whole number, got {bad[0]!r}")
        return msgspec.structs.replace(base, **{name: int(value) for name, value in changes.items()}).checked()

    def checked(self) -> "Geometry":
        """This geometry, its preset known and its sizes possible; ValueError otherwise."""
        preset(self.preset, self.tp)
        for size in _SIZES:
            if getattr(self, size) < 1:
                raise ValueError(f"{size}: expected 1 or more, got {getattr(self, size)}")
        if self.top_k > self.experts:
            raise ValueError(f"top_k: expected at most experts {self.experts}, got {self.top_k}")
        return self


_SIZES = ("hidden", "experts", "top_k", "inter", "k_heads", "v_heads", "head_dim", "conv_width", "vocab", "layers")


def _qwen36(tp: int) -> Geometry:
    """Qwen3.6-35B-A3B (model_type qwen3_5_moe)."""
    return Geometry(
        preset="qwen36", tp=tp, hidden=2048, experts=256, top_k=8, inter=512 // tp, k_heads=16 // tp,
        v_heads=32 // tp, head_dim=128, conv_width=4, vocab=248_320 // tp, layers=40,
    )  # fmt: skip


def _qwen3_next(tp: int) -> Geometry:
    """Qwen3-Next-80B-A3B."""
    return Geometry(
        preset="qwen3-next", tp=tp, hidden=2048, experts=512, top_k=10, inter=512 // tp, k_heads=16 // tp,
        v_heads=32 // tp, head_dim=128, conv_width=4, vocab=151_936 // tp, layers=48,
    )  # fmt: skip


def _qwen3_30b(tp: int) -> Geometry:
    """Qwen3-30B-A3B: no GDN layers, so its head counts are those of its attention and drive no stage."""
    return Geometry(
        preset="qwen3-30b", tp=tp, hidden=2048, experts=128, top_k=8, inter=768 // tp, k_heads=4 // tp,
        v_heads=32 // tp, head_dim=128, conv_width=4, vocab=151_936 // tp, layers=48,
    )  # fmt: skip


_PRESETS = {"qwen36": _qwen36, "qwen3-next": _qwen3_next, "qwen3-30b": _qwen3_30b}
PRESETS = tuple(_PRESETS)


def preset(name: str, tp: int) -> Geometry:
    """The geometry of one rank of a known model; ValueError where ``tp`` does not divide its sizes."""
    if name not in _PRESETS:
        raise ValueError(f"preset {name!r}: expected one of {', '.join(PRESETS)}")
    if tp < 1:
        raise ValueError(f"tp: expected a positive number, got {tp}")
    whole, part = _PRESETS[name](1), _PRESETS[name](tp)
    for size in ("inter", "k_heads", "v_heads", "vocab"):
        if getattr(part, size) * tp != getattr(whole, size):
            raise ValueError(f"tp: expected a divisor of {name}'s {size} {getattr(whole, size)}, got {tp}")
    return part


Layout = Literal["contiguous", "strided"]
LAYOUTS: tuple[Layout, ...] = ("contiguous", "strided")
# What a device can be asked: session/selftest.py.
SELFTESTS = ("division", "square_root", "contraction", "bf16", "gates", "sub_groups", "matrix")


class Problem(Value, frozen=True):
    """What a kernel may know: shapes, modes and layout, never which captured row it is given.

    ``strided``: inputs begin at an odd element of their storage, and the rows of those with two dimensions or more lie
    further apart than they are wide; outputs and weights are contiguous all the same.
    """

    stage: str
    geometry: Geometry
    rows: int
    modes: tuple[tuple[str, str], ...]
    layout: Layout = "contiguous"

    @property
    def modes_text(self) -> str:
        """``epilogue=row_then_col,bias=off``, in their order."""
        return ",".join(f"{name}={value}" for name, value in self.modes)

    def mode(self, name: str) -> str:
        """The value of one mode; KeyError when the stage has no such mode."""
        return dict(self.modes)[name]

    def with_mode(self, name: str, value: str) -> "Problem":
        """The same problem with one mode changed."""
        modes = tuple(sorted((dict(self.modes) | {name: value}).items()))
        return msgspec.structs.replace(self, modes=modes)


class Source(Value, frozen=True):
    """Where a case came from: capture name (or the first 8 hex digits of its sha256), layer, first token row, rows."""

    capture: str
    layer: str
    start: int
    rows: int


class Routes(Value, frozen=True, tag="routes", tag_field="holds"):
    """Captured routes of consecutive token rows: ids [T][k], and the router's weights [T][k] where captured."""

    topk_ids: tuple[tuple[int, ...], ...]
    topk_weights: tuple[tuple[float, ...], ...] | None = None


class Sequence(Value, frozen=True):
    """One sequence of a GDN batch: its row of captured states (−1: padding, no slot), and the rows of its tokens, maybe none."""

    state: int
    tokens: tuple[int, ...]


class States(Value, frozen=True, tag="states", tag_field="holds"):
    """Captured GDN rows, too large to travel: the state file they lie in, and which of its rows make up the batch."""

    path: str
    sequences: tuple[Sequence, ...]


class CaseId(Value, frozen=True):
    """``moe.layer@qwen36:tp4/lab6/L9/r0+1;quant=recip_half_away#7``: prints and parses symmetrically, inputs contiguous."""

    problem: Problem
    source: Source
    seed: int

    def __str__(self) -> str:
        p, s = self.problem, self.source
        modes = f";{p.modes_text}" if p.modes else ""
        return f"{p.stage}@{p.geometry}/{s.capture}/{s.layer}/r{s.start}+{s.rows}{modes}#{self.seed}"

    @classmethod
    def parse(cls, text: str) -> "CaseId":
        """Read back what ``str`` printed; ValueError otherwise."""
        match = re.fullmatch(
            r"(?P<stage>[\w.]+)@(?P<geometry>[^/]+)/(?P<capture>[^/]+)/(?P<layer>[^/]+)"
            r"/r(?P<start>\d+)\+(?P<rows>\d+)(?:;(?P<modes>[^#]+))?#(?P<seed>\d+)",
            text,
        )
        if not match:
            raise ValueError(f"case {text!r}: expected STAGE@GEOMETRY/CAPTURE/LAYER/rSTART+ROWS[;MODE=VALUE,…]#SEED")
        pairs = [part.partition("=") for part in match["modes"].split(",")] if match["modes"] else []
        rows = int(match["rows"])
        problem = Problem(match["stage"], Geometry.parse(match["geometry"]), rows, tuple((n, v) for n, _, v in pairs))
        return cls(problem, Source(match["capture"], match["layer"], int(match["start"]), rows), int(match["seed"]))


Twin = Literal["second", "strided", "strided second"]
TWINS: tuple[Twin, ...] = ("second", "strided", "strided second")


class Case(Value, frozen=True):
    """One replayed problem together with its captured rows, or for states with where they lie.

    Its twins have the same weights. ``second``: other bytes, activations of another seed and each token's slots in reverse
    order; a kernel that answers it with the first case's output has remembered, not computed. ``strided``: the bytes of
    either in strided inputs.
    """

    id: CaseId
    held: Routes | States
    twin: Twin | Literal[""] = ""

    @property
    def routes(self) -> Routes:
        """What a MoE case holds."""
        assert isinstance(self.held, Routes)
        return self.held

    @property
    def states(self) -> States:
        """What a GDN case holds."""
        assert isinstance(self.held, States)
        return self.held

    @property
    def problem(self) -> Problem:
        """Shapes, modes and layout."""
        return msgspec.structs.replace(self.id.problem, layout="strided") if "strided" in self.twin else self.id.problem

    @property
    def bytes_of(self) -> Literal["", "second"]:
        """Which bytes it holds: the case's own, or the other ones."""
        return "second" if "second" in self.twin else ""

    def twinned(self, twin: Twin) -> "Case":
        """One of its twins."""
        return msgspec.structs.replace(self, twin=twin)


class Spec(Value, frozen=True):
    """One tensor of a stage. ``stride`` (elements; None = contiguous) and ``offset`` (elements) are part of the input."""

    name: str
    role: Literal["in", "weight", "inout", "out", "scratch"]
    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...] | None = None
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the elements themselves, gaps of a stride not counted."""
        size = DTYPE_BYTES[self.dtype]
        for extent in self.shape:
            size *= extent
        return size


class Kernel(Value, frozen=True, kw_only=True):
    """Who can run a stage. Strings and numbers only, so that registering a kernel imports nothing.

    ``id`` reads ``provider:stage[:variant]``; ``prepare`` and ``prepack`` are ``module:function``. ``modes`` lists the
    values implemented, for modes not implemented in full; ``layouts`` the layouts of inputs it takes, each of which is
    judged; ``needs`` are probe strings; ``launches`` counts launches a call (None = not counted); ``file`` is the user's
    own source for a kernel brought by ``--load``. ``rests_on`` names self-tests of the device, beside those of its stage.
    ``budgeted``: where its output is not bit-equal it is held to its stage's budgets, and cannot be promoted; a kernel that does
    not ask for that is held to the bits.
    """

    id: str
    prepare: str
    devices: tuple[str, ...] = ("cpu",)
    modes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    layouts: tuple[Layout, ...] = LAYOUTS
    needs: tuple[str, ...] = ()
    launches: int | None = None
    graph_safe: bool = False
    budgeted: bool = False
    rests_on: tuple[str, ...] = ()
    prepack: str | None = None
    file: str | None = None
    summary: str = ""

    @property
    def stage(self) -> str:
        """The stage this kernel runs."""
        return self.id.split(":")[1]


# ---------------------------------------------------------------- what was measured


class Finding(Value, frozen=True):
    """One self-test of a device: how many answers were asked for (0: the device has no such unit), how many were wrong."""

    key: str
    name: str
    asked: int
    wrong: int

    def __str__(self) -> str:
        if not self.asked:
            return f"{self.name:<36} not there"
        return f"{self.name:<36} {f'WRONG in {self.wrong:,} of' if self.wrong else 'right,'} {self.asked:,}"


class Interval(Value, frozen=True):
    """A middle and a 95 % interval around it, all in the unit of the field that holds it."""

    mid: float
    lo: float
    hi: float


class Work(Value, frozen=True):
    """What a case must do at least. Bytes of the cold operand are apart from bytes that may come from cache."""

    read_bytes: int
    write_bytes: int
    hot_bytes: int
    int8_ops: int
    launches: int = 1


class Floor(Value, frozen=True):
    """The least time the device could take for a case, in µs, which term set it, and the terms of bytes and operations."""

    us: float
    term: Literal["bytes", "operations", "launch"]
    bytes_us: float
    operations_us: float
    work: Work


class Ceilings(Value, frozen=True):
    """Calibrated rates in GB/s (1e9 bytes a second) and GOP/s (1e9 operations, a multiply and an add being two), an empty
    launch in µs, and the implementation that reached each."""

    read_gbs: Interval
    copy_gbs: Interval
    inplace_gbs: Interval
    hot_gbs: Interval
    launch_us: Interval
    int8_gops: Interval
    bf16_gops: Interval
    best_of: dict[str, str]


class MemoryRates(Value, frozen=True):
    """The memory ceilings alone, in GB/s, as they are measured between one case and the next."""

    read_gbs: Interval
    copy_gbs: Interval
    inplace_gbs: Interval


# Behind a baseline's id: the arm that is a second copy of it, the null arm of a comparison.
NULL = "#null"


class Sample(Value, frozen=True):
    """One timed span: ``calls`` calls of one arm, a kernel's id or the baseline's with NULL behind it.

    ``span_ns`` is the time that counts, by the device's clock, and ``at_ns`` where the span began, from the first of its
    case and process. ``host_ns`` is what the host took to hand the calls over, where the device works apart from it;
    ``mhz`` the device's clock frequency beside the span, where it can be read.
    """

    block: int
    arm: str
    calls: int
    span_ns: int
    at_ns: int
    host_ns: int | None = None
    mhz: int | None = None
    flags: tuple[str, ...] = ()


class Timing(Value, frozen=True):
    """Time of one call in µs: the median over samples and the interval of that median; ``host_us`` is the host's part, where
    it is known apart from the device's."""

    us: Interval
    samples: int
    calls: int
    processes: int
    host_us: float | None = None


class Effect(Value, frozen=True):
    """log(arm / baseline) as a share: −0.5 is half the time; ``ratio`` with its interval at ``confidence``, ``ratio90`` with
    that at 90 %.

    ``confidence`` is 0.95, or more where the claim has several shapes; ``p`` is two-sided, of no effect, unadjusted.
    ``mde`` is the minimum detectable effect, a share found with power 0.9. ``needed`` counts the processes that would decide
    (None where one process tells no spread, or no number up to a thousand would).
    """

    ratio: Interval
    ratio90: Interval
    mde: float
    processes: int
    needed: int | None = None
    p: float = 1.0
    confidence: float = 0.95


class Comparison(Value, frozen=True):
    """A kernel against its baseline, and the baseline against a second copy of itself over the whole claim."""

    baseline: str
    effect: Effect
    null: Effect | None


class Verdict(Value, frozen=True):
    """The label a user acts on, and the reason codes behind it."""

    label: Literal["BASELINE", "FASTER", "SLOWER", "SAME", "INCONCLUSIVE", "INVALID"]
    quick: bool
    reasons: tuple[str, ...] = ()
    processes_needed: int | None = None


# ---------------------------------------------------------------- what came of it


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
