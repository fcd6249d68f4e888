"""The MoE oracles: against the lab's own permutation, against loops in exact arithmetic, and at the edges."""

import json

import numpy as np
import pytest
import torch

from replay.oracle import moe
from replay.oracle.arith import bf16_to_f32, rn_bf16
from replay.oracle.moe import ExpertRows
from replay.oracle.quant import quantize
from tests.conftest import LAB, needs_lab


@needs_lab
def test_prologue_agrees_with_the_labs_permutation() -> None:
    """All 16 windows of the lab's fixture."""
    windows = json.loads((LAB / "gather_fixture_export_20260612bg.reduced.json").read_text())["windows"]
    assert len(windows) == 16
    for window in windows:
        _, _, permuted = moe.route(np.array(window["topk_ids"], np.int32), 256)
        assert permuted.tolist() == window["unpermuted"]


def test_route_counts_orders_and_skips_padding() -> None:
    """Canonical order is by (token, slot); −1 stays −1 and is counted nowhere."""
    ids = np.array([[2, 0, -1], [0, -1, 2]], np.int32)
    rows, offsets, permuted = moe.route(ids, 4)
    assert rows.tolist() == [2, 0, 2, 0]
    assert offsets.tolist() == [0, 2, 2, 4, 4]
    assert permuted.tolist() == [[2, 0, -1], [1, -1, 3]]
    assert (rows.dtype, offsets.dtype, permuted.dtype) == (np.int32, np.int64, np.int32)


def test_route_under_an_expert_map_uses_local_ids() -> None:
    """Another rank's expert is −1 here, in all three outputs; so is padding."""
    ids = np.array([[0, 3, -1], [2, 1, 3]], np.int32)
    rows, offsets, permuted = moe.route(ids, 2, np.array([-1, 0, -1, 1], np.int32))
    assert rows.tolist() == [1, 2]
    assert offsets.tolist() == [0, 1, 3]
    assert permuted.tolist() == [[-1, 1, -1], [-1, 0, 2]]


def test_int8_matmul_is_exact_at_the_extremes() -> None:
    """−128·−128 over K = 7168, far past 2^24, and large codes whose sums are odd there."""
    a = np.full((2, 7168), -128, np.int8)
    rng = np.random.default_rng(0)
    a[1], b = rng.integers(100, 128, 7168), np.full((7168, 66), -128, np.int8)
    b[:, 1], b[:, 2:] = rng.integers(-128, 128, 7168), rng.integers(100, 128, (7168, 64))
    want = a.astype(np.int64) @ b.astype(np.int64)
    got = moe.int8_matmul(a, b)
    assert got.dtype == np.int32
    assert (got == want).all()


def test_epilogue_associations_differ() -> None:
    """row_then_col and scales_first round differently somewhere, and each as written."""
    rng = np.random.default_rng(1)
    acc = rng.integers(-(2**25), 2**25, (64, 512)).astype(np.int32)
    a, b = rng.random(64, np.float32), rng.random(512, np.float32)
    rows = moe.epilogue(acc, a, b, "row_then_col")
    first = moe.epilogue(acc, a, b, "scales_first")
    assert (rows == rn_bf16((acc.astype(np.float32) * a[:, None]) * b)).all()
    assert (first == rn_bf16(acc.astype(np.float32) * (a[:, None] * b))).all()
    biased = moe.epilogue(acc, a, b, "row_then_col", bias=b)
    assert (biased == rn_bf16((acc.astype(np.float32) * a[:, None]) * b + b)).all()


def test_combine_skips_padding_and_shows_nan() -> None:
    """All −1 gives exactly zero; 0·inf is NaN; the chain rounds once a slot."""
    y = rn_bf16(np.array([[1.0, np.inf], [3.0, 2.0]], np.float32))
    permuted = np.array([[0, 1], [-1, -1], [1, -1]], np.int32)
    weights = np.array([[0.0, 1.0], [5.0, 5.0], [2.0, np.nan]], np.float32)
    for mode in ("off", "chain"):
        out = bf16_to_f32(moe.combine(y, permuted, weights, mode))
        assert out[0, 0] == 3.0
        assert np.isnan(out[0, 1])
        assert out[1].tolist() == [0.0, 0.0]
        assert out[2].tolist() == [6.0, 4.0]


