"""Write a run folder's documents from its journal."""

from pathlib import Path

import msgspec

from replay.results import table
from replay.results.build import Result, build
from replay.session import journal


def write(folder: Path, shown_as: str) -> Result:
    """Build result.json and result.md from run.jsonl; ``shown_as`` is the folder as the user would type it."""
    path = folder / journal.NAME
    result = build(journal.read(path), journal.sha256(path))
    encoded = msgspec.json.format(msgspec.json.encode(result), indent=1)
    (folder / "result.json").write_bytes(encoded + b"\n")
    (folder / "result.md").write_text(table.text(result, shown_as, markdown=True) + "\n")
    return result
