"""From what a user asked for to a plan: capture opened, cases selected, kernels chosen, everything checked.

Nothing is written and no kernel is run here; whatever is wrong with the request is an InputError.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from replay import devices
from replay.captures import Capture, Select, cases, locate, logits, open_capture, states
from replay.captures.cases import find, shape_hits
from replay.captures.manifest import Holds, default_geometry
from replay.errors import InputError
from replay.kernels import registry
from replay.model import HELD, Case, CaseId, Geometry, Kernel
from replay.session.journal import Plan
from replay.session.workers import kernels_of_file
from replay.stages import STAGES, check_modes, matching, problem_for
from replay.stages.draw import NAME as GENERATOR
from replay.stages.stage import Stage
from replay.verdict import is_quick

OPTION = {"routes": "--route-jsonl", "states": "--state", "logits": "--logits"}  # what a capture holds → what asks for it
FAMILY: Mapping[Holds, str] = {holds: family for family, holds in HELD.items()}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of ``run``, parsed but not yet checked against anything; ``holding``: what the capture must hold."""

    capture: str | None
    route_layer_regex: str | None = None
    route_stage_regex: str | None = None
    route_start_indices: str | None = None
    route_windows: tuple[int, ...] = (1,)
    route_min_num_tokens: int | None = None
    route_max_num_tokens: int | None = None
    max_cases: int | None = None
    stages: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    case_ids: tuple[str, ...] = ()
    load: tuple[str, ...] = ()
    baseline: str | None = None
    device: str = "cpu"
    model: str | None = None
    tp: int | None = None
    modes: Mapping[str, str]
    cache: str = "cold-weights"
    launch: Literal["calls", "graph"] = "calls"
    blocks: int = 30
    processes: int
    repeats: int = 16
    timeout: int = 120
    margin: float = 0.01
    seed: int = 7
    require: str | None = None
    holding: Holds | None = None


def make_plan(asked: Asked) -> Plan:
    """The plan of a run; InputError for anything that cannot be done as asked."""
    if asked.capture is None:
        raise InputError("run", "--route-jsonl", "a route, state or logit file, or a capture folder", "none")
    devices.parse(asked.device)
    if asked.launch == "graph" and asked.device == "cpu":
        raise InputError("--launch", "value", "calls, since a CPU captures no graphs", "graph")
    kernels = registry.registered(asked.load, kernels_of_file)
    check_stages(kernels.values())
    capture = open_capture(locate(asked.capture), _holding(asked))
    if asked.holding not in (None, capture.holds):
        raise InputError(asked.capture, OPTION[asked.holding], f"captured {asked.holding}", capture.holds)
    selected = _named_cases(asked, capture) if asked.case_ids else _selected_cases(asked, capture)
    stages = list(dict.fromkeys(c.problem.stage for c in selected))
    chosen, named = registry.select(kernels, asked.kernels or ("*",), stages)
    for stage in stages:
        if not any(k.stage == stage for k in chosen) and asked.kernels:
            selected = [c for c in selected if c.problem.stage != stage]
    stages = list(dict.fromkeys(c.problem.stage for c in selected))
    if asked.baseline is not None:
        chosen = _with_baseline(chosen, kernels, asked.baseline, stages)
    manifest = capture.manifest
    return Plan(
        capture=capture.name, capture_path=_whole(asked.capture), capture_sha256=capture.sha256,
        origin=manifest.origin if manifest else "recorded, no manifest", cases=tuple(selected), kernels=tuple(chosen),
        named=tuple(named), baseline=asked.baseline, device=asked.device, cache=asked.cache, launch=asked.launch,
        repeats=asked.repeats,
        blocks=asked.blocks, processes=asked.processes, margin=asked.margin,
        quick=is_quick(asked.processes, asked.blocks), seed=asked.seed, require=asked.require, timeout_s=asked.timeout,
        drawn=tuple(_drawn(asked, capture, selected)), selectors=_selectors(asked),
        hits=hits_of(capture, _filters(asked), selected),
    )  # fmt: skip


def _holding(asked: Asked) -> Holds | None:
    """What the stages asked for are driven by, where all are by the same."""
    stages = [*asked.stages, *(case.partition("@")[0] for case in asked.case_ids)]
    families = {stage.partition(".")[0] for stage in stages} & set(HELD)
    return asked.holding or (HELD[families.pop()] if len(families) == 1 else None)


def capture_of(plan: Plan) -> Capture:
    """The capture of a plan, opened again as what its cases hold; InputError as ``open_capture`` has it."""
    return open_capture(locate(plan.capture_path), HELD[plan.cases[0].problem.stage.partition(".")[0]])


