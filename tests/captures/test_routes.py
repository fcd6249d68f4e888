"""Reading route files: both forms, flat memory, and one line for every way a record can be wrong."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from replay.captures.routes import read_batches
from replay.errors import InputError
from tests.conftest import LAB_ROUTES, ROOT, needs_lab


def lab_record(**changes: Any) -> dict[str, Any]:
    """A right record of the lab's form: 8 experts, 2 a token."""
    ids = changes.get("topk_ids", [[1, 4], [4, 7]])
    flat = [e for row in ids or [] for e in (row if isinstance(row, list) else []) if isinstance(e, int) and 0 <= e < 8]
    counts = np.bincount(flat, minlength=8).tolist()
    record = {
        "layer": "model.layers.9.mlp.experts", "stage": "router", "shape": [2, 2], "num_tokens": 2, "top_k": 2,
        "num_experts": 8, "assignments": sum(counts), "nonzero_experts": sum(c > 0 for c in counts),
        "max_rows_per_expert": max(counts), "counts": counts, "topk_ids": ids, "rank": "", "local_rank": "0",
    }  # fmt: skip
    return {k: v for k, v in (record | changes).items() if v is not ...}


def v1_record(**changes: Any) -> dict[str, Any]:
    """A right record of form v1."""
    record = {
        "v": 1, "layer": "model.layers.9.mlp.experts", "stage": "router", "step": 3, "phase": "decode", "num_tokens": 1,
        "top_k": 2, "num_experts": 8, "topk_ids": [[1, 4]], "topk_weights": [[0.75, 0.25]], "requests": ["a"],
        "padding": [False], "rank": "0",
    }  # fmt: skip
    return {k: v for k, v in (record | changes).items() if v is not ...}


def write(path: Path, *records: dict[str, Any] | bytes) -> Path:
    """Records as lines; bytes stand as they are."""
    path.write_bytes(
        b"".join(r if isinstance(r, bytes) else json.dumps(r, separators=(",", ":")).encode() + b"\n" for r in records)
    )
    return path


def message(path: Path) -> str:
    """The line a user would read."""
    with pytest.raises(InputError) as caught:
        list(read_batches(path))
    return str(caught.value).replace(str(path), "F")


@pytest.mark.parametrize("record", [lab_record(), v1_record()])
@pytest.mark.parametrize("suffix", ["", ".zst"])
def test_reads_both_forms_plain_and_compressed(tmp_path: Path, record: dict[str, Any], suffix: str) -> None:
    """Every record comes back once, with its ids, whether the file is compressed or not."""
    path = write(tmp_path / "routes.jsonl", *[record] * 1000)
    if suffix:
        path = tmp_path / "routes.jsonl.zst"
        path.write_bytes(zstandard.compress((tmp_path / "routes.jsonl").read_bytes()))
    batches = list(read_batches(path))
    assert sum(len(b.layers) for b in batches) == 1000
    assert all((b.topk_ids == np.array(record["topk_ids"])).all() for b in batches if b.topk_ids is not None)
    assert [line for b in batches for line in b.lines] == [json.dumps(record, separators=(",", ":")).encode()] * 1000


def test_unknown_fields_stay_in_the_raw_line(tmp_path: Path) -> None:
    """A field that we do not know is kept with the line."""
    path = write(tmp_path / "r.jsonl", v1_record(future={"a": 1}))
    assert json.loads(next(read_batches(path)).lines[0])["future"] == {"a": 1}


def test_spaces_and_missing_last_newline_are_fine(tmp_path: Path) -> None:
    """json.dumps' default separators, CRLF and an unfinished last newline change nothing."""
    text = json.dumps(lab_record()).encode()
    path = write(tmp_path / "r.jsonl", text + b"\r\n" + text)
    assert sum(len(b.layers) for b in read_batches(path)) == 2


