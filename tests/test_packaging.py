"""Editable, wheel and sdist installs all run from an empty directory, resources and all."""

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

RUN = (
    "run", "--capture", "qwen36-generated", "--stage", "moe.gemm1", "--route-layer-regex", r"layers\.9\.", "--max-cases", "1",
    "--kernel", "eager:*", "--kernel", "sycl:*:rows", "--quick", "--blocks", "5", "--repeats", "2", "-o", "run",
)  # fmt: skip


def run(*command: object, cwd: Path, **env: str) -> str:
    """A command's output; its stderr when it fails."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH",)}
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, env=clean | env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sdist and wheel, built from a copy without its history, the wheel from the sdist."""
    source, out = tmp_path_factory.mktemp("source") / "b70-replay", tmp_path_factory.mktemp("dist")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_symlink():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).symlink_to(os.readlink(ROOT / name))
        elif (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source, cwd=out)
    return out


def environment(folder: Path) -> Path:
    """A virtual environment that sees the packages of this one, but not this project."""
    venv.create(folder)  # pip and setuptools are those of this environment
    site = next((folder / "lib").glob("python*/site-packages"))
    here = next(p for p in sys.path if p.endswith("site-packages"))
    (site / "outer.pth").write_text(f"{here}\n")
    return folder / "bin"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whl", "tar.gz", "editable"])
def test_installs_run_from_an_empty_directory(built: Path, tmp_path: Path, kind: str) -> None:
    """Install without dependencies, go to an empty folder, find the resources, and from the wheel replay the shipped capture through
    SYCL and torch. (The sdist is what the wheel was built of, an editable install what all other tests run on.)"""
    bin_ = environment(tmp_path / "env")
    what = ["-e", str(ROOT)] if kind == "editable" else [str(next(built.glob(f"*.{kind}")))]
    constraints = ROOT / "constraints" / "cpu-3.11.txt"
    pip = (bin_ / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation")
    before = sorted(ROOT.glob("*.egg-info"))
    run(*pip, "-c", constraints, *what, cwd=tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    where = run(bin_ / "python", "-c", "import replay; print(replay.__file__)", cwd=empty).strip()
    assert where.startswith(str(ROOT if kind == "editable" else tmp_path / "env"))
    found = run(bin_ / "python", "-c", "from replay.data import path; print(path('sycl', 'shim.cpp').is_file())", cwd=empty)
    assert found == "True\n"
    assert "qwen36-generated: valid" in run(bin_ / "b70-replay", "capture", "validate", "qwen36-generated", cwd=empty)
    assert sorted(ROOT.glob("*.egg-info")) == before
    if kind != "whl":
        return
    out = run(bin_ / "b70-replay", *RUN, cwd=empty)
    assert re.search(r"^sycl:moe\.gemm1:rows +BITWISE", out, re.MULTILINE)
    assert re.search(r"^eager:moe\.gemm1 +BITWISE", out, re.MULTILINE)


def test_archives_carry_the_resources_and_no_results(built: Path) -> None:
    """Sources, captures and headers are in both; bench/results in neither; the wheel is for any platform."""
    wheel = next(built.glob("*.whl"))
    assert wheel.name.endswith("py3-none-any.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        sdist = {name.partition("/")[2] for name in archive.getnames()}
    for names in (inside, sdist):
        assert {"replay/py.typed", "replay/data/sycl/shim.cpp", "replay/data/captures/qwen36-generated/manifest.json"} <= names
        assert not any("bench/results" in name for name in names)
