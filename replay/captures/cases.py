"""Select token rows of a capture and turn them into cases.

Two passes over the file, so that memory stays flat: the first counts the token rows each layer has after the filters,
the second picks the rows that the start indices name.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from replay.captures.index import Index
from replay.captures.index import load as load_index
from replay.captures.manifest import Capture
from replay.captures.routes import Batch, read_batches
from replay.captures.select import Select, chosen_starts, compiled, layer_label
from replay.errors import InputError
from replay.model import Case, CaseId, Geometry, Problem, Routes, Source

# `router` repeats what the apply stages record; where a capture holds several, one is replayed: the first of these.
STAGE_PREFERENCE = ("quark_int8_apply", "modular_apply", "router", "runner_pre_monolithic")

ProblemFor = Callable[[Geometry, int], Problem]


def cases(capture: Capture, select: Select, geometry: Geometry, problem_for: ProblemFor, seed: int) -> Iterator[Case]:
    """Yield the selected cases in file order per layer; every window size and start index makes one case a layer.

    ``problem_for(geometry, rows)`` builds the problem. Raises InputError for a filter that matches nothing, a start
    index past the end, or a capture whose experts or top-k are not the geometry's.
    """
    layers = _count(capture, select, geometry)
    for window in select.windows:
        wanted = {label: _starts(capture.routes, select, label, layers, window) for label in layers.rows}
        for source, routes in _pick(capture, select, layers, wanted, window):
            problem = problem_for(geometry, window)
            yield Case(CaseId(problem, source, seed), routes)


@dataclass(frozen=True)
class _Layers:
    """Token rows left by the filters per layer, and the one (stage, rank) that each layer is taken from."""

    rows: dict[str, int]
    origin: dict[str, tuple[str, str]]


def _passes(select: Select, batch: Batch) -> bool:
    return (select.min_num_tokens or 0) <= batch.num_tokens <= (select.max_num_tokens or batch.num_tokens)


def _count(capture: Capture, select: Select, geometry: Geometry) -> _Layers:
    index = load_index(capture)
    rows = _count_by_reading(capture, select, geometry) if index is None else _count_by_index(index, select, geometry)
    order = {name: i for i, name in enumerate(STAGE_PREFERENCE)}
    origin = {
        label: min(((s, r) for s, r, x in rows if x == label), key=lambda sr: (order.get(sr[0], len(order)), sr))
        for label in dict.fromkeys(label for _, _, label in rows)
    }
    return _Layers({label: rows[(*sr, label)] for label, sr in origin.items()}, origin)


_Rows = dict[tuple[str, str, str], int]  # (stage, rank, layer label) → token rows


def _count_by_index(index: Index, select: Select, geometry: Geometry) -> _Rows:
    layer_re = compiled("--route-layer-regex", select.layer_regex)
    stage_re = compiled("--route-stage-regex", select.stage_regex)
    passes, rows = _that_pass(index, select), _Rows()
    for key in index.keys:
        layer, stage, rank = key
        if layer_re.search(layer) and stage_re.search(stage) and len(found := index.rows_of(key, passes)[1]):
            label = stage, rank, layer_label(layer)
            rows[label] = rows.get(label, 0) + int(found[-1])
    for experts, top_k in index.sizes:
        _check_sizes(str(index.path), experts, top_k, geometry)
    if not rows:
        _nothing(index.path, select, {layer for layer, _, _ in index.keys}, {stage for _, stage, _ in index.keys}, 0)
    return rows


def _that_pass(index: Index, select: Select) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    least, most = select.min_num_tokens or 0, select.max_num_tokens
    return np.asarray((index.tokens >= least) & ((index.tokens <= most) if most else True))


def _count_by_reading(capture: Capture, select: Select, geometry: Geometry) -> _Rows:
    layer_re = compiled("--route-layer-regex", select.layer_regex)
    stage_re = compiled("--route-stage-regex", select.stage_regex)
    rows: _Rows = {}
    seen_layers: set[str] = set()
    seen_stages: set[str] = set()
    without_ids = 0
    for batch in read_batches(capture.routes):
        seen_layers.update(batch.layers)
        seen_stages.update(batch.stages)
        if batch.topk_ids is None:
            without_ids += len(batch.layers)
            continue
        if not _passes(select, batch):
            continue
        for i, (layer, stage, rank) in enumerate(zip(batch.layers, batch.stages, batch.ranks, strict=True)):
            if layer_re.search(layer) and stage_re.search(stage):
                _check_sizes(f"{capture.routes}:{batch.first_line}", batch.num_experts, batch.top_k, geometry)
                key = (stage, rank, layer_label(layer))
                rows[key] = rows.get(key, 0) + len(batch.real_tokens(i))
    if not rows:
        _nothing(capture.routes, select, seen_layers, seen_stages, without_ids)
    return rows


def _check_sizes(where: str, experts: int, top_k: int, geometry: Geometry) -> None:
    if experts != geometry.experts or top_k != geometry.top_k:
        expected = f"{geometry.experts}, {geometry.top_k} (geometry {geometry})"
        raise InputError(where, "num_experts, top_k", expected, f"{experts}, {top_k}")


def _nothing(path: Path, select: Select, layers: set[str], stages: set[str], without_ids: int) -> None:
    for option, pattern, names in (
        ("--route-layer-regex", select.layer_regex, layers),
        ("--route-stage-regex", select.stage_regex, stages),
    ):
        if pattern is not None and not any(re.search(pattern, name) for name in names):
            raise InputError(option, "pattern", f"one that matches a name in {path}: {_few(names)}", f"'{pattern}'")
    if without_ids:
        raise InputError(str(path), "topk_ids", "captured expert ids", f"{without_ids} records without any")
    raise InputError(str(path), "filters", "token rows left to replay", "none")


def _few(names: set[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:4]) + (f", … ({len(listed)} in all)" if len(listed) > 4 else "")


def _starts(path: Path, select: Select, label: str, layers: _Layers, window: int) -> list[int]:
    rows = layers.rows[label]
    starts = chosen_starts(select, rows, window)
    if bad := [s for s in starts if s + window > rows]:
        have = ", ".join(f"{name} {n}" for name, n in layers.rows.items())
        shortest = min(layers.rows.values())
        works = f"try 0:{shortest - window + 1}" if shortest >= window else f"a window of at most {shortest}"
        raise InputError(
            "--route-start-indices", "index",
            f"start + window ≤ the layer's token rows ({have}; {works})", f"{bad[0]} + {window} on {label} of {path.name}",
        )  # fmt: skip
    return starts


def _pick(
    capture: Capture, select: Select, layers: _Layers, wanted: dict[str, list[int]], window: int
) -> Iterator[tuple[Source, Routes]]:
    """The windows that begin at the rows wanted, at most so many a layer."""
    if (index := load_index(capture)) is not None:
        return _pick_by_index(capture.name, index, select, layers, wanted, window)
    return _pick_by_reading(capture, select, layers, wanted, window)


def _pick_by_index(
    name: str, index: Index, select: Select, layers: _Layers, wanted: dict[str, list[int]], window: int
) -> Iterator[tuple[Source, Routes]]:
    passes = _that_pass(index, select)
    for label, starts in wanted.items():
        keys = [k for k in index.keys if (k[1], k[2]) == layers.origin[label] and layer_label(k[0]) == label]
        # One label may stand for two spellings of a layer's name; their rows count in the order of the file.
        records = np.sort(np.concatenate([index.rows_of(key, passes)[0] for key in keys]))
        behind = np.cumsum(index.real[records], dtype=np.int64)
        for start in sorted(starts)[: select.max_cases]:
            first, last = np.searchsorted(behind, [start, start + window - 1], side="right")
            before = int(behind[first - 1]) if first else 0
            held = [row for batch in index.batches(records[first : last + 1]) for row in _rows(batch, 0)]
            yield Source(name, label, start, window), _routes(held[start - before : start - before + window])


def _routes(rows: "list[tuple[tuple[int, ...], tuple[float, ...] | None]]") -> Routes:
    weights = tuple(w for _, w in rows if w is not None)
    return Routes(tuple(ids for ids, _ in rows), weights or None)


def _pick_by_reading(
    capture: Capture, select: Select, layers: _Layers, wanted: dict[str, list[int]], window: int
) -> Iterator[tuple[Source, Routes]]:
    at = dict.fromkeys(layers.rows, 0)
    taken = dict.fromkeys(layers.rows, 0)
    open_windows: dict[str, list[tuple[int, list[tuple[tuple[int, ...], tuple[float, ...] | None]]]]] = {}
    pending = {label: sorted(starts) for label, starts in wanted.items()}
    for label, row in _token_rows(capture, select, layers):
        index = at[label]
        at[label] += 1
        while pending[label] and pending[label][0] == index:
            open_windows.setdefault(label, []).append((pending[label].pop(0), []))
        for start, rows in list(open_windows.get(label, ())):
            rows.append(row)
            if len(rows) == window:
                open_windows[label].remove((start, rows))
                if select.max_cases is None or taken[label] < select.max_cases:
                    taken[label] += 1
                    yield Source(capture.name, label, start, window), _routes(rows)


def _records(capture: Capture, select: Select, layers: _Layers) -> Iterator[tuple[str, Batch, int]]:
    """(layer label, batch, place in it) of every record left by the filters, from the one origin of its layer."""
    for batch in read_batches(capture.routes):
        if batch.topk_ids is None or not _passes(select, batch):
            continue
        for i, (layer, stage, rank) in enumerate(zip(batch.layers, batch.stages, batch.ranks, strict=True)):
            label = layer_label(layer)
            if layers.origin.get(label) != (stage, rank):
                continue
            if select.layer_regex is None or re.search(select.layer_regex, layer):
                yield label, batch, i


def _token_rows(
    capture: Capture, select: Select, layers: _Layers
) -> Iterator[tuple[str, tuple[tuple[int, ...], tuple[float, ...] | None]]]:
    """(layer label, (ids, weights)) of every token row left by the filters."""
    for label, batch, i in _records(capture, select, layers):
        for row in _rows(batch, i):
            yield label, row


def _rows(batch: Batch, i: int) -> Iterator[tuple[tuple[int, ...], tuple[float, ...] | None]]:
    assert batch.topk_ids is not None  # records without ids are left out before
    for t in batch.real_tokens(i):
        weights = None if batch.topk_weights is None else _f32_tuple(batch.topk_weights[i, t])
        yield tuple(batch.topk_ids[i, t].tolist()), weights


def _f32_tuple(row: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> tuple[float, ...]:
    """The router's weights are f32; the text of a capture may hold more digits."""
    return tuple(row.astype(np.float32).astype(np.float64).tolist())