def test_changing_shapes_make_several_batches(tmp_path: Path) -> None:
    """Records of other shapes follow one another in file order."""
    other = v1_record(num_tokens=2, topk_ids=[[1, 2], [3, 4]], topk_weights=None, requests=["a", "b"], padding=None)
    path = write(tmp_path / "r.jsonl", v1_record(), other, v1_record())
    assert [(b.first_line, b.num_tokens) for b in read_batches(path)] == [(1, 1), (2, 2), (3, 1)]


WRONG = [
    (lab_record(topk_ids=[[1, 4], [4, 8]], counts=[0, 1, 0, 0, 2, 0, 0, 0]), "F:2: topk_ids[1][1]: expected 0 ≤ id < 8, or -1, got 8"),
    (lab_record(topk_ids=[[1, 1], [4, 7]]), "F:2: topk_ids[0][1]: expected an id not used before in this token, got 1"),
    (lab_record(topk_ids=[[1, "x"], [4, 7]]), "F:2: topk_ids[0][1]: expected int, got str"),
    (lab_record(topk_ids=[[1, 4], 4]), "F:2: topk_ids[1]: expected array, got int"),
    (lab_record(topk_ids=[[1, 4]]), "F:2: topk_ids: expected 2 rows, as num_tokens says, got 1"),
    (lab_record(topk_ids=[[1, 4], [4]]), "F:2: topk_ids[1]: expected 2 values, as top_k says, got 1"),
    (lab_record(shape=[2, 3]), "F:2: shape: expected [2, 2], as num_tokens and top_k say, got [2, 3]"),
    (lab_record(num_tokens=3), "F:2: shape: expected [3, 2], as num_tokens and top_k say, got [2, 2]"),
    (lab_record(counts=[0] * 7), "F:2: counts: expected 8 values, as num_experts says, got 7"),
    (lab_record(counts=[0, 1, 0, 0, 1, 0, 0, 2]), "F:2: counts[4]: expected 2, as topk_ids say, got 1"),
    (lab_record(counts=[0, 1, 0, 0, 2, 0, 0, "1"]), "F:2: counts: expected a list of integers"),
    (lab_record(assignments=5), "F:2: assignments: expected 4, as counts say, got 5"),
    (lab_record(nonzero_experts=2), "F:2: nonzero_experts: expected 3, as counts say, got 2"),
    (lab_record(max_rows_per_expert=1), "F:2: max_rows_per_expert: expected 2, as counts say, got 1"),
    (lab_record(layer=...), "F:2: layer: expected a value, got no such field"),
    (lab_record(layer=9), "F:2: layer: expected str, got int"),
    (lab_record(num_experts=0), "F:2: num_experts: expected a positive number, got 0"),
    (b'{"layer": "model.lay\n', "F:2: line: expected a whole JSON object, got a truncated line of 20 bytes"),
    (b"\n", "F:2: line: expected a JSON object, got a blank line"),
    (b'{"layer":\x00"a"}\n', "F:2: line: expected JSON text, got a NUL byte at column 10"),
    (lab_record(topk_ids=[[1, 10**25], [4, 7]]), "F:2: topk_ids[0][1]: expected 0 ≤ id < 8, or -1, got 10000000000000000000000000"),
    (lab_record(assignments=10**25), "F:2: assignments: expected 4, as counts say"),
    (lab_record(counts=[0, 1, 0, 0, 2, 0, 0, 10**25]), "F:2: counts[7]: expected 1, as topk_ids say"),
    (b'{"deep":' + b"[" * 100000 + b"\n", "F:2: line: expected a JSON object of this form, got one nested too deeply"),
    (b"[1, 2]\n", "F:2: line: expected object, got array"),
    (b'"\xff\xfe"\n', "F:2: line: expected"),
]  # fmt: skip
WRONG_V1 = [
    (v1_record(topk_weights=[[1e300, 0]]), "F:2: topk_weights[0][0]: expected a finite f32, got 1e+300"),
    (v1_record(topk_weights=[[0.5]]), "F:2: topk_weights[0]: expected 2 values, as top_k says, got 1"),
    (v1_record(topk_weights=[["a", 1]]), "F:2: topk_weights[0][0]: expected float, got str"),
    (v1_record(padding=[False, True]), "F:2: padding: expected 1 values, as num_tokens says, got 2"),
    (v1_record(requests=[]), "F:2: requests: expected 1 values, as num_tokens says, got 0"),
    (v1_record(topk_ids=...), "F:2: topk_ids: expected a value, got no such field"),
    (v1_record(topk_ids=[[-2, 1]]), "F:2: topk_ids[0][0]: expected 0 ≤ id < 8, or -1, got -2"),
    (
        json.dumps(v1_record(topk_weights=[[0, 1]])).replace("1]]", "NaN]]").encode() + b"\n",
        "F:2: line: expected a JSON object, got",
    ),
]


