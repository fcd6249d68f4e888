"""The command line: one file a command, each of which parses, calls and prints.

``main`` is the one place where an error becomes a line and an exit code.
"""

from typing import Any

import click

from replay import __version__
from replay.errors import ReplayError

COMMANDS = ("run", "chain", "compare", "report", "calibrate", "promote", "capture", "doctor", "cache")


class _Commands(click.Group):
    """``b70-replay --route-jsonl …`` is ``b70-replay run --route-jsonl …``; commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        import importlib

        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"replay.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ("--help", "-h", "--version"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="b70-replay")
def cli() -> None:
    """Replay what a vLLM endpoint did through candidate kernels: exact to the bit? faster? how far from the floor?

    Without a command, options are those of `run`.
    """


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the exit code follows docs/statuses.md."""
    try:
        code: Any = cli.main(argv, prog_name="b70-replay", standalone_mode=False)
    except ReplayError as error:
        click.echo(str(error), err=True)
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "", err=True)
        return 2
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context else "b70-replay"
        click.echo(f"{where}: {error.format_message()}", err=True)
        return 2
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    return code if isinstance(code, int) else 0
