"""Kernels of selection: right on every edge, in every mode, on ten thousand rows of each dtype, call after call."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay.kernels import eager_topk
from replay.kernels.sycl import topk as launches
from replay.model import Exact, Geometry, Problem
from replay.oracle import topk as oracle
from replay.oracle.arith import rn_bf16
from replay.stages import STAGES, problem_for
from tests.conftest import judge_here
from tests.fuzz.topk_strata import drawn_rows
from tests.topk import edges, logit_case

GREEDY = ("eager:topk.greedy", "sycl:topk.greedy:single_pass")
ROWS = ("eager:topk.rows", "sycl:topk.rows:select")
KS = (1, 20, 64, 65, 300, 2048)


def in_chunks(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Both bodies take so many columns a work-group."""
    monkeypatch.setattr(launches, "_cpu_chunk", lambda rows, all_columns, k: columns)
    monkeypatch.setattr(launches, "_KEYS", columns)
    monkeypatch.setattr(launches, "_GREEDY_COLUMNS", columns)


@pytest.fixture(params=["cpu", "gpu"])
def body(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Our SYCL kernels in one of their bodies."""
    for name in ("prepare_greedy", "prepare_select"):
        monkeypatch.setattr(launches, name, partial(getattr(launches, name), body=request.param))
    return str(request.param)


def exact(kernel: str, folder: Path, rows: Any, **modes: str) -> Exact:
    """The kernel's outcome on the rows and their twins, which is a right one."""
    outcome = judge_here(kernel, logit_case(kernel.split(":")[1], folder, rows, **modes))
    assert isinstance(outcome, Exact), (kernel, modes, outcome)
    return outcome


@pytest.mark.parametrize("vocab", [1, 2, 15, 17, 100, 20_001])
def test_every_edge(vocab: int, body: str, tmp_path: Path) -> None:
    """NaN, ties, infinities, zeros of both signs, one value, low bits alone: in either dtype, whatever the width of a row."""
    for rows in (edges(vocab), rn_bf16(edges(vocab))):
        for kernel in GREEDY:
            assert exact(kernel, tmp_path, rows).grade == "BITWISE"
        for k in KS:
            assert exact(ROWS[1], tmp_path, rows, k=str(k)).grade == "BITWISE"


@pytest.mark.parametrize("columns", [1, 7, 64, 300])
def test_chunks_of_a_row_are_joined(columns: int, body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One to many groups a row, each with fewer columns than k or more: ties, NaN and infinities across them, and a thousand calls
    of one prepared kernel on changing rows leave nothing behind."""
    in_chunks(monkeypatch, columns)
    rows = edges(331)
    assert exact(GREEDY[1], tmp_path, rows).grade == "BITWISE"
    for k in (1, 20, 300):
        assert exact(ROWS[1], tmp_path, rows, k=str(k)).grade == "BITWISE"
    if columns != 64:
        return
    run = launches.prepare_greedy(problem("topk.greedy", len(rows), 331), {})
    other = launches.prepare_greedy(problem("topk.greedy", len(rows), 331), {})  # two alive at once
    t = tensors(rows)
    wider = {**t, "logits": torch.zeros(len(rows), 340)[:, :331]}  # another stride in turn
    for call in range(1000):
        moved = np.roll(rows, call, axis=0)
        given = wider if call % 2 else t
        given["logits"].copy_(torch.from_numpy(moved))
        (other if call % 3 == 0 else run)(given)
        if call % 10 == 0 or call > 990:
            assert np.array_equal(t["token"].numpy(), oracle.greedy(oracle.canonical(moved)))


def test_torch_chooses_otherwise_among_equals(tmp_path: Path) -> None:
    """The eager kernel masks what torch would pick; of equals it takes what torch does, and that is told."""
    found = [exact(ROWS[0], tmp_path, edges(300), k=str(k)) for k in KS]
    assert {f.grade for f in found} == {"BITWISE", "TIE_EQUIVALENT"}
    assert all("not the lowest index first in" in f.detail for f in found if f.grade == "TIE_EQUIVALENT")


@pytest.mark.parametrize("next_n", ["1", "2", "3"])
def test_several_tokens_a_sequence(next_n: str, body: str, tmp_path: Path) -> None:
    """next_n rows share a length, each seeing one column more than the one before."""
    rows = np.random.default_rng(1).standard_normal((12, 50), np.float32)
    assert exact(ROWS[1], tmp_path, rows, k="7", next_n=next_n).grade == "BITWISE"
    exact(ROWS[0], tmp_path, rows, k="7", next_n=next_n)


@pytest.mark.parametrize("index", ["i64", "i32"])
def test_indices_as_wide_as_asked(index: str, body: str, tmp_path: Path) -> None:
    """Tokens in int32 or int64; where the next step reads them they are int64 always."""
    for kernel in GREEDY:
        assert exact(kernel, tmp_path, edges(33), index=index).grade == "BITWISE"


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 64])
def test_rows_from_one_to_sixty_four(rows: int, body: str, tmp_path: Path) -> None:
    """Chunks of a row, and rows alone."""
    drawn = np.random.default_rng(rows).standard_normal((rows, 9001), np.float32)
    assert exact(GREEDY[1], tmp_path, drawn).grade == "BITWISE"
    assert exact(ROWS[1], tmp_path, drawn, k="20").grade == "BITWISE"


def problem(stage: str, rows: int, vocab: int, **modes: str) -> Problem:
    """The problem of so many rows."""
    return problem_for(STAGES[stage], Geometry.parse(f"qwen36:tp1:vocab={vocab}"), rows, modes)


def tensors(rows: np.ndarray, k: int = 1) -> dict[str, torch.Tensor]:
    """Every tensor of both stages, for these rows; the outputs hold nothing that is right."""
    logits = torch.from_numpy(rows.copy())
    n, vocab = rows.shape
    return {
        "logits": logits.view(torch.bfloat16) if rows.dtype == np.uint16 else logits, "slots": torch.arange(n, dtype=torch.int32),
        "token": torch.full((n,), -7), "next_input_ids": torch.full((n + 2,), -7), "indices": torch.full((n, k), -7, dtype=torch.int32),
        "seq_lens": torch.full((n,), vocab, dtype=torch.int32),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_ten_thousand_rows(dtype: str, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of our kernels on 10,048 random rows of a dtype, in chunks: right in all of them, and no kind of row was missed."""
    in_chunks(monkeypatch, 200)
    rng = np.random.default_rng(8)
    seen: Counter[str] = Counter()
    vocab, k, batch = 411, 20, 64
    greedy = [p.prepare_greedy(problem("topk.greedy", batch, vocab, logits=dtype), {}) for p in (eager_topk, launches)]
    select = [
        p(problem("topk.rows", batch, vocab, logits=dtype, k=str(k)), {})
        for p in (eager_topk.prepare_rows, launches.prepare_select)
    ]
    for _ in range(157):
        x, kinds = drawn_rows(rng, batch, vocab)
        rows = rn_bf16(x) if dtype == "bf16" else x
        values = oracle.canonical(rows)
        seen.update(kinds)
        want = oracle.rows(values, np.full(batch, vocab), k)
        for run in greedy:
            t = tensors(rows)
            run(t)
            assert np.array_equal(t["token"].numpy(), want[:, 0])
            assert np.array_equal(t["next_input_ids"].numpy(), [*want[:, 0], -7, -7])
        for run in select:
            t = tensors(rows, k)
            run(t)
            chosen = t["indices"].numpy().astype(np.int64)
            assert all(oracle.is_selection(values[r], chosen[r], k) for r in range(batch))
        assert np.array_equal(np.sort(chosen, axis=1), np.sort(want, axis=1))  # ours takes the lowest indices
    assert sum(seen.values()) == 10_048
    assert min(seen.values()) > 900
    assert len(seen) == 9


@pytest.mark.parametrize("k", [1, 20])
def test_ranks_joined_are_the_whole(k: int) -> None:
    """Four ranks' columns through our kernel, joined: what it selects of the whole, ties by the lowest index."""
    rows = rn_bf16(edges(4 * 620))
    values = oracle.canonical(rows)
    parts = []
    for rank in range(4):
        t = tensors(rows[:, 620 * rank : 620 * (rank + 1)], k)
        launches.prepare_select(problem("topk.rows", len(rows), 620, logits="bf16", k=str(k)), {})(t)
        chosen = t["indices"].numpy().astype(np.int64)
        parts.append(np.where(chosen >= 0, chosen + 620 * rank, -1))
    for r, row in enumerate(values):
        of_row = [part[r] for part in parts]
        joined = oracle.merge([row[np.maximum(c, 0)] for c in of_row], of_row, k)
        assert joined.tolist() == oracle.top(row, k).tolist()


# ---------------------------------------------------------------- the hand-over


def steps(run: Any, head: np.ndarray, count: int) -> list[int]:
    """Tokens of a loop as an engine has it: the next step's logits are made of the embedding of what the last one handed over,
    in the same buffers."""
    t = tensors(head[:1].copy())
    t["slots"][0] = 2
    t["next_input_ids"][2] = 5
    found = []
    for _ in range(count):
        t["logits"].copy_(torch.from_numpy(head)[t["next_input_ids"][2:3]])  # an int64 consumer
        run(t)
        assert t["token"][0] == t["next_input_ids"][2]
        found.append(int(t["next_input_ids"][2]))
    return found


def test_the_token_is_where_the_next_step_reads_it(body: str) -> None:
    """Sixty steps in one set of buffers follow the oracle's tokens; a kernel that keeps what it read at an address does not."""
    head = np.random.default_rng(3).standard_normal((40, 40), np.float32)
    want, token = [], 5
    for _ in range(60):
        token = int(oracle.greedy(oracle.canonical(head[token : token + 1]))[0])
        want.append(token)
    assert len(set(want)) > 3
    posed = problem("topk.greedy", 1, 40)
    for prepare in (eager_topk.prepare_greedy, launches.prepare_greedy):
        assert steps(prepare(posed, {}), head, 60) == want
    assert steps(stale(eager_topk.prepare_greedy(posed, {})), head, 60) != want


def stale(right: Any) -> Any:
    """A kernel that reads an address once."""
    kept: dict[int, torch.Tensor] = {}

    def run(t: dict[str, torch.Tensor]) -> None:
        right({**t, "logits": kept.setdefault(t["logits"].data_ptr(), t["logits"].clone())})

    return run


def test_padding_hands_nothing_over(body: str) -> None:
    """A row whose slot is −1 has its token, and no slot changes; a row of NaN hands −1 over."""
    rows = edges(20)[:5]
    for prepare in (eager_topk.prepare_greedy, launches.prepare_greedy):
        t = tensors(rows)
        t["slots"] = torch.tensor([6, -1, 0, 5, 3], dtype=torch.int32)
        prepare(problem("topk.greedy", 5, 20), {})(t)
        token = t["token"].tolist()
        assert token == oracle.greedy(oracle.canonical(rows)).tolist()
        assert t["next_input_ids"].tolist() == [token[2], -7, -7, -1, -7, token[3], token[0]]
