"""The command line: one line and exit 2 for bad input, nothing written, no traceback."""

import json
import re
from pathlib import Path

import pytest

from replay.cli import main
from tests.captures.test_routes import v1_record, write
from tests.conftest import LAB_ROUTES, Cli, needs_lab

CAPTURE = ("--capture", "qwen36-generated")

BAD = [
    (("--route-jsonl", "none.jsonl"), "none.jsonl: path: expected a capture, got no such file or folder"),
    (("--route-jsonl", "."), ".: path: expected a route file, or a folder with manifest.json, got a directory without one"),
    (("--route-jsonl", "empty.jsonl"), "empty.jsonl: file: expected at least one record, got an empty file"),
    (("--route-jsonl", "bad.jsonl"), "bad.jsonl:2: topk_ids[0][7]: expected 0 ≤ id < 256, or -1, got 256"),
    (("--route-jsonl", "other.jsonl"), "other.jsonl:1: num_experts, top_k: expected 256, 8 (geometry qwen36:tp4), got 8, 2"),
    (("run",), "run: --route-jsonl: expected a route, state or logit file, or a capture folder, got none"),
    ((*CAPTURE, "--route-start-indices", "64"), "--route-start-indices: index: expected start + window ≤ the layer's token rows"),
    ((*CAPTURE, "--route-start-indices", "x"), "--route-start-indices: value: expected an index or start:stop[:step], got 'x'"),
    ((*CAPTURE, "--route-layer-regex", "nope"), "--route-layer-regex: pattern: expected one that matches a name in"),
    ((*CAPTURE, "--route-layer-regex", "("), "--route-layer-regex: pattern: expected a regular expression"),
    ((*CAPTURE, "--route-window-size", "0"), "--route-window-size: value: expected W[,W…], each 1 or more, got '0'"),
    ((*CAPTURE, "--stage", "moe.nope"), "--stage: name: expected one of moe.quantize"),
    ((*CAPTURE, "--kernel", "nope:*"), "--kernel: id: expected a registered kernel (see --list), got 'nope:*'"),
    ((*CAPTURE, "--stage", "moe.route", "--kernel", "sycl:moe.gemm1:rows"), "--kernel: sycl:moe.gemm1:rows: expected a kernel of"),
    ((*CAPTURE, "--baseline", "nope"), "--baseline: id: expected a registered kernel"),
    ((*CAPTURE, "--mode", "quant"), "--mode: value: expected name=value, got 'quant'"),
    ((*CAPTURE, "--mode", "quant=nope"), "--mode: quant of moe.quantize: expected one of recip_half_away"),
    ((*CAPTURE, "--mode", "nope=1"), "--mode: name: expected one of act, bias"),
    ((*CAPTURE, "--model", "nope"), "--model, --tp: preset 'nope': expected one of qwen36"),
    ((*CAPTURE, "--model", "qwen3-30b"), "--model: value: expected a model of 256 experts, 8 a token"),
    (("--state", "qwen36-generated"), "qwen36-generated: --state: expected captured states, got routes"),
    ((*CAPTURE, "--state", "x"), "--state: capture: expected one, got qwen36-generated and x"),
    ((*CAPTURE, "--tp", "2"), "--tp: value: expected 4, as the capture's manifest says, got 2"),
    (("--route-jsonl", "right.jsonl", "--model", "nope"), "--model, --tp: preset 'nope': expected one of qwen36"),
    (("--route-jsonl", "right.jsonl", "--tp", "3"), "--model, --tp: tp: expected a divisor of qwen36's inter 512, got 3"),
    ((*CAPTURE, "--device", "tpu"), "--device: name: expected cpu, xpu[:N] or cuda[:N], got 'tpu'"),
    ((*CAPTURE, "--case", "nope"), "--case: id: expected STAGE@GEOMETRY/CAPTURE/LAYER/rSTART+ROWS;MODES#SEED, got case 'nope'"),
    ((*CAPTURE, "--case", "moe.route@qwen36:tp4/other/L9/r0+1#7"), "--case: capture: expected qwen36-generated, got other"),
    ((*CAPTURE, "--case", "moe.route@qwen36:tp4/qwen36-generated/L3/r0+1#7"), "--case: layer: expected one of L9, L14, L23, got L3"),
    ((*CAPTURE, "--case", "moe.nope@qwen36:tp4/qwen36-generated/L9/r0+1#7"), "--case: stage: expected one of moe.quantize"),
    ((*CAPTURE, "--load", "none.py"), "none.py: --load: expected a Python file, got no such file"),
    ((*CAPTURE, "--load", "broken.py"), "broken.py: --load: expected a file that imports, got SyntaxError"),
    ((*CAPTURE, "--load", "raises.py"), "raises.py: --load: expected a file that imports, got ZeroDivisionError: division by zero"),
    ((*CAPTURE, "--load", "nothing.py"), "nothing.py: KERNELS: expected a list of replay.model.Kernel, got NoneType"),
    ((*CAPTURE, "--load", "twice.py"), "twice.py: eager:moe.route: expected an id not registered before"),
    ((*CAPTURE, "--load", "exits.py"), "exits.py: --load: expected a file that imports, got SystemExit: 0"),
    ((*CAPTURE, "--load", "types.py"), "types.py: KERNELS: 5: expected the fields of a Kernel, got Expected `str`, got `int`"),
    ((*CAPTURE, "--load", "modes.py"), "modes.py: KERNELS: 'mine:moe.route': expected the fields of a Kernel, got Expected `array`"),
    ((*CAPTURE, "--case", "moe.route@qwen3-30b:tp4/qwen36-generated/L9/r0+1#7"), "--case: geometry: expected qwen36:tp4, as the"),
    ((*CAPTURE, "--case", "moe.route@qwen36:tp4:inter=0/qwen36-generated/L9/r0+1#7"), "--case: id: expected STAGE"),
    (("--resume", "full", "--quick"), "--resume: options: expected no other, since the run's journal holds them, got quick"),
    ((*CAPTURE, "--require", "best"), "--require: value: expected exact, faster or floor:X, got 'best'"),
    ((*CAPTURE, "--margin", "x"), "b70-replay run: Invalid value for '--margin'"),
    ((*CAPTURE, "-o", "full"), "full: -o: expected an empty or new folder"),
    ((*CAPTURE, "--load", "stage.py"), "mine:moe.nope:x: expected a stage: moe.quantize"),
    ((*CAPTURE, "--case", "moe.route@qwen36:tp4/qwen36-generated/L9/r0+1#7", "--max-cases", "1"), "--case: options: expected none of those"),
    ((*CAPTURE, "--mode", "quant=recip_half_even", "--mode", "quant=recip_half_away"), "--mode: quant: expected one value, got recip_half_even and"),
    ((*CAPTURE, "--route-start-indices", ""), "--route-start-indices: value: expected an index or start:stop[:step], got ''"),
    ((*CAPTURE, "--margin", "nan"), "--margin: value: expected a percentage from 0 to 50, got nan"),
    (("--route-jsonl", "right.jsonl", "--tp", "0"), "--model, --tp: tp: expected a positive number, got 0"),
    (("--resume", "none"), "none: run: expected a run folder with a readable run.jsonl, got no such file"),
]  # fmt: skip


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """A folder with one of each bad file."""
    right = v1_record(num_experts=256, top_k=8, topk_ids=[list(range(8))], topk_weights=None)
    write(tmp_path / "right.jsonl", right)
    write(tmp_path / "bad.jsonl", right, {**right, "topk_ids": [[*range(7), 256]]})
    write(tmp_path / "other.jsonl", v1_record())
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "raises.py").write_text("1 / 0\n")
    (tmp_path / "nothing.py").write_text("")
    (tmp_path / "twice.py").write_text(
        "from replay.model import Kernel\nKERNELS = [Kernel(id='eager:moe.route', prepare=':x')]\n"
    )
    (tmp_path / "exits.py").write_text("raise SystemExit(0)\n")
    head = "from replay.model import Kernel\n"
    (tmp_path / "types.py").write_text(head + "KERNELS = [Kernel(id=5, prepare=':x')]\n")
    (tmp_path / "stage.py").write_text(head + "KERNELS = [Kernel(id='mine:moe.nope:x', prepare=':x')]\n")
    (tmp_path / "modes.py").write_text(head + "KERNELS = [Kernel(id='mine:moe.route', prepare=':x', modes={'a': 'b'})]\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    return tmp_path


@pytest.mark.parametrize(("arguments", "told"), BAD, ids=[" ".join(a) or "nothing" for a, _ in BAD])
def test_bad_input_is_one_line(
    there: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    """What, where, expected, got; exit 2; no run folder and no traceback."""
    monkeypatch.chdir(there)
    before = sorted(there.rglob("*"))
    code = main(list(arguments))
    out, err = capfd.readouterr()
    assert code == 2, err
    assert told in err if told.startswith("mine:") else err.startswith(told)
    assert len(err.splitlines()) == 1
    assert out == ""
    assert [p for p in sorted(there.rglob("*")) if "__pycache__" not in p.parts] == before


def test_validate_says_what_is_there(cli: Cli, there: Path) -> None:
    """Records, rows, form, manifest; and the first wrong record."""
    done = cli("capture", "validate", "right.jsonl")
    assert done.stdout.startswith("right.jsonl: valid: 1 records, 1 token rows, form v1, no manifest")
    done = cli("capture", "validate", "bad.jsonl")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("bad.jsonl:2: topk_ids[0][7]")


@needs_lab
def test_inspect_prints_the_labs_figures(cli: Cli) -> None:
    """Gini, repeat rate and overlap of both layers."""
    done = cli("capture", "inspect", LAB_ROUTES)
    lines = done.stdout.splitlines()
    assert re.split(r"\s{2,}", lines[1]) == [
        "L9", "quark_int8_apply", "0", "64", "64", "1.00, 1", "91", "0.835", "63", "0.016", "2.89",
    ]  # fmt: skip


def test_a_run_keeps_its_documents(cli: Cli, tmp_path: Path) -> None:
    """run.jsonl, result.json and result.md; the geometry of the manifest; no --route-jsonl command word needed."""
    select = ("--kernel", "eager:moe.remap", "--stage", "moe.remap", "--route-start-indices", "0", "--route-window-size", "2")
    done = cli(*CAPTURE, *select, "--quick", "--blocks", 5, "-o", "run")
    assert done.returncode == 0, done.stderr
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"run.jsonl", "result.json", "result.md"}
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert [r["case"] for r in result["rows"]] == [
        f"moe.remap@qwen36:tp4/qwen36-generated/{x}/r0+2#7" for x in ("L9", "L14", "L23")
    ]
    assert "QUICK: 1 process." in done.stdout
    assert "moe.remap · qwen36 tp4 · qwen36-generated L9,L14,L23 · 2 tokens · 3 cases" in done.stdout


def test_cache_shows_and_clears(cli: Cli, tmp_path: Path) -> None:
    """The folder that B70_CACHE names."""
    import os

    env = os.environ | {"B70_CACHE": str(tmp_path / "cache")}
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "shim-x.so").write_bytes(b"12345")
    assert "shim-x.so" in cli("cache", env=env).stdout
    assert cli("cache", "--clear", env=env).stdout == "freed 5 bytes\n"


def test_doctor_lists_every_kernel(cli: Cli) -> None:
    """The device, the SYCL runtime, and what each kernel lacks."""
    done = cli("doctor")
    assert done.returncode == 0, done.stderr
    assert "sycl:moe.gemm1:rows" in done.stdout
    assert cli("doctor", "--device", "cuda").returncode == 5


def test_a_device_that_is_not_there_is_refused(cli: Cli, tmp_path: Path) -> None:
    """Exit 5 before a run folder is made; no kernel is blamed."""
    done = cli(*CAPTURE, "--stage", "moe.route", "--device", "cuda")
    assert done.returncode == 5
    assert done.stderr.startswith("--device: cuda: torch")
    assert not (tmp_path / "runs").exists()
