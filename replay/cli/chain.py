"""``b70-replay chain``: feed a state back for K steps, and see by how far kernels drift."""

import contextlib
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from replay.cli.options import chosen, parse_modes, parse_windows
from replay.errors import InputError

if TYPE_CHECKING:
    from replay.studies.curves import Chain


@click.command("chain")
@chosen
@click.option("--steps", type=click.IntRange(1, 1_000_000), default=1000, show_default=True, help="Steps to take.")
@click.option(
    "--reset", type=click.Choice(["chain", "fresh", "poison"]), default="chain", show_default=True,
    help="A step finds the state of the one before; the first one's, every time; or as chain, and NaN wherever it must not read.",
)  # fmt: skip
@click.option(
    "--max-scaled-ulp",
    type=click.FloatRange(0),
    default=5.0,
    show_default=True,
    help="How much farther from f64 than the contract may be.",
)
def command(steps: int, reset: str, max_scaled_ulp: float, output: Path | None, **options: Any) -> int:
    """Take K decode steps from captured states, each from the state that the one before left, and hold every step against the
    contract's bits and against f64. One case a layer unless `--max-cases` says more.

    Exit codes: 0 all bounded, 1 a kernel drifted, overflowed, lost the contract's bits or died, 2 bad input, 3 no kernel could
    run, 5 a kernel named exactly is unavailable.
    """
    from replay.session import workers

    if not 0 <= max_scaled_ulp < math.inf:
        raise InputError("--max-scaled-ulp", "value", "a number of 0 or more", str(max_scaled_ulp))
    if options["capture"] is None:
        raise InputError("chain", "--state", "a state file or a capture folder", "none")
    workers.warm_start()
    from replay.cli.progress import bar
    from replay.results import chain as shown
    from replay.session.folder import identity_now, made
    from replay.session.plan import Asked, make_plan
    from replay.stages import gdn_chain
    from replay.studies.chain import Limits, study
    from replay.studies.curves import encode

    asked = Asked(
        **{k: options[k] for k in ("capture", "route_layer_regex", "route_start_indices", "kernels", "load", "device", "model")},
        **{k: options[k] for k in ("tp", "timeout", "seed", "case_ids")},
        stages=options["stages"] or (() if options["case_ids"] else gdn_chain.FED_BACK),
        max_cases=options["max_cases"] or (None if options["case_ids"] else 1),
        route_windows=parse_windows(options["route_window_size"]), modes=parse_modes(options["modes"]), processes=1,
        holding="states",
    )  # fmt: skip
    plan = make_plan(asked)
    for case in plan.cases:
        gdn_chain.check(case)
    identity = identity_now(plan, plan.capture_sha256, sys.argv[1:])
    folder = made(output, goes_on=False)
    with bar() as progress:
        found = study(plan, Limits(steps, reset, max_scaled_ulp), identity, progress)
    (folder / "chain.json").write_bytes(encode(found))
    (folder / "chain.md").write_text(shown.text(found, markdown=True) + "\n")
    with contextlib.suppress(BrokenPipeError):  # `| head` ends the reading, not the verdict
        click.echo(shown.text(found))
        click.echo(f"wrote {folder}/chain.json; `b70-replay report {folder}` draws the curves")
    return exit_code(found, plan.named)


def exit_code(found: "Chain", named: tuple[str, ...]) -> int:
    """The code of docs/statuses.md."""
    from replay.studies.curves import CONTRACT

    statuses = {curve.status for curve in found.curves}
    if found.interrupted:
        return 130
    if any(c.status == "UNAVAILABLE" and c.kernel in named for c in found.curves):
        return 5
    if statuses - {"BOUNDED", "UNAVAILABLE"}:
        return 1
    return 0 if any(c.status == "BOUNDED" and c.kernel != CONTRACT for c in found.curves) else 3