def _drawn(asked: Asked, capture: Capture, selected: Sequence[Case]) -> Iterator[str]:
    """What no endpoint made."""
    if capture.holds == "logits":
        drawn = {"topk.greedy": "slots and a twin's edges", "topk.rows": "a twin's edges", "topk.router": "biases and padding"}
        stages = dict.fromkeys(c.problem.stage for c in selected)
        yield f"{', '.join(f'{drawn[s]} of {s}' for s in stages)} ({GENERATOR}, seed {asked.seed})"
        return
    if capture.holds == "states":
        yield f"slots, and the states of slots that are nobody's ({GENERATOR}, seed {asked.seed})"
        if any(dict(c.problem.modes).get("conv_bias", "off") != "off" for c in selected) and "conv_bias" not in capture.modes:
            yield "conv bias (the capture has none)"
        return
    yield f"hidden rows, weights and scales ({GENERATOR}, seed {asked.seed})"
    if capture.manifest and (other := selected[0].problem.geometry) != capture.manifest.geometry:
        yield f"sizes of {other} (the routes are of {capture.manifest.geometry})"
    if any(c.routes.topk_weights is None for c in selected):
        yield "router weights (the capture has none)"


def hits_of(capture: Capture, select: Select, cases: Sequence[Case]) -> dict[int, int]:
    """How often the capture has each shape; another reading of it, which a run of one shape is spared."""
    if len({case.problem.rows for case in cases}) < 2:
        return {}
    return dict(sorted(shape_hits(capture, select, cases[0].problem.geometry).items()))


def _filters(asked: Asked) -> Select:
    return Select(layer_regex=asked.route_layer_regex, stage_regex=asked.route_stage_regex,
                  min_num_tokens=asked.route_min_num_tokens, max_num_tokens=asked.route_max_num_tokens)  # fmt: skip


def _whole(capture: str) -> str:
    """A path that holds from any folder, or the name of a shipped capture as it is."""
    return str(Path(capture).resolve()) if Path(capture).exists() else capture


def check_stages(kernels: Iterable[Kernel]) -> None:
    """InputError for a kernel of a stage that there is none of."""
    for kernel in kernels:
        if kernel.stage not in STAGES:
            raise InputError(kernel.file or kernel.id, kernel.id, f"a stage: {', '.join(STAGES)}", repr(kernel.stage))


def geometry_of(asked: Asked, capture: Capture) -> Geometry:
    """The manifest's geometry; without a manifest the preset asked for. A contradiction is an error.

    Routes hold experts and nothing of a layer's widths: they may drive another model of as many experts and as large a k.
    """
    if capture.manifest is None:
        return _preset(asked, capture, asked.tp)
    known = capture.manifest.geometry
    if asked.model is not None and capture.holds == "routes":
        found = _preset(asked, capture, known.tp if asked.tp is None else asked.tp)
        if not _drives(known, found):
            expected = f"a model of {known.experts} experts, {known.top_k} a token, as the capture's router chose"
            raise InputError("--model", "value", expected, f"{found.experts}, {found.top_k}")
        return found
    for option, value, own in (("--model", asked.model, known.preset), ("--tp", asked.tp, known.tp)):
        if value is not None and value != own:
            raise InputError(option, "value", f"{own}, as the capture's manifest says", str(value))
    return known


def _preset(asked: Asked, capture: Capture, tp: int | None) -> Geometry:
    try:
        return default_geometry(capture.holds, asked.model, tp)
    except ValueError as error:
        field, _, rest = str(error).partition(": ")
        expected, _, got = rest.removeprefix("expected ").partition(", got ")
        raise InputError("--model, --tp", field, expected, got or field) from None


def _drives(routes: Geometry, other: Geometry) -> bool:
    return (routes.experts, routes.top_k) == (other.experts, other.top_k)


def _selected_cases(asked: Asked, capture: Capture) -> list[Case]:
    own = FAMILY[capture.holds]
    stages = matching(asked.stages or (f"{own}.*",))
    if strange := [s.name for s in stages if not s.name.startswith(own)]:
        raise InputError("--stage", "name", f"a stage of {own}.*, since {asked.capture} holds {capture.holds}", strange[0])
    check_modes(stages, asked.modes)
    check_modes([s for s in STAGES.values() if s.name.startswith(own)], capture.modes, asked.capture or "")
    select = Select(
        layer_regex=asked.route_layer_regex, stage_regex=asked.route_stage_regex,
        start_indices=asked.route_start_indices, windows=asked.route_windows, max_cases=asked.max_cases,
        min_num_tokens=asked.route_min_num_tokens, max_num_tokens=asked.route_max_num_tokens,
    )  # fmt: skip
    modes = {**capture.modes, **asked.modes}
    geometry = geometry_of(asked, capture)
    if capture.holds != "routes":
        _check_not_of_routes(asked, capture)
        rows_of(capture).check_capture(capture, geometry)

    def posed(stage: Stage, case: Case) -> Case:
        problem = problem_for(stage, geometry, case.problem.rows, modes)
        return msgspec.structs.replace(case, id=msgspec.structs.replace(case.id, problem=problem))

    # The file is read once, for the first stage; the other stages pose the same rows.
    read = cases if capture.holds == "routes" else rows_of(capture).cases
    first = list(read(capture, select, geometry, lambda g, rows: problem_for(stages[0], g, rows, modes), asked.seed))
    return [posed(stage, case) for stage in stages for case in first]


