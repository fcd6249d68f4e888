"""``b70-replay capture record``, ``close`` and ``agree``: from a running vLLM to a capture, and what it says of the oracle."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from replay.errors import InputError

if TYPE_CHECKING:
    from replay.captures.manifest import Manifest
    from replay.engine.config import Record

INVALID = 3


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="A new folder for the capture.")
@click.option("--prompts", type=click.Path(path_type=Path), help="A prompt a line. [serve until a limit or Ctrl-C]")
@click.option("--engine", type=click.Path(path_type=Path), help="Engine file whose [record] says what is recorded.")
@click.option("--what", help="routes,weights,hidden,gdn,states,states_after,outputs,logits. [routes,weights]")
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Tokens a prompt, where it names none.")
@click.option("--concurrency", type=click.IntRange(1), default=1, show_default=True, help="Prompts asked at a time.")
@click.option("--ready-timeout", type=click.IntRange(1), default=600, show_default=True, help="Seconds until it must serve.")
@click.argument("command_line", nargs=-1, required=True, metavar="-- vllm serve MODEL …")
def record(
    output: Path, prompts: Path | None, engine: Path | None, what: str | None, max_tokens: int, concurrency: int,
    ready_timeout: int, command_line: tuple[str, ...],
) -> int:  # fmt: skip
    """Serve with the recorder in the engine, ask prompts, end the server, close and check the capture.

    b70-replay must be installed in the server's environment. Exit codes: 0 a capture; 3 drops, or nothing recorded; 2 bad input;
    5 a server that does not come up.
    """
    from replay.cli.progress import line
    from replay.endpoint import recorder
    from replay.endpoint.server import ServerError

    asked = recorder.Asked(
        command=command_line, folder=output, record=_asked(engine, what, output),
        prompts=None if prompts is None else recorder.read_prompts(prompts), max_tokens=max_tokens, concurrency=concurrency,
        ready_s=ready_timeout, made_by=f"b70-replay capture record … -- {shlex.join(command_line[:2])} …",
    )  # fmt: skip
    with line() as say:
        done = recorder.record(asked, say)
    if done.manifest is not None:
        click.echo(f"{output}: {_told(done.manifest)}")
        c = done.counters
        layer, step = (c[ns] / 1000 / max(c[of], 1) for ns, of in (("hook_ns", "calls"), ("step_ns", "steps")))
        each = f"{layer:.1f} µs of the engine's thread each"
        click.echo(f"hooks: {c['calls']:,} recorded layer calls, {each}, {step:.1f} µs a step")
    for problem in done.problems:
        click.echo(f"{output}: {problem}", err=True)
    if done.manifest is None and done.counters["steps"] == 0 and not done.answers:
        return ServerError.exit_code
    return INVALID if done.problems else 0


def _asked(engine: Path | None, what: str | None, output: Path) -> "Record":
    import msgspec

    from replay.engine import config

    given = config.Record(folder=str(output))
    if engine is not None:
        found = config.read(engine).record
        if found is None:
            raise InputError(str(engine), "record", "a section [record]", "none")
        given = found
    changed = {"folder": str(output.resolve())} | ({"what": tuple(what.split(","))} if what is not None else {})
    try:
        given = msgspec.convert({**msgspec.to_builtins(given), **changed}, config.Record)
    except msgspec.ValidationError as error:
        raise InputError("--what", "value", "names that --help lists, with commas between", str(error)) from None
    config.check(given, str(engine or "--what"))
    return given


def _told(manifest: "Manifest") -> str:
    r = manifest.recorded
    assert r is not None  # a recording's manifest
    files = ", ".join(
        f"{sum(f.holds == h for f in manifest.files)} of {h}" for h in dict.fromkeys(f.holds for f in manifest.files)
    )
    ranks = f", the routes of {r.ranks} ranks the same" if r.ranks > 1 else ""
    lost = f", {r.lost} steps lost with the process" if r.lost else ""
    lost += "".join(f", BROKEN OFF ({fault})" for fault in r.faults)
    return f"{r.steps:,} steps, {r.rows:,} rows; files: {files}; {r.dropped} dropped{lost}{ranks}; ended: {r.ended}"


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--name", help="The capture's name. [the folder's]")
def close(folder: Path, name: str | None) -> int:
    """Make a capture of a recording that nobody writes any more, as far as it is whole."""
    from replay.captures.close import close as close_recording

    if not folder.is_dir():
        raise InputError(str(folder), "path", "a folder with a recording", "no such folder")
    manifest = close_recording(folder, name)
    click.echo(f"{folder}: {_told(manifest)}")
    return INVALID if manifest.recorded and (manifest.recorded.dropped or manifest.recorded.faults) else 0


@click.command()
@click.argument("path")
def agree(path: str) -> int:
    """How far the oracle is from what the engine itself wrote, where a recording kept it; exit 1 beyond the stated budget."""
    from tabulate import tabulate

    from replay.captures import kinds, locate, open_capture
    from replay.studies.agreement import HEADERS, agreements

    found = [a for holds in kinds(locate(path)) for a in agreements(open_capture(locate(path), holds))]
    if not found:
        expected = "outputs of the engine: [record] what with states_after, outputs or hidden"
        raise InputError(path, "capture", expected, "none")
    click.echo(tabulate([a.cells() for a in found], HEADERS, tablefmt="plain", disable_numparse=True))
    return 0 if all(a.agrees for a in found) else 1
