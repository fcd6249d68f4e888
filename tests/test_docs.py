"""Documents: every `$` block runs, every `card$` block parses, and the outside kernel is really ten lines."""

import re
import shlex
from pathlib import Path

import pytest

from replay.cli import cli as commands
from tests.conftest import ROOT, Cli

DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    (doc.name, line.strip())
    for doc in DOCS
    for block in re.findall(r"```console\n(.*?)```", doc.read_text(), re.DOTALL)
    for line in block.splitlines()
    if re.match(r"(card)?\$ ", line.strip())
]


def outside_kernel() -> str:
    """The Python block of add-a-kernel.md."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "add-a-kernel.md").read_text(), re.DOTALL)[0]


def words(line: str) -> list[str]:
    """A documented command without its prompt, environment and comment."""
    parts = shlex.split(line.partition("$ ")[2], comments=True)
    parts = parts[: parts.index("--")] if "--" in parts else parts  # what follows is another program's
    while re.match(r"[A-Z_]+=", parts[0]):
        parts.pop(0)
    return parts


# A line that an acceptance script runs as it stands is run there; one that stands in two documents is run once.
SCRIPTS = "\n".join(script.read_text() for script in (ROOT / "tests" / "acceptance").glob("*.sh"))
RUNS = [
    (doc, line)
    for line, doc in {line: doc for doc, line in reversed(BLOCKS)}.items()
    if words(line)[0] == "b70-replay"
    and line.startswith("$ ")
    and "mine.py" not in line
    and not re.search(rf"^{re.escape(line.removeprefix('$ '))} >", SCRIPTS, re.MULTILINE)
]


@pytest.mark.parametrize(("doc", "line"), RUNS, ids=lambda v: str(v)[:60])
def test_documented_command_runs(cli: Cli, doc: str, line: str) -> None:
    """Exit 0."""
    done = cli(*words(line)[1:])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("doc", "line"), BLOCKS, ids=lambda v: str(v)[:60])
def test_documented_command_exists(doc: str, line: str) -> None:
    """Each command and each option is one that the tool, or the Makefile, has."""
    parts = words(line)
    if parts[0] == "make":
        assert re.search(rf"^{parts[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
        return
    assert parts[0] == "b70-replay", line
    found: object = commands
    rest = parts[1:]
    if rest and rest[0].startswith("-"):
        rest = ["run", *rest]
    while rest and not rest[0].startswith("-") and hasattr(found, "get_command"):
        found = found.get_command(None, rest.pop(0))
        assert found is not None, line
    options = {o for p in found.params for o in (*p.opts, *p.secondary_opts)} | {"--help", "--version"}  # type: ignore[attr-defined]  # a click command
    assert {w.partition("=")[0] for w in rest if re.match(r"--?[a-z]", w)} <= options, line


def test_the_outside_kernel_is_ten_lines() -> None:
    """As its page says, comments and blank lines not counted."""
    code = [t for t in outside_kernel().splitlines() if t.strip() and not t.startswith("#")]
    assert len(code) <= 10


def test_the_outside_kernel_is_caught(cli: Cli, tmp_path: Path) -> None:
    """By the line that its page shows, division is told as such; asked for, it is right."""
    (tmp_path / "mine.py").write_text(outside_kernel())
    (line,) = (line for _, line in BLOCKS if "mine.py" in line and line.startswith("$ "))
    base = words(line)[1:]
    wrong = cli(*base)
    assert wrong.returncode == 1
    assert re.search(r"mine:moe\.quantize:divide +FAIL.*\(token .* expert.*matches mode quant=div_half_even", wrong.stdout)
    few = ("--route-layer-regex", r"layers\.9\.", "--max-cases", 1, "--kernel", "mine:*", "--blocks", 5)
    right = cli(*base, *few, "--mode", "quant=div_half_even")
    assert right.returncode == 0, right.stdout


def test_no_document_names_a_machine() -> None:
    """No absolute path of a home or a work folder."""
    for doc in DOCS:
        assert not re.search(r"(^|\s)/(root|home|work)/", doc.read_text()), doc
