"""One run or calibration at a time is timed on a device."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from replay import cache

WAITING = "waiting"


def _who(holder: Path) -> str:
    try:
        return holder.read_text() or "another run"
    except OSError:  # gone since, or not yet there
        return "another run"


@contextlib.contextmanager
def timing_on(device: str, waits: Callable[[str], None]) -> Iterator[None]:
    """Hold a device for timing; ``waits`` is told whom for, where somebody else has it. ``cuda`` is ``cuda:0``."""
    kind, _, index = device.partition(":")
    path = cache.folder() / f"timing-{kind}-{int(index or 0)}.lock"
    lock, holder = FileLock(path), path.with_suffix(".holder")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        waits(f"{WAITING}: {_who(holder)} is timing on this device")
        lock.acquire()
    try:
        holder.write_text(f"process {os.getpid()} (in {Path.cwd()})")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()
