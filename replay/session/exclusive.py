"""One run or calibration at a time is timed on a device."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from replay import cache

WAITING = "waiting"


@contextlib.contextmanager
def timing_on(device: str, waits: Callable[[str], None]) -> Iterator[None]:
    """Hold a device for timing; ``waits`` is told whom for, where somebody else has it. ``cuda`` is ``cuda:0``."""
    kind, _, index = device.partition(":")
    path = cache.folder() / f"timing-{kind}-{int(index or 0)}.lock"
    lock, holder = FileLock(path), path.with_suffix(".holder")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        who = holder.read_text() if holder.exists() else "another run"
        waits(f"{WAITING}: {who} is timing on this device")
        lock.acquire()
    try:
        holder.write_text(f"process {os.getpid()} (in {Path.cwd()})")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()
