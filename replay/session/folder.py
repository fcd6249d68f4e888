"""A run's folder: made when a run begins, opened again when it goes on."""

import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from replay import identity
from replay.errors import EnvironmentRefused, InputError
from replay.session import journal as j


def begin(plan: j.Plan, output: Path | None, argv: Sequence[str], load: Sequence[str]) -> tuple[Path, list[j.Record], j.Journal]:
    """Make the folder and write the journal's first record. InputError for a folder that is in use."""
    found = identity.collect(argv=argv, load=load, seed=plan.seed, capture_sha256=plan.capture_sha256)
    folder = output or Path("runs") / f"{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(str(folder), "-o", "an empty or new folder", "one with files in it (--resume goes on with a run)")
    except OSError as error:
        raise InputError(str(folder), "-o", "a folder that can be written", error.strerror or str(error)) from None
    journal = j.Journal(folder / j.NAME)
    record = j.Begun(plan, found)
    journal.write(record)
    return folder, [record], journal


def go_on(folder: Path) -> tuple[list[j.Record], j.Journal]:
    """Open a run where it stopped. EnvironmentRefused when what it ran with is no longer what is here."""
    records, journal = j.resume(folder / j.NAME)
    first = records[0]
    assert isinstance(first, j.Begun)  # resume has checked it
    load = tuple(dict.fromkeys(k.file for k in first.plan.kernels if k.file))
    now = identity.collect(argv=(), load=load, seed=first.plan.seed, capture_sha256=_capture_now(first.plan))
    if found := identity.differences(first.identity, now):
        journal.stream.close()
        raise EnvironmentRefused(f"{folder}: --resume: the identity changed: {'; '.join(found)}")
    return records, journal


def _capture_now(plan: j.Plan) -> str:
    """The capture's sha256 now. The rows themselves are in the journal, so a capture that is gone is no hindrance."""
    from replay.captures import open_capture
    from replay.session.plan import shipped

    try:
        return open_capture(shipped(plan.capture_path)).sha256
    except InputError:
        return plan.capture_sha256