@pytest.mark.parametrize(("bad", "told"), WRONG + WRONG_V1)
def test_a_wrong_record_is_named(tmp_path: Path, bad: dict[str, Any] | bytes, told: str) -> None:
    """File, line, field, expected and got, for the second line of three."""
    right = v1_record() if (bad, told) in WRONG_V1 else lab_record()
    assert message(write(tmp_path / "r.jsonl", right, bad, right)).startswith(told)


def test_padding_ids_may_repeat(tmp_path: Path) -> None:
    """−1 marks padding or another rank's expert, and is no repeated id."""
    path = write(tmp_path / "r.jsonl", lab_record(topk_ids=[[-1, -1], [4, -1]]))
    assert next(read_batches(path)).topk_ids is not None


def test_files_that_are_no_files(tmp_path: Path) -> None:
    """Missing, empty, a directory, a cut zstd stream: one line each."""
    assert "no such file" in message(tmp_path / "none.jsonl")
    assert "a directory" in message(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    assert "at least one record, got an empty file" in message(tmp_path / "empty.jsonl")
    packed = zstandard.compress((json.dumps(lab_record()).encode() + b"\n") * 2000)
    (tmp_path / "cut.jsonl.zst").write_bytes(packed[: len(packed) // 2])
    for data in (packed[: len(packed) // 2], packed[:-1], packed + packed[:40]):
        (tmp_path / "cut.jsonl.zst").write_bytes(data)
        assert message(tmp_path / "cut.jsonl.zst").startswith("F: file: expected a whole zstd stream, got one that is cut short")


def test_mixed_forms_fail_where_they_mix(tmp_path: Path) -> None:
    """A file is of one form."""
    assert message(write(tmp_path / "r.jsonl", v1_record(), lab_record())).startswith("F:2: ")


@needs_lab
def test_the_labs_own_file_reads() -> None:
    """127 records of two layers, as the lab's notes say."""
    batches = list(read_batches(LAB_ROUTES))
    assert sum(len(b.layers) for b in batches) == 127
    assert {r for b in batches for r in b.ranks} == {"0"}


# The peak of this program alone: a child's rusage begins with its parent's.
PEAK = """
import re, sys
from pathlib import Path
from replay.cli import main
code = main(sys.argv[1:])
print(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
sys.exit(code)
"""


def test_validate_takes_no_more_memory_for_more_lines(tmp_path: Path) -> None:
    """Ten times the file, the same peak; `make bench-self` has a gigabyte."""
    block = (ROOT / "captures" / "tiny-moe-256" / "routes.jsonl").read_bytes()
    peaks = []
    for times in (4, 40):
        path = tmp_path / f"{times}.jsonl"
        path.write_bytes(block * times)
        words = [sys.executable, "-c", PEAK, "capture", "validate", str(path)]
        done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
        peaks.append(int(done.stdout.splitlines()[-1]) / 1024)
    assert peaks[1] < peaks[0] + 16
    assert peaks[1] < 300
