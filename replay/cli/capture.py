"""``b70-replay capture``: check a capture, and say what is in it."""

import click


@click.group("capture")
def command() -> None:
    """Work with captures: route JSONL files, or folders with a manifest."""


@command.command()
@click.argument("path")
def validate(path: str) -> None:
    """Check every record of a capture, and every file against its manifest."""
    from replay.captures import locate, open_capture, read_batches

    capture = open_capture(locate(path))
    records = tokens = 0
    form = ""
    for batch in read_batches(capture.routes):
        records += len(batch.layers)
        tokens += len(batch.layers) * batch.num_tokens
        form = batch.form
    said = f"manifest {capture.manifest.name} ({capture.manifest.origin})" if capture.manifest else "no manifest"
    click.echo(f"{path}: valid: {records:,} records, {tokens:,} token rows, form {form}, {said}, sha256 {capture.sha256[:16]}")


@command.command()
@click.argument("path")
def inspect(path: str) -> None:
    """Popularity, skew, repeats and overlap of the routes, per layer."""
    from tabulate import tabulate

    from replay.captures import locate, open_capture
    from replay.captures.describe import HEADERS, summarise

    capture = open_capture(locate(path))
    rows = [[*key, *layer.figures()] for key, layer in summarise(capture).items()]
    click.echo(tabulate(rows, HEADERS, tablefmt="plain", disable_numparse=True))
    if capture.manifest:
        m = capture.manifest
        click.echo(f"{m.name}: {m.origin}, geometry {m.geometry}, made by `{m.made_by}`")
