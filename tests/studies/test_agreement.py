"""The oracle against what an engine wrote: agreeing where it follows the contract, and not where it does not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay.captures import open_capture
from replay.captures.manifest import MANIFEST, FileEntry, Manifest, file_sha256
from replay.captures.states import open_states
from replay.captures.tensors import bf16, save_tensors
from replay.model import preset
from replay.oracle import gdn, router
from replay.oracle.arith import bf16_to_f32
from replay.studies.agreement import STATE_BUDGET, Agreement, agreements
from tests.conftest import ROOT

SHIPPED = ROOT / "captures" / "tiny-moe-256"


def described(folder: Path, name: str, holds: Any) -> Path:
    """A manifest for one file."""
    entry = FileEntry(name, holds, file_sha256(folder / name), (folder / name).stat().st_size)
    manifest = Manifest(
        form="b70-capture/1", name="made", origin="generated", made_by="a test", geometry=preset("tiny-moe-256", 1), modes={},
        files=[entry],
    )  # fmt: skip
    import msgspec

    (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return folder


def states(folder: Path, scale: float = 1.0, out_step: int = 0) -> dict[str, Agreement]:
    """The shipped states with what the contract makes of them as the engine's, the state scaled and outputs moved."""
    file = open_states(SHIPPED / "states-L0.safetensors")
    tensors: dict[str, Any] = {name: np.array(file.tensor(name)) for name in file.entries}
    rows, g = np.flatnonzero(tensors["state_row"] >= 0), preset("tiny-moe-256", 1)
    slots, starts = np.arange(len(rows), dtype=np.int32), np.arange(len(rows) + 1, dtype=np.int32)
    mixed = np.ascontiguousarray(tensors["mixed_qkv"][rows])
    qkv, conv = gdn.conv(mixed, tensors["conv_weights"], None, tensors["conv_state"], slots, starts, mixed)
    left = np.zeros((len(rows), g.v_heads, g.head_dim), np.uint16)
    out, state = gdn.recurrent(
        qkv, tensors["a"][rows], tensors["b"][rows], tensors["A_log"], tensors["dt_bias"], tensors["ssm_state"], slots, starts, left,
        gdn.Heads(g.k_heads, g.v_heads, g.head_dim, g.head_dim), gdn.Modes(state_layout="k_v"),
    )  # fmt: skip
    tensors["core_attn_out"][rows] = out + np.uint16(out_step)
    tensors |= {"ssm_state_after": state * np.float32(scale), "conv_state_after": conv}
    save_tensors(folder / "states.safetensors", file.meta, tensors)
    return {a.output: a for a in agreements(open_capture(described(folder, "states.safetensors", "states")))}


def test_the_shipped_recording_agrees() -> None:
    """What vLLM wrote, two layers of it."""
    found = list(agreements(open_capture(SHIPPED, "states")))
    assert [a.layer for a in found] == ["L0", "L1"]
    assert all(a.agrees for a in found)
    assert all(a.worst > 0 for a in found)


def test_the_contract_agrees_with_itself(tmp_path: Path) -> None:
    """To the bit: the distance is 0."""
    found = states(tmp_path)
    assert {a.worst for a in found.values()} == {0.0}


@pytest.mark.parametrize("scale", [0.98, 0.0, 1.02])
def test_a_state_that_is_off_disagrees(scale: float, tmp_path: Path) -> None:
    """Two per cent are beyond the budget, and zero is; the row is named."""
    found = states(tmp_path, scale)
    assert not found["ssm_state"].agrees
    assert found["ssm_state"].worst == pytest.approx(abs(1 - scale), rel=1e-3)
    assert "DISAGREES at row" in found["ssm_state"].cells()[5]
    assert STATE_BUDGET < 0.02


def test_an_output_that_is_far_off_disagrees(tmp_path: Path) -> None:
    """Hundreds of bf16 steps in every element."""
    assert not states(tmp_path, out_step=300)["core_attn_out"].agrees


@pytest.mark.parametrize("fault", ["", "tie", "another", "weights"])
def test_routers(fault: str, tmp_path: Path) -> None:
    """Other experts are told, unless the logits were equal; so are other weights."""
    rng, g = np.random.default_rng(1), preset("tiny-moe-256", 1)
    logits = bf16(rng.standard_normal((6, g.experts)).astype(np.float32))
    weights, ids = router.route(bf16_to_f32(logits), None, None, g.top_k, renormalize=True)
    ids, weights = ids[:, ::-1].copy(), weights[:, ::-1].copy()  # an engine need not sort them
    least = ids[2, 0]
    other = next(e for e in range(g.experts) if e not in ids[2])
    if fault == "tie":
        logits[2, other] = logits[2, least]
        weights, ids = (x[:, ::-1].copy() for x in router.route(bf16_to_f32(logits), None, None, g.top_k, renormalize=True))
        ids[2, 0] = other if ids[2, 0] == least else least
    elif fault == "another":
        ids[2, 0] = other
    elif fault == "weights":
        weights[2, 3] *= np.float32(1.1)
    index = {name: np.zeros(6, np.int32) for name in ("step", "request", "position")}
    tensors = {
        "hidden": np.zeros((6, g.hidden), np.uint16), "router_logits": logits, "topk_ids": ids.astype(np.int32), "topk_weights": weights,
        **index,
    }  # fmt: skip
    save_tensors(tmp_path / "gates.safetensors", {"form": "b70-gate/1", "layer": "model.layers.0.mlp.experts"}, tensors)
    found = {a.output: a for a in agreements(open_capture(described(tmp_path, "gates.safetensors", "gates")))}
    assert found["topk_ids"].agrees == (fault != "another")
    assert found["topk_weights"].agrees == (fault != "weights")
    assert ("equal logits" in found["topk_ids"].told) == (fault == "tie")
