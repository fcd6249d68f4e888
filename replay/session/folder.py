"""A run's folder: made when a run begins, opened again when it goes on."""

import hashlib
import secrets
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from replay import identity
from replay.errors import EnvironmentRefused, InputError
from replay.kernels.registry import registered
from replay.model import Kernel
from replay.session import journal as j
from replay.session.workers import kernels_of_file, probe


def identity_now(plan: j.Plan, capture_sha256: str, argv: Sequence[str] = ()) -> identity.Identity:
    """The identity that a run of this plan would have now, on its device."""
    facts = probe(plan.device)
    sources = identity.outside(plan.kernels)
    return identity.collect(argv=argv, sources=sources, seed=plan.seed, capture_sha256=capture_sha256, device=facts)


def kernels_now(plan: j.Plan) -> dict[str, Kernel]:
    """The kernels of a plan as they would be registered today, its user's files included; those that are gone left out."""
    try:
        found = registered(plan.load(), kernels_of_file)
    except InputError:  # a file that is gone or no longer imports: its kernels are not there
        found = registered()
    return {k.id: found[k.id] for k in plan.kernels if k.id in found}


def made(output: Path | None, *, goes_on: bool = True) -> Path:
    """The folder that was asked for, or one of its own under runs/. InputError where it holds files or cannot be written;
    ``goes_on``: whether what makes it can go on with one."""
    folder = output or Path("runs") / f"{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            hint = " (--resume goes on with a run)" if goes_on else ""
            raise InputError(str(folder), "-o", "an empty or new folder", f"one with files in it{hint}")
    except OSError as error:
        raise InputError(str(folder), "-o", "a folder that can be written", error.strerror or str(error)) from None
    return folder


def begin(plan: j.Plan, output: Path | None, argv: Sequence[str]) -> tuple[Path, list[j.Record], j.Journal]:
    """Make the folder and write the journal's first record. InputError for a folder that is in use."""
    found = identity_now(plan, plan.capture_sha256, argv)
    folder = made(output)
    _own(folder)
    journal = j.Journal(folder / j.NAME)
    record = j.Begun(plan, found)
    journal.write(record)
    return folder, [record], journal


def go_on(folder: Path) -> tuple[list[j.Record], j.Journal]:
    """Open a run where it stopped. EnvironmentRefused when what it ran with is no longer what is here."""
    if folder.is_dir():
        _own(folder)
    records, journal = j.resume(folder / j.NAME)
    first = records[0]
    assert isinstance(first, j.Begun)  # resume has checked it
    if found := identity.differences(first.identity, identity_now(first.plan, capture_now(first.plan))):
        journal.stream.close()
        raise EnvironmentRefused(f"{folder}: --resume: the identity changed: {'; '.join(found)}")
    return records, journal


_locks: list[FileLock] = []  # held until the process ends


def _own(folder: Path) -> None:
    """One process writes a run's journal."""
    lock = FileLock(
        Path(tempfile.gettempdir()) / f"b70-run-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]}.lock"
    )
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise EnvironmentRefused(f"{folder}: run: expected no other process at work on it, got one") from None
    _locks.append(lock)


def capture_now(plan: j.Plan) -> str:
    """The capture's sha256 now. The rows themselves are in the journal, so a capture that is gone is no hindrance."""
    from replay.captures import locate
    from replay.session.plan import capture_of

    return capture_of(plan).sha256 if locate(plan.capture_path).exists() else plan.capture_sha256
