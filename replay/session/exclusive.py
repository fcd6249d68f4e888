"""One run or calibration at a time is timed on a device."""

import contextlib
from collections.abc import Callable, Iterator

from filelock import FileLock, Timeout

from replay import cache

WAITING = "waiting: another run is timing on this device"


@contextlib.contextmanager
def timing_on(device: str, waits: Callable[[], None]) -> Iterator[None]:
    """Hold a device for timing; ``waits`` is called where somebody else has it. ``cuda`` is ``cuda:0``."""
    kind, _, index = device.partition(":")
    lock = FileLock(cache.folder() / f"timing-{kind}-{int(index or 0)}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        waits()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
