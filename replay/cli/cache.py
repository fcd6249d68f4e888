"""``b70-replay cache``: what is cached, and clearing it."""

import click


@click.command("cache")
@click.option("--clear", is_flag=True, help="Remove everything; it is made again when needed.")
def command(clear: bool) -> None:
    """Show or clear the folder of compiled shims and kernels ($B70_CACHE, or $XDG_CACHE_HOME/b70-replay)."""
    from replay import cache

    if clear:
        click.echo(f"freed {cache.clear():,} bytes")
        return
    entries = cache.entries()
    for path, size in entries:
        click.echo(f"{size:>12,}  {path.name}")
    click.echo(f"{sum(size for _, size in entries):>12,}  {cache.folder()}")
