"""``b70-replay compare A B``: what two runs say of the same kernels and shapes."""

from pathlib import Path

import click


@click.command("compare")
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@click.option("--across", "fields", multiple=True, metavar="FIELD", help="An identity field in which the runs may differ.")
def command(first: Path, second: Path, fields: tuple[str, ...]) -> int:
    """Times of two runs beside one another, kernel by kernel and shape by shape.

    Runs of different identities (machine, versions, sources, libraries, capture) are refused with exit code 5 unless each
    field that differs is named.
    """
    from replay.errors import EnvironmentRefused
    from replay.identity import differences
    from replay.results import compare
    from replay.results.build import build
    from replay.session import journal as j

    results = [build(j.read(folder / j.NAME), "") for folder in (first, second)]
    differing = differences(results[0].identity, results[1].identity)
    unnamed = [d for d in differing if not any(d.startswith((f"{field}:", f"{field}.")) for field in fields)]
    if unnamed:
        more = f" (and {len(unnamed) - 1} more)" if len(unnamed) > 1 else ""
        raise EnvironmentRefused(
            f"{second}: compare: expected the identity of {first}, or `--across FIELD` for what differs, got {unnamed[0]}{more}"
        )
    click.echo(compare.text(compare.lines(*results), differing))
    return 0
