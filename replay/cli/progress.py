"""A bar for long work, on a terminal; nothing elsewhere but that it waits for another run."""

import contextlib
from collections.abc import Callable, Iterator

import click


@contextlib.contextmanager
def bar() -> Iterator[Callable[[str, int, int], None]]:
    """What shows progress: called with (what, done, of how many). It is gone when the work ends."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from replay.session.exclusive import WAITING

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task("begin", total=None)

        def progress(what: str, done: int, total: int) -> None:
            if what.startswith(WAITING) and not console.is_terminal:
                click.echo(what, err=True)
            shown.update(task, description=what, completed=done, total=total)

        yield progress


@contextlib.contextmanager
def line() -> Iterator[Callable[[str], None]]:
    """One changing line of text, on a terminal; nothing elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("begin") as status:

        def say(text: str) -> None:
            status.update(text)

        yield say if console.is_terminal else lambda text: None
