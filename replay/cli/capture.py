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
    if capture.holds != "routes":
        _validate_tensors(path, capture)
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


def _validate_tensors(path: str, capture: "Capture") -> None:
    from replay.captures import logits, states
    from replay.captures.manifest import default_geometry
    from replay.captures.tensors import FORMS

    # Without a manifest the sizes are those of the default geometry, as `run` takes them.
    geometry = capture.manifest.geometry if capture.manifest else default_geometry(capture.holds)
    if capture.holds == "logits":
        logits.check_capture(capture, geometry)
        rows = sum(len(file.tensor("step")) for file in map(logits.open_logits, capture.files))
        counted = f"{len(capture.files)} files, {rows:,} rows of {geometry.vocab:,} logits"
    else:
        states.check_capture(capture, geometry)
        files = [states.open_states(file) for file in capture.files]
        rows, held = sum(len(f.index["step"]) for f in files), sum(len(states.replayable(f)) for f in files)
        counted = f"{len(files)} layers, {rows:,} rows, {held:,} with states"
    click.echo(f"{path}: valid: {counted}, form {FORMS[capture.holds]}, {_described(capture)}")


@command.command()
@click.argument("path")
def inspect(path: str) -> None:
    """Popularity, skew, repeats and overlap of the routes; shapes and ranges of the states; ties of the logits."""
    from tabulate import tabulate

    from replay.captures import locate, open_capture
    from replay.captures.describe import HEADERS, LOGIT_HEADERS, STATE_HEADERS, summarise, summarise_logits, summarise_states

    capture = open_capture(locate(path))
    if capture.holds == "states":
        rows = [row for path in capture.files for row in summarise_states(path)]
        click.echo(tabulate(rows, STATE_HEADERS, tablefmt="plain", disable_numparse=True))
        return
    if capture.holds == "logits":
        rows = [summarise_logits(path) for path in capture.files]
        click.echo(tabulate(rows, LOGIT_HEADERS, tablefmt="plain", disable_numparse=True))
        return
    rows = [[*key, *layer.figures()] for key, layer in summarise(capture).items()]
    click.echo(tabulate(rows, HEADERS, tablefmt="plain", disable_numparse=True))
    if capture.manifest:
        m = capture.manifest
        click.echo(f"{m.name}: {m.origin}, geometry {m.geometry}, made by `{m.made_by}`")
