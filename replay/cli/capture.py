"""``b70-replay capture``: record, check, describe and hand on captures."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from replay.cli import recording
from replay.errors import EnvironmentRefused, InputError

if TYPE_CHECKING:
    from replay.captures import Capture


@click.group("capture")
def command() -> None:
    """Work with captures: route JSONL files, or folders with a manifest."""


command.add_command(recording.record)
command.add_command(recording.close)
command.add_command(recording.agree)


@command.command()
@click.argument("path")
def validate(path: str) -> None:
    """Check every record of a capture, and every file against its manifest; of a recording that was not closed, how far it is
    whole."""
    from replay.captures import kinds, locate, open_capture
    from replay.captures.recording import journals

    where = locate(path)
    if where.is_dir() and journals(where):
        _validate_recording(path, where)
        return
    for holds in kinds(where):
        capture = open_capture(where, holds)
        counted = _validate_routes(capture) if holds == "routes" else _validate_tensors(capture)
        click.echo(f"{path}: valid: {counted}, {_described(capture)}")


def _validate_recording(path: str, folder: Path) -> None:
    """Whole steps are counted and nothing is changed."""
    from replay.captures.close import survey

    seen = survey(folder)
    for rank, steps in seen.steps.items():
        torn = f", and {seen.torn[rank]:,} bytes of a step that was cut short" if seen.torn[rank] else ""
        click.echo(f"{path}: rank {rank}: valid up to step {steps:,}{torn}; {seen.ended[rank]}")
    if seen.dropped or seen.lost:
        click.echo(f"{path}: {seen.dropped} steps dropped, {seen.lost} lost with the process")
    click.echo(f"{path}: not closed: `b70-replay capture close {path}` makes a capture of it")


def _validate_routes(capture: "Capture") -> str:
    from replay.captures import read_batches
    from replay.cli.progress import line

    records = tokens = done = 0
    form = ""
    size = capture.routes.stat().st_size
    with line() as say:
        for batch in read_batches(capture.routes):
            if batch.block_first_line == batch.first_line:  # once a block of lines
                done += len(batch.block)
                say(f"{done / 1e6:,.0f} MB (the file: {size / 1e6:,.0f} MB), {records:,} records")
            records += len(batch.layers)
            tokens += len(batch.layers) * batch.num_tokens
            form = batch.form
    return f"{records:,} records, {tokens:,} token rows, form {form}"


def _described(capture: "Capture") -> str:
    said = f"manifest {capture.manifest.name} ({capture.manifest.origin})" if capture.manifest else "no manifest"
    dropped = capture.manifest.recorded.dropped if capture.manifest and capture.manifest.recorded else 0
    return f"{said}{f', {dropped} STEPS DROPPED' if dropped else ''}, sha256 {capture.sha256[:16]}"


def _validate_tensors(capture: "Capture") -> str:
    from replay.captures import gates, logits, states
    from replay.captures.manifest import default_geometry
    from replay.captures.tensors import FORMS

    # Without a manifest the sizes are those of the default geometry, as `run` takes them.
    geometry = capture.manifest.geometry if capture.manifest else default_geometry(capture.holds)
    many = f"{len(capture.files)} file{'s' if len(capture.files) > 1 else ''}"
    if capture.holds == "logits":
        logits.check_capture(capture, geometry)
        rows = sum(len(file.tensor("step")) for file in map(logits.open_logits, capture.files))
        counted = f"{many}, {rows:,} rows of {geometry.vocab:,} logits"
    elif capture.holds == "gates":
        gates.check_capture(capture, geometry)
        rows = sum(len(file.tensor("step")) for file in map(gates.open_gates, capture.files))
        counted = f"{len(capture.files)} layers, {rows:,} rows of a gate"
    else:
        states.check_capture(capture, geometry)
        files = [states.open_states(file) for file in capture.files]
        rows, held = sum(len(f.index["step"]) for f in files), sum(len(states.replayable(f)) for f in files)
        counted = f"{len(files)} layers, {rows:,} rows, {held:,} with states"
    return f"{counted}, form {FORMS[capture.holds]}"


@command.command()
@click.argument("path")
@click.option("--html", type=click.Path(path_type=Path), help="Write a page with pictures too.")
def inspect(path: str, html: Path | None) -> None:
    """Popularity, skew, distinct sets, repeats and tokens a call of the routes; shapes and ranges of states and gates; ties of
    the logits."""
    from tabulate import tabulate

    from replay.captures import kinds, locate, open_capture
    from replay.captures.describe import HEADERS, LOGIT_HEADERS, STATE_HEADERS, summarise, summarise_logits, summarise_tensors

    where = locate(path)
    tables: list[tuple[str, list[str], list[list[str]]]] = []
    layers = {}
    for holds in kinds(where):
        capture = open_capture(where, holds)
        if holds == "routes":
            layers = summarise(capture)
            tables.append((holds, HEADERS, [[*key, *layer.figures()] for key, layer in layers.items()]))
        elif holds == "logits":
            tables.append((holds, LOGIT_HEADERS, [summarise_logits(file) for file in capture.files]))
        else:
            tables.append((holds, STATE_HEADERS, [row for file in capture.files for row in summarise_tensors(file)]))
    for _, heads, rows in tables:
        click.echo(tabulate(rows, heads, tablefmt="plain", disable_numparse=True))
    if capture.manifest:
        m = capture.manifest
        click.echo(f"{m.name}: {m.origin}, geometry {m.geometry}, made by `{m.made_by}`")
    if html is not None:
        from replay.captures.hand_on import written
        from replay.results.capture_page import missing, page

        if lacking := missing():
            raise EnvironmentRefused(f"--html: expected {lacking}, got none")
        with written(html) as partial:
            partial.write_text(page(capture, tables, layers))
        click.echo(f"wrote {html}")


@command.command()
@click.argument("path")
def index(path: str) -> None:
    """Write a sidecar that lets a few cases of a large route file be read at once."""
    from replay.captures import locate, open_capture
    from replay.captures.index import build, sidecar
    from replay.cli.progress import line

    capture = open_capture(locate(path), "routes")
    with line() as say:
        made = build(capture, say)
    click.echo(f"{sidecar(capture.routes)}: {len(made.offset):,} records of {len(made.keys)} layers")


@command.command()
@click.argument("path")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="A new JSONL file.")
def export(path: str, output: Path) -> None:
    """Write the routes in the lab's form, for tools that read that."""
    from replay.captures import locate, open_capture
    from replay.captures.hand_on import export as export_routes

    count = export_routes(open_capture(locate(path), "routes"), output)
    click.echo(f"{output}: {count:,} records")


@command.command()
@click.argument("path")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="A new folder, or for a file a new file.")
def anonymise(path: str, output: Path) -> None:
    """Write a copy without request ids, times and processes."""
    from replay.captures import locate
    from replay.captures.hand_on import anonymise as anonymise_capture

    where = locate(path)
    if not where.exists():
        raise InputError(path, "path", "a capture", "no such file or folder")
    click.echo(f"{output}: {anonymise_capture(where, output)} requests renamed")