def rows_of(capture: Capture) -> Any:
    """The module that reads a capture of tensors: ``check_capture``, ``cases`` and ``find``."""
    return {"states": states, "logits": logits}[capture.holds]


def _check_not_of_routes(asked: Asked, capture: Capture) -> None:
    """InputError for an option that is about routes alone."""
    given = {
        f"--route-{n.replace('_', '-')}": getattr(asked, f"route_{n}")
        for n in ("stage_regex", "min_num_tokens", "max_num_tokens")
    }
    for option, value in given.items():
        if value is not None:
            expected = f"none, since {capture.holds} have no router stage and no number of tokens"
            raise InputError(option, "value", expected, str(value))
    if "batch" in asked.modes:
        raise InputError("--mode", "batch", "none: a capture's cases have one token a sequence", asked.modes["batch"])


def _named_cases(asked: Asked, capture: Capture) -> list[Case]:
    held = ("stages", "modes", "model", "tp", "route_start_indices", "max_cases")
    if given := [name for name in held if getattr(asked, name)] + (["route_window_size"] if asked.route_windows != (1,) else []):
        raise InputError("--case", "options", "none of those that the case id holds", ", ".join(given))
    found = []
    checked: set[Geometry] = set()
    for text in asked.case_ids:
        try:
            wanted = CaseId.parse(text)
        except ValueError as error:
            raise InputError("--case", "id", "STAGE@GEOMETRY/CAPTURE/LAYER/rSTART+ROWS;MODES#SEED", str(error)) from None
        of_routes = capture.manifest and capture.holds == "routes" and _drives(capture.manifest.geometry, wanted.problem.geometry)
        if capture.manifest and not of_routes and wanted.problem.geometry != capture.manifest.geometry:
            known = str(capture.manifest.geometry)
            raise InputError("--case", "geometry", f"{known}, as the capture's manifest says", str(wanted.problem.geometry))
        if wanted.problem.stage not in STAGES:
            raise InputError("--case", "stage", f"one of {', '.join(STAGES)}", wanted.problem.stage)
        stage = STAGES[wanted.problem.stage]
        check_modes([stage], dict(wanted.problem.modes))
        whole = problem_for(stage, wanted.problem.geometry, wanted.problem.rows, dict(wanted.problem.modes))
        wanted = msgspec.structs.replace(wanted, problem=whole)
        if capture.holds == "routes":
            found.append(find(capture, wanted, _filters(asked)))
            continue
        if wanted.problem.geometry not in checked:
            rows_of(capture).check_capture(capture, wanted.problem.geometry)
            checked.add(wanted.problem.geometry)
        found.append(rows_of(capture).find(capture, wanted))
    return found


def _with_baseline(chosen: list[Kernel], kernels: Mapping[str, Kernel], baseline: str, stages: list[str]) -> list[Kernel]:
    """The chosen kernels with the baseline first, brought in where it was not chosen."""
    if baseline not in kernels:
        raise InputError("--baseline", "id", "a registered kernel (see --list)", repr(baseline))
    if kernels[baseline].stage not in stages:
        raise InputError("--baseline", "stage", f"a kernel of {', '.join(stages)}", kernels[baseline].stage)
    return [kernels[baseline], *(k for k in chosen if k.id != baseline)]


def _selectors(asked: Asked) -> tuple[str, ...]:
    """The filters that a token row's index depends on: a reproduction needs them beside the case id."""
    given = [(option, getattr(asked, "route_" + field)) for option, field in _FILTERS.items()]
    return tuple(word for option, value in given if value is not None for word in (option, str(value)))


_FILTERS = {
    "--route-layer-regex": "layer_regex",
    "--route-stage-regex": "stage_regex",
    "--route-min-num-tokens": "min_num_tokens",
    "--route-max-num-tokens": "max_num_tokens",
}


def filters(plan: Plan) -> Select:
    """The filters of a plan, read back from the words that a reproduction shows."""
    given = {_FILTERS[option]: value for option, value in zip(plan.selectors[::2], plan.selectors[1::2], strict=True)}
    return Select(**{field: int(value) if field.endswith("tokens") else value for field, value in given.items()})  # type: ignore[arg-type]  # each field gets its own type