def test_combine_fma_flips_some_outputs() -> None:
    """Contraction shows in a few of 10^5 outputs, so a check on fewer could not tell."""
    rng = np.random.default_rng(2)
    y = rn_bf16(rng.standard_normal((512, 2048), np.float32))
    permuted = np.arange(512, dtype=np.int32).reshape(64, 8)
    w = rng.dirichlet(np.ones(8), 64).astype(np.float32)
    differ = np.count_nonzero(moe.combine(y, permuted, w, "off") != moe.combine(y, permuted, w, "chain"))
    assert 0 < differ < 131072 * 1e-3


def test_combine_rounds_every_step_to_f32() -> None:
    """Against torch, an operation at a time: a sum in f64 would show in a few of 10^5 outputs."""
    rng = np.random.default_rng(12)
    y = rn_bf16(rng.standard_normal((512, 2048), np.float32))
    permuted = np.arange(512, dtype=np.int32).reshape(64, 8)
    w = rng.dirichlet(np.ones(8), 64).astype(np.float32)
    rows, weights = torch.from_numpy(bf16_to_f32(y)).reshape(64, 8, 2048), torch.from_numpy(w)
    total, wide = torch.zeros(64, 2048), torch.zeros(64, 2048, dtype=torch.float64)
    for j in range(8):
        total = total + rows[:, j] * weights[:, j, None]
        wide = wide + rows[:, j].double() * weights[:, j, None].double()
    out = moe.combine(y, permuted, w, "off")
    assert (out == total.bfloat16().view(torch.uint16).numpy()).all()
    assert (out != wide.float().bfloat16().view(torch.uint16).numpy()).any()


def test_zero_row_groups_anywhere() -> None:
    """Groups [0,5,0,0,3,0]: each row meets its own expert's weights."""
    rng = np.random.default_rng(3)
    offsets = np.cumsum([0, 0, 5, 0, 0, 3, 0]).astype(np.int64)
    a, scale = rng.integers(-127, 128, (8, 16)).astype(np.int8), np.ones(8, np.float32)
    w = ExpertRows(6, np.array([1, 4]), rng.integers(-127, 128, (2, 16, 4)).astype(np.int8))
    ws = ExpertRows(6, np.array([1, 4]), np.ones((2, 4), np.float32))
    out = moe.grouped_gemm(a, scale, offsets, w, ws, "row_then_col")
    want = np.concatenate([a[:5].astype(int) @ w[1].astype(int), a[5:].astype(int) @ w[4].astype(int)])
    assert (out == rn_bf16(want.astype(np.float32))).all()
    with pytest.raises(KeyError):
        w[0]


def test_activation_modes_differ_as_often_as_the_contract_says() -> None:
    """Rounded once against twice: about 27 % of values differ before quantisation hides some."""
    rng = np.random.default_rng(4)
    gate_up = rn_bf16(rng.standard_normal((32, 1024), np.float32))
    scales = {
        act: moe.act_quant(gate_up, act, "recip_half_away")[0] for act in ("silu_round_twice", "silu_round_once", "silu_f32")
    }
    assert (scales["silu_round_twice"] != scales["silu_round_once"]).any()
    assert (scales["silu_round_once"] != scales["silu_f32"]).any()


def test_layer_is_the_chain_of_its_stages() -> None:
    """The composite is its stages in order, whatever the padding."""
    rng = np.random.default_rng(5)
    g, experts = 32, np.arange(4)
    w = moe.LayerWeights(
        ExpertRows(4, experts, rng.integers(-127, 128, (4, g, 16)).astype(np.int8)),
        ExpertRows(4, experts, rng.random((4, 16), np.float32) / 1000),
        ExpertRows(4, experts, rng.integers(-127, 128, (4, 8, g)).astype(np.int8)),
        ExpertRows(4, experts, rng.random((4, g), np.float32) / 1000),
    )
    x = rn_bf16(rng.standard_normal((3, g), np.float32))
    ids = np.array([[0, 3], [-1, -1], [1, -1]], np.int32)
    weights = rng.random((3, 2), np.float32)
    out = moe.layer(
        x, ids, weights, w, quant="recip_half_away", epilogue="row_then_col", act="silu_round_twice", combine_fma="off"
    )
    q, s = quantize(bf16_to_f32(x), "recip_half_away")
    _, offsets, permuted = moe.route(ids, 4)
    a, a_scale = moe.remap(q, s, permuted)
    h = moe.grouped_gemm(a, a_scale, offsets, w.w13, w.w13_scale, "row_then_col")
    y = moe.grouped_gemm(*moe.act_quant(h, "silu_round_twice", "recip_half_away"), offsets, w.w2, w.w2_scale, "row_then_col")
    assert (out == moe.combine(y, permuted, weights, "off")).all()
    assert (out[1] == 0).all()
