"""``b70-replay capture``: check a capture, and say what is in it."""

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from replay.captures import Capture


@click.group("capture")
def command() -> None:
    """Work with captures: route JSONL files, or folders with a manifest."""


@command.command()
@click.argument("path")
def validate(path: str) -> None:
    """Check every record of a capture, and every file against its manifest."""
    from replay.captures import locate, open_capture, read_batches

    capture = open_capture(locate(path))
    if capture.holds == "states":
        _validate_states(path, capture)
        return
    records = tokens = 0
    form = ""
    for batch in read_batches(capture.routes):
        records += len(batch.layers)
        tokens += len(batch.layers) * batch.num_tokens
        form = batch.form
    click.echo(f"{path}: valid: {records:,} records, {tokens:,} token rows, form {form}, {_described(capture)}")


def _described(capture: "Capture") -> str:
    said = f"manifest {capture.manifest.name} ({capture.manifest.origin})" if capture.manifest else "no manifest"
    return f"{said}, sha256 {capture.sha256[:16]}"


def _validate_states(path: str, capture: "Capture") -> None:
    from replay.captures import states
    from replay.model import preset

    rows = held = 0
    for file in map(states.open_states, capture.files):
        # Without a manifest the sizes are those of the default geometry, as `run` takes them.
        states.check_states(file, capture.manifest.geometry if capture.manifest else preset("qwen36", 4))
        rows += len(file.index["step"])
        held += len(states.replayable(file))
    counted = f"{len(capture.files)} layers, {rows:,} rows, {held:,} with states, form {states.FORM}"
    click.echo(f"{path}: valid: {counted}, {_described(capture)}")


@command.command()
@click.argument("path")
def inspect(path: str) -> None:
    """Popularity, skew, repeats and overlap of the routes, or shapes and ranges of the states, per layer."""
    from tabulate import tabulate

    from replay.captures import locate, open_capture
    from replay.captures.describe import HEADERS, STATE_HEADERS, summarise, summarise_states

    capture = open_capture(locate(path))
    if capture.holds == "states":
        rows = [row for path in capture.files for row in summarise_states(path)]
        click.echo(tabulate(rows, STATE_HEADERS, tablefmt="plain", disable_numparse=True))
        return
    rows = [[*key, *layer.figures()] for key, layer in summarise(capture).items()]
    click.echo(tabulate(rows, HEADERS, tablefmt="plain", disable_numparse=True))
    if capture.manifest:
        m = capture.manifest
        click.echo(f"{m.name}: {m.origin}, geometry {m.geometry}, made by `{m.made_by}`")
