"""What is replayed, and by whom: problems, cases, tensors, kernels."""

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from replay.model.geometry import Geometry
from replay.model.value import Value

DTYPE_BYTES = {"i8": 1, "bf16": 2, "f16": 2, "f32": 4, "i32": 4, "i64": 8}

# The family of a stage → what the captures hold that drive it.
HELD: Mapping[str, Literal["routes", "states", "logits"]] = {"moe": "routes", "gdn": "states", "topk": "logits"}
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


class Logits(Value, frozen=True, tag="logits", tag_field="holds"):
    """Captured rows of logits: the file they lie in, and which of its rows make up the batch."""

    path: str
    rows: tuple[int, ...]


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


Twin = Literal["second", "strided", "strided second", "edges"]


class Case(Value, frozen=True):
    """One replayed problem together with its captured rows, or for states and logits with where they lie.

    Its twins have the same weights. ``second``: other bytes, activations of another seed and each token's slots in reverse
    order; a kernel that answers it with the first case's output has remembered, not computed. ``strided``: the bytes of
    either in strided inputs. ``edges``, where the stage has any: rows that no capture holds.
    """

    id: CaseId
    held: Routes | States | Logits
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
    def logits(self) -> Logits:
        """What a top-k case holds."""
        assert isinstance(self.held, Logits)
        return self.held

    @property
    def problem(self) -> Problem:
        """Shapes, modes and layout."""
        return msgspec.structs.replace(self.id.problem, layout="strided") if "strided" in self.twin else self.id.problem

    @property
    def bytes_of(self) -> Literal["", "second", "edges"]:
        """Which bytes it holds: the case's own, the other ones, or edges."""
        return "second" if "second" in self.twin else "edges" if self.twin == "edges" else ""

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
