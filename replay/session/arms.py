"""Turn a kernel and a case into something that can be called: weights placed, prepack done, prepare called.

Runs in a child process. ``Arms`` keeps what is dear between cases: tables and prepared runs.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from replay.devices import CACHE_PASSES, Device
from replay.kernels.registry import Run, resolve
from replay.model import Case, Kernel, Prepack
from replay.oracle.moe import ExpertRows
from replay.session.buffers import Binding, Tables, Use, all_intact, bind, to_numpy, to_torch
from replay.stages import STAGES
from replay.stages.stage import Tensors

if TYPE_CHECKING:
    import torch

# A bigger ring gains nothing once it passes the cache three times, and every table copy is prepared on its own.
MAX_TABLES = 256
HOT_RING, HOT_RING_ACCELERATOR = 64, 256
WARM_SHARE = 4  # of the last-level cache, what warm bindings may hold
LEAST_RING = 8  # of bindings that hold what is cold


class Arms:
    """Prepares kernels on one device for one case after another."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.tables = Tables(device)
        self.packed: dict[tuple[str | None, str], dict[str, torch.Tensor]] = {}
        self.case: Case | None = None

    def begin(self, case: Case) -> Tensors:
        """Draw the inputs of the next case; what was packed for another one is forgotten."""
        if self.case is None or (self.case.id, self.case.held) != (case.id, case.held):
            self.packed.clear()
        self.case = case
        return STAGES[case.problem.stage].inputs(case)

    def weights(
        self, kernel: Kernel, inputs: Tensors, slots: NDArray[Any] | None = None, copy: int = 0
    ) -> dict[str, "torch.Tensor"]:
        """The weight tables a kernel reads, prepacked where it declares so, with the active experts at ``slots``.

        Kernels with the same prepack share one table: it is packed expert by expert, then placed.
        """
        assert self.case is not None
        problem = self.case.problem
        experts = {n: t for n, t in inputs.items() if isinstance(t, ExpertRows)}
        if not experts:
            return {}
        key = (kernel.prepack, problem.stage)
        if key not in self.packed:
            dtypes = {s.name: s.dtype for s in STAGES[problem.stage].specs(problem)}
            rows = {n: to_torch(t.rows, dtypes[n]).to(self.device.name) for n, t in experts.items()}
            self.packed[key] = resolve(kernel, kernel.prepack)(problem, rows) if kernel.prepack else rows
        label = kernel.prepack or ""
        placed = {}
        for name, packed in self.packed[key].items():
            table = experts[name]
            at = slots if slots is not None and len(slots) <= table.total else table.experts
            placed[name] = self.tables.place(f"{label}/{name}", table.total, at, packed, copy)
        return placed

    def prepack_of(self, kernel: Kernel) -> Prepack | None:
        """Hash and size of what the kernel's prepack made for this case."""
        assert self.case is not None
        packed = self.packed.get((kernel.prepack, self.case.problem.stage))
        if kernel.prepack is None or packed is None:
            return None
        digest = hashlib.sha256()
        total = 0
        totals = {s.name: s.shape[0] for s in STAGES[self.case.problem.stage].specs(self.case.problem)}
        for name, rows in sorted(packed.items()):
            digest.update(name.encode() + np.ascontiguousarray(to_numpy(rows)).tobytes())
            total += totals[name] * rows[:1].numel() * rows.element_size()
        return Prepack(digest.hexdigest(), total)

    def prepare(self, kernel: Kernel, weights: Mapping[str, "torch.Tensor"]) -> Run:
        """The kernel's run for this case's problem."""
        assert self.case is not None
        run: Run = resolve(kernel, kernel.prepare)(self.case.problem, weights)
        if not callable(run):
            raise TypeError(f"{kernel.prepare}: expected prepare to return a function, got {type(run).__name__}")
        return run

    def binding(self, inputs: Tensors, weights: Mapping[str, "torch.Tensor"]) -> Binding:
        """Fresh buffers at the case's true expert ids."""
        assert self.case is not None
        problem = self.case.problem
        return bind(STAGES[problem.stage].specs(problem), inputs, weights, self.device)


def _nothing() -> None:
    """Caches stay as they are."""


