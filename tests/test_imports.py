"""The arrows: which room may import which, and what stays unimported until it is used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "replay"

# room → the rooms it may import at the top of a module; data walks one way.
ALLOWED = {
    "errors": set(),
    "model": set(),
    "cache": set(),
    "data": set(),
    "captures": {"cache", "errors", "model", "data"},
    "oracle": set(),
    "stages": {"captures", "errors", "model", "oracle"},
    "devices": {"errors"},
    "exactness": {"model", "oracle", "stages"},
    "kernels": {"errors", "model", "data", "cache", "devices"},
    "timing": {"model", "devices", "exactness", "stages"},
    "verdict": {"model", "timing"},
    "identity": {"cache", "captures", "data", "devices", "model"},
    "session": {
        "cache",
        "errors",
        "model",
        "captures",
        "oracle",
        "stages",
        "devices",
        "exactness",
        "kernels",
        "timing",
        "identity",
        "data",
        "verdict",
    },
    "results": {"captures", "errors", "model", "session", "studies", "timing", "verdict"},
    "engine": {"captures", "errors", "model"},
    "endpoint": {
        "cache",
        "captures",
        "data",
        "devices",
        "engine",
        "errors",
        "exactness",
        "identity",
        "model",
        "results",
        "session",
        "stages",
        "timing",
        "verdict",
    },
    "studies": {"captures", "errors", "exactness", "identity", "kernels", "model", "oracle", "session", "stages", "devices"},
    "statuses": {"endpoint"},
    "cli": {"errors", "model"},
}


def room_of(module: str) -> str:
    """``replay.session.run`` → ``session``."""
    return module.split(".")[1] if "." in module else ""


def imports(path: Path, *, top_level: bool) -> set[str]:
    """Rooms of the package that a file imports; only at module level, or anywhere."""
    tree = ast.parse(path.read_text())
    found = set()
    nodes = tree.body if top_level else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("replay"):
            names = [node.module] if node.module != "replay" else [f"replay.{a.name}" for a in node.names]
            found |= {room_of(n) for n in names}
        elif isinstance(node, ast.Import):
            found |= {room_of(a.name) for a in node.names if a.name.startswith("replay.")}
    return found - {""}


def files(room: str) -> list[Path]:
    """A room's files."""
    folder = PACKAGE / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{room}.py"]


@pytest.mark.parametrize("room", ALLOWED)
def test_arrows(room: str) -> None:
    """Module-level imports go along the arrows only."""
    for path in files(room):
        extra = imports(path, top_level=True) - ALLOWED[room] - {room, "__version__"}
        assert not extra, f"{path.name} imports {extra}"


@pytest.mark.parametrize(
    ("room", "never"),
    [("oracle", "kernels"), ("kernels", "oracle"), ("kernels", "session"), ("exactness", "kernels"), ("stages", "kernels")],
)
def test_forbidden_even_inside_functions(room: str, never: str) -> None:
    """Oracle and kernels share no code; a kernel cannot reach the session."""
    for path in files(room):
        assert never not in imports(path, top_level=False), path


def test_every_room_is_listed() -> None:
    """A new room must say what it may import."""
    rooms = {p.stem if p.is_file() else p.name for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert rooms - {"__init__", "__main__"} == set(ALLOWED)


HEAVY = {"torch", "scipy", "dpctl", "matplotlib"}


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["--list"], ["capture", "validate", "CAPTURE"], ["cache"]], ids=" ".join
)
def test_light_commands_import_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    """--help, --list, validate and cache start without torch and scipy."""
    code = (
        "import sys; from replay.cli import main; code = main(sys.argv[1:]); "
        f"print(sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    words = [str(ROOT / "captures" / "qwen36-generated") if a == "CAPTURE" else a for a in arguments]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip().splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "module", ["replay.model", "replay.exactness", "replay.verdict", "replay.timing.estimate", "replay.results.build"]
)
def test_pure_modules_need_no_device(module: str) -> None:
    """They import without torch."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
