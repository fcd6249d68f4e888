"""Make a route capture from a seed: a router whose skew, repeats and overlap resemble a real one's.

Expert e of token t has the logit s·p_e + a_{t,e}: a fixed popularity p and a drift a that follows its own last value
(AR(1) with coefficient ``memory``), so popular experts recur and neighbouring tokens share experts. The router's
choice is the top k, its weights the softmax over them. One token in ``repeat_every`` is an earlier token again, as
happens in real text. numpy's Philox, so that a seed gives the same capture everywhere.
"""

import hashlib
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.captures.manifest import MANIFEST, FileEntry, Manifest
from replay.captures.records import V1Record
from replay.model import Geometry


class RouterModel(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the generator; the defaults were fitted to layers 9 and 14 of a Qwen3.6-35B-A3B decode."""

    seed: int = 20260612
    layers: tuple[int, ...] = (9, 14, 23)
    tokens: int = 64
    popularity: float = 1.0
    memory: float = 0.43
    repeat_every: int = 64


def draw_layer(model: RouterModel, layer: int, experts: int, top_k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """(ids [tokens, k], weights [tokens, k]) of one layer."""
    rng = np.random.Generator(np.random.Philox(key=[model.seed, layer]))
    base = model.popularity * rng.standard_normal(experts)
    drift = rng.standard_normal(experts)
    fresh = np.sqrt(1 - model.memory**2)
    ids = np.empty((model.tokens, top_k), np.int64)
    weights = np.empty((model.tokens, top_k), np.float32)
    for t in range(model.tokens):
        if t % model.repeat_every == model.repeat_every - 1:
            earlier = int(rng.integers(0, t - 1))
            ids[t], weights[t] = ids[earlier], weights[earlier]
            continue
        drift = model.memory * drift + fresh * rng.standard_normal(experts)
        logits = base + drift
        top = np.argsort(-logits, kind="stable")[:top_k]
        p = np.exp(logits[top] - logits[top[0]])
        ids[t], weights[t] = top, (p / p.sum()).astype(np.float32)
    return ids, weights


def generate(folder: Path, name: str, geometry: Geometry, model: RouterModel) -> Manifest:
    """Write ``routes.jsonl`` and its manifest into ``folder``; the same arguments give the same bytes."""
    drawn = {layer: draw_layer(model, layer, geometry.experts, geometry.top_k) for layer in model.layers}
    encoder = msgspec.json.Encoder()
    lines = []
    for t in range(model.tokens):
        for layer, (ids, weights) in drawn.items():
            record = V1Record(
                v=1, layer=f"language_model.model.layers.{layer}.mlp.experts", stage="router", step=t, phase="decode",
                num_tokens=1, top_k=geometry.top_k, num_experts=geometry.experts, topk_ids=[ids[t].tolist()],
                topk_weights=[[float(str(w)) for w in weights[t]]], requests=["generated"], padding=[False], rank="0",
            )  # fmt: skip
            lines.append(encoder.encode(record))
    text = b"\n".join(lines) + b"\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "routes.jsonl").write_bytes(text)
    manifest = Manifest(
        form="b70-capture/1", name=name, origin="generated", made_by="make captures", geometry=geometry, modes={},
        files=[FileEntry("routes.jsonl", "routes", hashlib.sha256(text).hexdigest(), len(text))],
        generator={"function": "replay.captures.generate:generate", **msgspec.to_builtins(model)},
    )  # fmt: skip
    (folder / MANIFEST).write_bytes(msgspec.json.format(encoder.encode(manifest), indent=2) + b"\n")
    return manifest


if __name__ == "__main__":
    import sys

    from replay.model import preset

    generate(Path(sys.argv[1]), "qwen36-generated", preset("qwen36", 4), RouterModel())