def shape_hits(capture: Capture, select: Select, geometry: Geometry) -> dict[int, int]:
    """token rows → records left by the filters that have so many: how often the endpoint called a layer with that shape.
    States tell nothing of it."""
    if capture.holds != "routes":
        return {}
    layers = _count(capture, select, geometry)
    return Counter(len(batch.real_tokens(i)) for _, batch, i in _records(capture, select, layers))


def routes_at(capture: Capture, sources: Iterable[Source], filters: Select, geometry: Geometry) -> dict[Source, Routes]:
    """The captured rows of many sources, in two readings of the file a window length; those that are not there are left out."""
    layers = _count(capture, filters, geometry)
    found: dict[Source, Routes] = {}
    wanted = {s for s in sources if s.capture == capture.name}
    for window in sorted({s.rows for s in wanted}):
        starts = {label: [s.start for s in wanted if (s.layer, s.rows) == (label, window)] for label in layers.rows}
        found.update(_pick(capture, filters, layers, starts, window))
    return found


def find(capture: Capture, wanted: CaseId, filters: Select) -> Case:
    """The case of one id, its rows read from the capture; InputError where the capture is not the id's."""
    source = wanted.source
    if source.capture != capture.name:
        raise InputError("--case", "capture", capture.name, source.capture)
    select = replace(filters, start_indices=str(source.start), windows=(source.rows,))
    geometry = wanted.problem.geometry
    layers = _count(capture, select, geometry)
    if source.layer not in layers.rows:
        raise InputError("--case", "layer", f"one of {', '.join(layers.rows)}", source.layer)
    layers = _one_layer(layers, source.layer)
    starts = _starts(capture.routes, select, source.layer, layers, source.rows)
    for found, routes in _pick(capture, select, layers, {source.layer: starts}, source.rows):
        if found == source:
            return Case(wanted, routes)
    raise InputError("--case", "rows", f"rows of {capture.routes}", f"r{source.start}+{source.rows}")


def _one_layer(layers: _Layers, label: str) -> _Layers:
    """The same choice of stage and rank, one layer of it."""
    return _Layers({label: layers.rows[label]}, {label: layers.origin[label]})