class Ring:
    """The bindings that timed calls rotate through, so that no call finds its cold operand in a cache.

    With expert weights: as many disjoint sets of slots as the table has room for, each holding equal bytes, and more
    tables while the sets together do not pass the last-level cache three times.
    """

    def __init__(self, arms: Arms, case: Case, inputs: Tensors, cache: str) -> None:
        self.arms, self.inputs, self.cache = arms, inputs, cache
        stage = STAGES[case.problem.stage]
        table = max((t for t in inputs.values() if isinstance(t, ExpertRows)), key=lambda t: t.total, default=None)
        self.copies, self.sets, self.set_bytes = 1, 1, 0
        self.flushed = cache == "cold-all"
        hot = HOT_RING_ACCELERATOR if arms.device.kind != "cpu" else HOT_RING
        held = sum(s.nbytes for s in stage.specs(case.problem) if s.role != "weight")
        if stage.relabel is None or (table is not None and not len(table.experts)):
            table = None  # no weights that a call reads
        cold = table is None and cache != "warm" and stage.work(case.problem, inputs).read_bytes > 0
        if cache == "warm" or (cache == "cold-weights" and table is None and not cold):
            # As many as stay in the cache; one alone makes spans of one short call.
            shared = sum(t.rows.nbytes for t in inputs.values() if isinstance(t, ExpertRows))
            hot = int(np.clip((arms.device.llc_bytes() // WARM_SHARE - shared) // held, 1, hot))
        self.relabel: Any = None
        self.slots: NDArray[Any] | None = None
        goal = 0 if cache == "warm" else CACHE_PASSES * arms.device.llc_bytes()
        if table is None:
            # States are cold without being weights. They are restored right before a span, so the caches are flushed behind
            # that; the ring then need not pass them, and holds no more than that in all.
            self.flushed = self.flushed or cold
            count = min(max(goal // held, LEAST_RING), hot) if cold else hot
            self.bindings = [arms.binding(inputs, {}) for _ in range(count)]
            return
        active = len(table.experts)
        self.set_bytes = sum(t.rows.nbytes for t in inputs.values() if isinstance(t, ExpertRows))
        self.sets = sets = 1 if cache == "warm" else table.total // active
        self.copies = min(max(-(-goal // (sets * self.set_bytes)), 1), MAX_TABLES)
        self.slots = np.arange(sets * active)
        self.relabel = stage.relabel
        laps = hot if cache == "warm" else self.copies  # warm: many bindings over one set of weights
        self.bindings = [arms.binding(moved, {}) for _ in range(laps) for moved in self.moved(inputs)]

    def cold_on(self, bindings: int) -> bool:
        """Whether the cold operand is cold on so many bindings, one after another: where it is a weight that is to be cold by
        rotation, they must pass the last-level cache often enough."""
        if self.cache != "cold-weights" or not self.set_bytes:
            return True
        return bindings * self.set_bytes >= CACHE_PASSES * self.arms.device.llc_bytes()

    def moved(self, inputs: Tensors) -> list[Tensors]:
        """The inputs for each set of slots; the inputs themselves where nothing is relabelled."""
        if self.slots is None or self.relabel is None:
            return [inputs]
        active = len(self.slots) // self.sets
        return [self.relabel(inputs, self.slots[s * active : (s + 1) * active]) for s in range(self.sets)]

    def use(self, bindings: Sequence[Binding], kept: int | None, rng: np.random.Generator) -> Use:
        """These bindings as a span uses them; where caches are flushed, nothing is in one when the clock starts."""
        return Use(bindings, kept, rng, self.arms.device.flush if self.flushed else _nothing)

    def doubtful(self, used: Sequence[Binding]) -> Sequence[Binding]:
        """Those of these bindings that have to be looked at one by one: on an accelerator, none while all are intact."""
        return used if self.arms.device.kind == "cpu" or not all_intact(used) else ()

    def runs(self, kernel: Kernel) -> list[tuple[Run, dict[str, Any]]]:
        """One (run, tensors) per binding for a kernel."""
        made: list[tuple[Run, dict[str, Any]]] = []
        per_copy = len(self.bindings) // self.copies
        for copy in range(self.copies):
            weights = self.arms.weights(kernel, self.inputs, self.slots, copy)
            run = self.arms.prepare(kernel, weights)
            for binding in self.bindings[copy * per_copy : (copy + 1) * per_copy]:
                made.append((run, {**binding.tensors, **weights}))
        return made
