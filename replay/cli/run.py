"""``b70-replay run``: replay a capture through kernels, print the table, keep the run folder."""

import contextlib
import re
import sys
from pathlib import Path
from typing import Any

import click

from replay.cli.options import chosen, parse_modes, parse_windows
from replay.errors import InputError
from replay.model import Exact, NotRun

PROCESSES = 8  # with 30 blocks: nine in ten true differences of 1 % are found (docs/timing.md)


@click.command("run")
@chosen
@click.option("--route-stage-regex", help="Keep records of the router stages that match.")
@click.option("--route-min-num-tokens", type=click.IntRange(1), help="Keep records of at least this many tokens.")
@click.option("--route-max-num-tokens", type=click.IntRange(1), help="Keep records of at most this many tokens.")
@click.option("--baseline", help="Kernel to compare with. [the stage's first]")
@click.option("--cache", type=click.Choice(["warm", "cold-weights", "cold-all"]), default="cold-weights", show_default=True)
@click.option(
    "--launch",
    type=click.Choice(["calls", "graph"]),
    default="calls",
    show_default=True,
    help="Timed as calls, or as a graph replayed.",
)
@click.option("--blocks", type=click.IntRange(5, 10_000), default=30, show_default=True, help="Timed blocks a case and process.")
@click.option(
    "--margin", type=click.FloatRange(0, 50), default=1.0, show_default=True, help="Percent within which times are the same."
)
@click.option("--repeats", type=click.IntRange(2, 1000), default=16, show_default=True, help="Calls judged a case.")
@click.option("--processes", type=click.IntRange(1, 100), help=f"Fresh processes to time in. [{PROCESSES}]")
@click.option("--quick", is_flag=True, help="One process: a look, which cannot promote.")
@click.option("--require", help="exact, faster, or floor:X; exit 3 or 4 where it is not met.")
@click.option("--resume", type=click.Path(path_type=Path), help="Go on with an interrupted run.")
@click.option("--list", "list_", is_flag=True, help="List stages, modes, presets and kernels, and stop.")
def command(list_: bool, resume: Path | None, **options: Any) -> int:
    """Judge and time kernels on the cases of a capture.

    Exit codes: 0 all well, 1 a kernel was wrong or crashed, 2 bad input, 3 or 4 `--require` not met, 5 a kernel named
    exactly is unavailable.
    """
    if list_:
        _list(options["load"])
        return 0
    from replay.session import workers

    workers.warm_start()
    if resume:
        context = click.get_current_context()
        given = [n for n in options if context.get_parameter_source(n) is click.core.ParameterSource.COMMANDLINE]
        if given:
            raise InputError("--resume", "options", "no other, since the run's journal holds them", ", ".join(given))
        return _go_on(resume)
    return _begin(options)


def _list(load: tuple[str, ...]) -> None:
    from replay.kernels.registry import registered
    from replay.model import PRESETS
    from replay.session.plan import check_stages
    from replay.session.workers import kernels_of_file
    from replay.stages import STAGES, shown

    kernels = registered(load, kernels_of_file).values()
    check_stages(kernels)
    click.echo(f"presets: {', '.join(PRESETS)}")
    for stage in STAGES.values():
        modes = "; ".join(f"{n}={'|'.join(map(shown, v))}" for n, v in stage.modes.items())
        click.echo(f"{stage.name}  {modes}".rstrip())
        for kernel in kernels:
            if kernel.stage == stage.name:
                click.echo(f"    {kernel.id:<32} {kernel.summary}")


def _begin(options: dict[str, Any]) -> int:
    from replay.session.folder import begin
    from replay.session.plan import Asked, make_plan

    if not options["margin"] >= 0:
        raise InputError("--margin", "value", "a percentage from 0 to 50", str(options["margin"]))
    if options["quick"] and options["processes"] not in (None, 1):
        raise InputError("--quick", "processes", "one", str(options["processes"]))
    asked = Asked(
        **{k: options[k] for k in ("capture", "holding", "route_layer_regex", "route_stage_regex", "route_start_indices")},
        **{k: options[k] for k in ("route_min_num_tokens", "route_max_num_tokens", "max_cases", "stages", "kernels")},
        **{k: options[k] for k in ("case_ids", "load", "baseline", "device", "model", "tp", "cache", "blocks", "repeats")},
        launch=options["launch"], timeout=options["timeout"],
        processes=options["processes"] or (1 if options["quick"] else PROCESSES),
        route_windows=parse_windows(options["route_window_size"]), modes=parse_modes(options["modes"]),
        margin=options["margin"] / 100, seed=options["seed"], require=_require(options["require"]),
    )  # fmt: skip
    plan = make_plan(asked)
    folder, records, journal = begin(plan, options["output"], sys.argv[1:])
    return _run(folder, records, journal)


def _go_on(folder: Path) -> int:
    from replay.session.folder import go_on

    records, journal = go_on(folder)
    return _run(folder, records, journal)


def _require(text: str | None) -> str | None:
    if text is not None and not re.fullmatch(r"exact|faster|floor:\d+(\.\d+)?", text):
        raise InputError("--require", "value", "exact, faster or floor:X", repr(text))
    return text


def _run(folder: Path, records: Any, journal: Any) -> int:
    from replay.cli.progress import bar
    from replay.results import table
    from replay.results.write import write
    from replay.session.run import Session

    plan = records[0].plan
    try:
        with journal, bar() as progress:
            Session(plan, journal, records, progress).run()
    except KeyboardInterrupt:
        click.echo(f"interrupted; `b70-replay run --resume {folder}` goes on", err=True)
        return 130
    result = write(folder, str(folder))
    with contextlib.suppress(BrokenPipeError):  # `| head` ends the reading, not the verdict
        click.echo(table.text(result, str(folder)))
    code = exit_code(plan, result)
    if plan.require and code in (3, 4):
        labels = (f"{g.kernel} {g.verdict.label if g.verdict else g.exact}" for g in result.groups if g.exact != "UNAVAILABLE")
        click.echo(f"--require {plan.require}: not met: {', '.join(labels)}", err=True)
    return code


def exit_code(plan: Any, result: Any) -> int:
    """The code of docs/statuses.md; when several hold, 5 before 1 before 3 before 4."""
    named = set(plan.named)
    if any(isinstance(r.outcome, NotRun) and r.outcome.status == "UNAVAILABLE" and r.kernel in named for r in result.rows):
        return 5
    red = [r for r in result.rows if not isinstance(r.outcome, Exact)]
    if any(not isinstance(r.outcome, NotRun) or r.outcome.status != "UNAVAILABLE" for r in red):
        return 1
    if plan.require == "exact" and any(isinstance(r.outcome, Exact) and r.outcome.grade == "WITHIN_ULP" for r in result.rows):
        return 3
    if plan.require in (None, "exact"):
        return 0 if result.rows and any(isinstance(r.outcome, Exact) for r in result.rows) else 3
    if plan.require == "faster":
        labels = [g.verdict.label for g in result.groups if g.verdict and g.verdict.label != "BASELINE"]
        if not labels or "INVALID" in labels or "INCONCLUSIVE" in labels:
            return 3
        return 0 if set(labels) == {"FASTER"} else 4
    timed = [g for g in result.groups if g.times_floor is not None]
    if not timed or any(g.verdict and g.verdict.label == "INVALID" for g in timed):
        return 3
    limit = float(plan.require.partition(":")[2])
    return 0 if all(g.times_floor <= limit for g in timed) else 4
