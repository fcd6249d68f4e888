"""The one cache folder: compiled shims and SYCLBINs. Everything in it can be made again."""

import os
import shutil
from pathlib import Path


def folder() -> Path:
    """``$B70_CACHE``, else ``$XDG_CACHE_HOME/b70-replay``, else ``~/.cache/b70-replay``; made when it is not there."""
    if own := os.environ.get("B70_CACHE"):
        path = Path(own)
    else:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "b70-replay"
    path.mkdir(parents=True, exist_ok=True)
    return path


def entries() -> list[tuple[Path, int]]:
    """(file, bytes) of all that is cached, oldest first."""
    files = [p for p in folder().rglob("*") if p.is_file()]
    return [(p, p.stat().st_size) for p in sorted(files, key=lambda p: p.stat().st_mtime)]


def clear() -> int:
    """Remove all of it; the number of bytes freed."""
    freed = sum(size for _, size in entries())
    shutil.rmtree(folder())
    return freed


def write(path: Path, data: bytes) -> None:
    """Write a cache file so that a reader sees all of it or none, whoever else writes it at the same time."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)
