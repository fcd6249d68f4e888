"""The same problem on other bytes and in other layouts: timed calls never see an input twice, so that a remembered output is
of no use, and every case is judged beside its twins."""

from collections.abc import Collection

import msgspec
import numpy as np

from replay.model import Case, Layout, Logits, Routes, Spec, Twin
from replay.stages.stage import Stage, Tensors

# The variation whose outputs are compared with the oracle, among many that are not; no kernel can tell which is which.
CHECKED = 0


def inputs_when_timed(stage: Stage, case: Case) -> Tensors:
    """The case's inputs in the variation that is checked while a kernel is timed."""
    return varied(stage.specs(case.problem), stage.inputs(case), CHECKED)


_VALUES = ("bf16", "f16", "f32", "i8")


def varied(specs: tuple[Spec, ...], inputs: Tensors, number: int) -> Tensors:
    """The inputs with the elements of every row in another order, one order for each ``number``.

    Only matrices of values are touched: ids, maps and offsets belong together, and vectors of scales run along the rows.
    Where a stage has no such input (the route), the slots of every token change places.
    """
    matrices = [s for s in specs if s.role == "in" and len(s.shape) > 1 and isinstance(inputs[s.name], np.ndarray)]
    chosen = [s for s in matrices if s.dtype in _VALUES] or [s for s in matrices if s.name == "topk_ids"]
    moved = dict(inputs)
    for spec in chosen:
        array = inputs[spec.name]
        assert isinstance(array, np.ndarray)  # chosen so above
        order = np.random.Generator(np.random.Philox(key=number)).permutation(array.shape[-1])
        moved[spec.name] = np.ascontiguousarray(array[..., order])
    return moved


def doubled(case: Case) -> Case:
    """A case and the same again, of routes with every expert's neighbour in its place: two tokens at least, with other experts.
    One token alone is all alike to a stage that only moves rows. States stay as they are: no two sequences share one."""
    held = case.held
    if isinstance(held, Routes):
        experts = case.problem.geometry.experts
        shifted = tuple(tuple((e + 1) % experts if e >= 0 else e for e in row) for row in held.topk_ids)
        weights = held.topk_weights and (*held.topk_weights, *reversed(held.topk_weights))
        return with_rows(case, Routes((*held.topk_ids, *shifted), weights), 2 * case.problem.rows)
    if isinstance(held, Logits):
        return with_rows(case, Logits(held.path, held.rows * 2), 2 * case.problem.rows)
    return case


def with_rows(case: Case, held: Routes | Logits, rows: int) -> Case:
    """The case with other rows, so many."""
    replace = msgspec.structs.replace
    id_ = replace(case.id, problem=replace(case.problem, rows=rows), source=replace(case.id.source, rows=rows))
    return replace(case, id=id_, held=held)


def twins_of(stage: Stage, layouts: Collection[Layout]) -> tuple[Twin, ...]:
    """The twins that a kernel with these layouts is judged on."""
    strided: tuple[Twin, ...] = ("strided", "strided second") if "strided" in layouts else ()
    edges: tuple[Twin, ...] = ("edges",) if stage.edges else ()
    return ("second", *strided, *edges)


def twin_of(stage: Stage, case: Case, twin: Twin) -> Case:
    """A twin of a case. A single token is doubled before it is strided, since one row alone has no stride to be ignored; not
    where a stage reads weights, of which a second token would need as many again."""
    if twin == "edges":
        assert stage.edges is not None  # twins_of says so
        return stage.edges(case)
    alone = case.problem.rows == 1 and stage.relabel is None
    return (doubled(case) if "strided" in twin and alone else case).twinned(twin)
