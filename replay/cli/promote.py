"""``b70-replay promote``: from a run to a launcher, or every reason why not."""

from pathlib import Path
from typing import Any

import click

from replay.errors import InputError


@click.command("promote")
@click.argument("run", required=False, type=click.Path(path_type=Path), metavar="[RUN]")
@click.option("--kernel", required=True, help="The candidate, by its exact id.")
@click.option("--endpoint", required=True, metavar="FILE.toml", help="The endpoint, or the name of a shipped one.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder for the launcher.")
@click.option("--claim", type=click.Choice(["faster", "parity"]), default="faster", show_default=True)
@click.option("--dry-run", is_flag=True, help="Print the files instead of writing them.")
def command(run: Path | None, kernel: str, endpoint: str, output: Path | None, claim: Any, dry_run: bool) -> int:
    """Promote a kernel of a run (the newest under runs/, where none is named) to an endpoint.

    Everything is derived again from the run's journal and its capture. Exit codes: 0 promoted; 1 a red case; 2 bad input;
    5 identity, hash or edited evidence; 3 any other reason.
    """
    from replay.endpoint import launcher, promote, spec
    from replay.endpoint.reasons import exit_code, lines

    if (output is None) != dry_run:
        raise InputError("promote", "-o", "a folder, or --dry-run", "both" if output else "neither")
    found, toml = spec.read(promote.locate_endpoint(endpoint))
    folder = run or promote.newest_run(Path("runs"))
    decision = promote.decide(folder, kernel, found, toml, claim)
    if decision.promotion is None:
        click.echo(f"refused: {kernel} of {folder}, claimed {claim}, for {found.name!r}")
        for line in lines(decision.refusals):
            click.echo(f"  {line}")
        for text in decision.commands:
            click.echo(f"    reproduce: {text}")
        return exit_code(decision.refusals)
    files = launcher.render(decision.promotion, launcher.encoded(decision.promotion), found, toml)
    if output is None:
        for name, data in files.items():
            click.echo(f"==== {name}")
            click.echo(data.decode(), nl=False)
        return 0
    launcher.write(output, files, decision.promotion.binaries)
    click.echo(f"promoted: {kernel} as {claim} for {found.name!r}")
    if prediction := decision.promotion.prediction:
        ms = prediction.ms_per_token
        click.echo(f"predicted: {ms.mid:.3f} [{ms.lo:.3f}, {ms.hi:.3f}] ms less per output token than {prediction.baseline}")
    for text in decision.promotion.cautions:
        click.echo(f"caution: {text}")
    click.echo(f"unknown: {', '.join(decision.promotion.unknown) or 'nothing'}")
    click.echo(f"wrote {output}/launch.sh")
    return 0
