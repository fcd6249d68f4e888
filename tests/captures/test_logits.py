"""Logit captures: what is in them is checked, told in one line, made from a seed, and tied as a trained model's are."""

from pathlib import Path

import numpy as np
import pytest

from replay.captures import Select, open_capture
from replay.captures.generate_logits import draw_narrow, draw_rows, save
from replay.captures.logits import cases, check_capture, check_logits, find, open_logits
from replay.captures.manifest import MANIFEST
from replay.captures.seeded import SHIPPED, describe
from replay.cli import main
from replay.errors import InputError
from replay.model import Geometry, Logits, Problem
from tests.conftest import ROOT

SMALL = Geometry.parse("qwen36:tp1:vocab=50")
ROWS = np.random.default_rng(0).standard_normal((6, 50), np.float32)


def posed(geometry: Geometry, rows: int) -> Problem:
    """A problem of so many rows."""
    return Problem("topk.greedy", geometry, rows, ())


def logit_file(folder: Path, rows: np.ndarray = ROWS, requests: int = 3) -> Path:
    """A logit file with these rows."""
    path = folder / "some.safetensors"
    save(path, "lm_head", rows, requests)
    return path


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_manifests_are_what_their_seeds_make(name: str, tmp_path: Path) -> None:
    """`make captures` gives the manifests in the repository; they say that nobody recorded them."""
    made = describe(tmp_path, name, *SHIPPED[name])
    assert (tmp_path / MANIFEST).read_bytes() == (ROOT / "captures" / name / MANIFEST).read_bytes()
    assert made.origin == "generated"


def test_ties_are_as_a_models() -> None:
    """Of 151,936 bf16 logits the largest ties in about 3 % of rows, the twentieth with the next in about 54 %."""
    rng = np.random.Generator(np.random.Philox(key=4))
    at = {1: 0, 20: 0}
    for _ in range(10):
        wide = (draw_rows(rng, 40, 151_936).astype(np.uint32) << 16).view(np.float32)
        top = -np.sort(np.partition(-wide, 20, axis=1)[:, :21], axis=1)[:, ::-1]  # ascending
        for k in at:
            at[k] += int(np.count_nonzero(top[:, -k] == top[:, -k - 1]))
    assert 0.005 < at[1] / 400 < 0.06
    assert 0.465 < at[20] / 400 < 0.615


def test_narrow_rows_differ_in_ten_bits() -> None:
    """The upper bits of all of them are alike, and all of the low ones occur."""
    bits = draw_narrow(np.random.default_rng(1), 1, 60_000).view(np.uint32)
    assert len(np.unique(bits >> 10)) == 1
    assert len(np.unique(bits & 1023)) == 1024


def test_cases_are_rows_in_order(tmp_path: Path) -> None:
    """Windows of consecutive rows; an id finds its case again, and an index past the end is told."""
    capture = open_capture(logit_file(tmp_path))
    assert capture.holds == "logits"
    check_capture(capture, SMALL)
    found = list(cases(capture, Select(windows=(2,), start_indices="0,4"), SMALL, posed, 7))
    assert [c.held for c in found] == [Logits(str(capture.files[0]), rows) for rows in ((0, 1), (4, 5))]
    assert find(capture, found[1].id) == found[1]
    with pytest.raises(InputError, match="start \\+ window ≤ the 6 rows of lm_head, got 5 \\+ 2"):
        list(cases(capture, Select(windows=(2,), start_indices="5"), SMALL, posed, 7))


@pytest.mark.parametrize(
    ("rows", "requests", "told"),
    [
        (
            np.where(np.arange(300).reshape(6, 50) == 107, np.nan, ROWS).astype(np.float32),
            3,
            r"logits\[2, 7\]: expected a number, got NaN",
        ),
        (ROWS[:, :40].copy(), 3, r"logits: expected shape \(6, 50\)"),
        (ROWS.astype(np.float16), 3, "logits: expected f32 or bf16, got f16"),
    ],
)
def test_what_is_refused(rows: np.ndarray, requests: int, told: str, tmp_path: Path) -> None:
    """A NaN with its row and column, another width, another dtype."""
    with pytest.raises(InputError, match=told):
        check_logits(open_logits(logit_file(tmp_path, rows, requests)), SMALL)


def test_an_infinity_is_an_ordinary_logit(tmp_path: Path) -> None:
    """A mask is no fault."""
    rows = ROWS.copy()
    rows[2, :30] = -np.inf
    check_logits(open_logits(logit_file(tmp_path, rows)), SMALL)


def test_two_rows_of_one_request_and_step(tmp_path: Path) -> None:
    """The second is named."""
    path = logit_file(tmp_path)
    at = path.read_bytes().rindex((np.arange(6, dtype=np.int32) % 3).tobytes())
    data = bytearray(path.read_bytes())
    data[at : at + 24] = np.array([0, 1, 1, 0, 1, 2], np.int32).tobytes()
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"request\[2\]: expected one row a request at step 0, got 1, as in row 1"):
        check_logits(open_logits(path), SMALL)


@pytest.mark.parametrize(
    "words", [["chain", "--state"], ["run", "--stage", "moe.gemm1", "--quick", "--logits"]], ids=lambda w: w[0]
)
def test_logits_are_no_states(words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A command that wants another kind of capture, or a stage of another family, is told in one line."""
    assert main([*words, str(logit_file(tmp_path))]) == 2
    err = capfd.readouterr().err
    assert len(err.strip().splitlines()) == 1
    assert "logits" in err


def test_inspect_counts_ties(capfd: pytest.CaptureFixture[str]) -> None:
    """The shipped sample: shape, range and shares of ties."""
    assert main(["capture", "inspect", "qwen36-logits-generated"]) == 0
    line = next(line for line in capfd.readouterr().out.splitlines() if line.startswith("narrow"))
    assert line.split() == ["narrow", "f32", "[16,", "248320]", "16", "1", "1", "100%", "100%"]
