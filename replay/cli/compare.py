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
    from replay.errors import EnvironmentRefused, InputError
    from replay.identity import BINDING, differences
    from replay.results import compare
    from replay.results.build import build
    from replay.session import journal as j

    results = [build(j.read(folder / j.NAME), "") for folder in (first, second)]
    differing = differences(results[0].identity, results[1].identity)
    for field in fields:
        if field.partition(".")[0] not in BINDING:
            raise InputError("--across", "field", f"one of {', '.join(BINDING)}, or a part of it behind a dot", repr(field))
    unnamed = [d for d in differing if not any(d.startswith((f"{field}:", f"{field}.")) for field in fields)]
    if unnamed:
        raise EnvironmentRefused(
            f"{second}: compare: expected the identity of {first}, or `--across FIELD` for what differs, got {'; '.join(unnamed)}"
        )
    click.echo(compare.text(compare.lines(*results), [*differing, *compare.settings(*results)]))
    for folder, result in zip((first, second), results, strict=True):
        if result.quick:
            click.echo(f"{folder} is QUICK: a look.")
        if told := compare.doubts(result):
            click.echo(f"{folder}: {told}.")
        if not result.finished:
            click.echo(f"{folder} is unfinished.")
    return 0
