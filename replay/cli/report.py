"""``b70-replay report [RUN]``: a run as one page."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from replay.endpoint.predict import Prediction
    from replay.results.seen import Seen


@click.command("report")
@click.argument("run", required=False, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The page. [RUN/report.html]")
@click.option(
    "--calls-per-token", type=click.FloatRange(0, 1e6, min_open=True), default=1.0, show_default=True,
    help="Calls of the stage in a layer for one output token.",
)  # fmt: skip
def command(run: Path | None, output: Path | None, calls_per_token: float) -> int:
    """Write RUN (a run's folder, by default the newest of runs/; or a chain's) as a self-contained page; `result.md` beside it
    is the table for a pull request."""
    from replay.endpoint.promote import newest_run
    from replay.errors import EnvironmentRefused, InputError
    from replay.kernels.registry import lacking
    from replay.results import chain, report
    from replay.results.build import build
    from replay.results.seen import Seen
    from replay.session import journal as j
    from replay.studies.curves import decode

    if not calls_per_token > 0:
        raise InputError("--calls-per-token", "value", "a number above 0", str(calls_per_token))
    if why := next(lacking(("python:matplotlib",)), None):
        raise EnvironmentRefused(f"report: expected the extra `report` (pip install 'b70-replay[report]'), got {why}")
    folder = run or newest_run(Path("runs"))
    if (kept := folder / "chain.json").exists():
        page = chain.page(decode(kept), str(folder))
    else:
        records = j.read(folder / j.NAME)
        seen = Seen(records)
        page = report.page(build(records, j.sha256(folder / j.NAME)), seen, str(folder), _bridge(seen, calls_per_token))
    path = output or folder / "report.html"
    try:
        path.write_text(page)
    except OSError as error:
        raise InputError(str(path), "--output", "a file that can be written", (error.strerror or str(error)).lower()) from None
    click.echo(f"wrote {path}")
    return 0


def _bridge(seen: "Seen", calls_per_token: float) -> "list[tuple[str, Prediction]]":
    """What each kernel would bring per token, where the capture is at hand and two processes hold it."""
    from replay.captures.cases import shape_hits
    from replay.endpoint.predict import predict
    from replay.errors import ReplayError
    from replay.session.plan import capture_of, filters

    try:
        capture = capture_of(seen.plan)
    except ReplayError:
        return []
    found = []
    for kernel in seen.plan.kernels:
        cases = [c for c in seen.plan.cases if c.problem.stage == kernel.stage]
        if not cases or kernel.id == seen.plan.baseline_of(kernel.stage):
            continue
        hits = shape_hits(capture, filters(seen.plan), cases[0].problem.geometry)
        if prediction := predict(seen, cases, kernel.id, hits, calls_per_token):
            found.append((kernel.id, prediction))
    return found
