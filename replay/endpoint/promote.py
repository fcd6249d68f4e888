"""Decide on a promotion: examine the run, hold it against the endpoint, and make what the launcher needs."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from replay import cache
from replay.captures.cases import shape_hits
from replay.data import path as data_path
from replay.endpoint import evidence, launcher
from replay.endpoint.predict import Prediction, predict
from replay.endpoint.reasons import Refusal
from replay.endpoint.spec import Endpoint
from replay.errors import InputError
from replay.identity import source_of, unknown
from replay.model import Case, Exact, Kernel
from replay.results.build import Group, reproduction
from replay.results.seen import Seen
from replay.session import journal as j
from replay.session.plan import filters

LARGE_EFFECT = 0.1  # a share
Claim = Literal["faster", "parity"]


@dataclass(frozen=True)
class Decision:
    """Every reason against, with the commands that show red cases again; or the promotion."""

    refusals: list[Refusal]
    commands: list[str]
    promotion: launcher.Promotion | None


def newest_run(root: Path) -> Path:
    """The folder of the newest run under ``root``; InputError where there is none."""
    journals = sorted(root.glob(f"*/{j.NAME}"), key=lambda p: p.stat().st_mtime)
    if not journals:
        raise InputError(str(root), "RUN", "a folder with runs in it, or a run's folder named", "none")
    return journals[-1].parent


def locate_endpoint(name: str) -> Path:
    """A path, or the name of an endpoint file that travels with the package."""
    path, own = Path(name), data_path("bench", "endpoints", f"{name.removesuffix('.toml')}.toml")
    return own if not path.exists() and "/" not in name and own.is_file() else path


def decide(run: Path, kernel: str, endpoint: Endpoint, endpoint_toml: bytes, claim: Claim) -> Decision:
    """Examine a run's claims for a kernel, all of them, and promote it where nothing speaks against it."""
    found = evidence.examine(run / j.NAME, kernel, claim)
    if found.seen is None:
        return Decision(found.refusals, [], None)
    refusals = [*found.refusals, *_misfits(found.seen, endpoint)]
    if refusals:
        red = dict.fromkeys(r.case for r in refusals if r.code == "red_case")
        return Decision(refusals, [reproduction(found.seen.plan, case, kernel) for case in red], None)
    return Decision([], [], _promotion(found, kernel, endpoint, endpoint_toml, claim))


def _misfits(seen: Seen, endpoint: Endpoint) -> list[Refusal]:
    """Where the measurement does not speak for this endpoint."""
    found = []
    if (kind := seen.plan.device.partition(":")[0]) != endpoint.device:
        found.append(Refusal("device_differs", f"measured on {kind}, {endpoint.name} runs on {endpoint.device}"))
    measured = {str(c.problem.geometry) for c in seen.plan.cases}
    if endpoint.geometry and measured != {endpoint.geometry}:
        found.append(
            Refusal("geometry_differs", f"measured {', '.join(sorted(measured))}, {endpoint.name} is {endpoint.geometry}")
        )
    return found


def _cautions(
    seen: Seen, cases: list[Case], chosen: Kernel, claims: list[Group], prediction: Prediction | None, endpoint: Endpoint
) -> Iterator[str]:
    """What does not forbid a promotion and should be known to whoever relies on it."""
    if not endpoint.geometry:
        yield f"the endpoint file names no geometry, the kernel was measured on {cases[0].problem.geometry}"
    if prediction and prediction.ms_per_token.lo < 0 < prediction.ms_per_token.hi:
        yield "the predicted gain may be a loss: its interval holds zero, the machine was restless"
    if (largest := max((g.comparison.effect.mde for g in claims if g.comparison), default=0.0)) > LARGE_EFFECT:
        yield f"the minimum detectable effect was {largest:.0%}: smaller differences could not be seen"
    if "strided" not in chosen.layouts:
        yield f"{chosen.id} takes contiguous inputs only, and was judged on no others"
    baseline = seen.plan.baseline_of(chosen.stage)
    outcomes = (seen.outcome(str(c.id), baseline) for c in cases)
    if any(isinstance(o, Exact) and o.grade == "WITHIN_ULP" for o in outcomes):
        yield f"{baseline} is only within its budget: what it wrote was not computed again"
    if repeated := seen.repeated():
        yield f"timings made again because the memory ceilings had moved beside them: {repeated}"


def _promotion(
    found: evidence.Examined, kernel: str, endpoint: Endpoint, endpoint_toml: bytes, claim: Claim
) -> launcher.Promotion:
    seen, now, claims = found.seen, found.now, found.claims
    assert seen is not None and now is not None and not isinstance(now.capture, str)  # noqa: PT018  # else it was refused
    plan = seen.plan
    cases = [c for c in plan.cases if c.problem.stage == kernel.split(":")[1]]
    chosen = next(k for k in plan.kernels if k.id == kernel)
    loaded = {path: sha256 for record in seen.loaded for path, sha256 in record.files.items()}
    hits = shape_hits(now.capture, filters(plan), cases[0].problem.geometry)
    prediction = predict(seen, cases, kernel, hits, endpoint.calls_per_token)
    environment, overridden = launcher.environment(seen.identity, endpoint)
    return launcher.Promotion(
        form="b70-promotion/1", stage=cases[0].problem.stage, kernel=kernel,
        load=chosen.file or "", source=source_of(chosen), claim=claim, device=plan.device, margin=plan.margin,
        cache=plan.cache, binaries=tuple(p for p in loaded if Path(p).is_relative_to(cache.folder())),
        processes=len(seen.samples([str(cases[0].id)])), claims=tuple(claims),
        prediction=prediction,
        cautions=tuple(_cautions(seen, cases, chosen, claims, prediction, endpoint)), journal_sha256=found.journal_sha256,
        endpoint=endpoint.name, endpoint_sha256=hashlib.sha256(endpoint_toml).hexdigest(),
        devices=endpoint.devices, port=endpoint.port, min_free_gib=endpoint.min_free_gib,
        packages=endpoint.packages, environment=environment, overridden=overridden, unknown=tuple(unknown(seen.identity)),
        files=loaded, identity=seen.identity,
    )  # fmt: skip
