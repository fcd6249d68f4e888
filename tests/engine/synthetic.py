"""A model runner that serves nobody: steps whose every number is known, through the recorder as vLLM's hooks call it."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch

from replay.captures.recording import FORM, Head
from replay.engine.config import Record
from replay.engine.record import Recorder
from replay.engine.writer import Writer
from replay.model import preset

GEOMETRY = preset("tiny-moe-16", 1)
LAYERS = tuple(f"model.layers.{i}.mlp.experts" for i in range(3))
GDN = "model.layers.0.linear_attn"
EVERYTHING = ("routes", "weights", "hidden", "gdn", "states", "states_after", "outputs", "logits")


WRITERS: list[Writer] = []  # of this process, which hold their locks


def recorder(folder: Path, *, rank: int = 0, ranks: int = 1, expected: tuple[int, ...] = (), **asked: Any) -> Recorder:
    """A recorder whose folder is to be had."""
    record = Record(folder=str(folder), **asked)
    head = Head(
        form=FORM, rank=rank, expected=expected or tuple(range(ranks)), pid=1, versions={"vllm": "0.32.0"}, model="tiny", geometry=GEOMETRY, record=msgspec.to_builtins(record)
    )  # fmt: skip
    WRITERS.append(Writer(record, head))
    return Recorder(record, WRITERS[-1])


@dataclass
class Engine:
    """Requests by name, each with the tokens of its prompt; ``step`` schedules so many tokens of each."""

    recorder: Recorder
    prompts: dict[str, int]
    padding: int = 0
    seed: int = 0
    computed: dict[str, int] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)
    routed: list[tuple[str, Any, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        g, generator = GEOMETRY, torch.Generator().manual_seed(self.seed)
        self.generator = generator
        self.layer = SimpleNamespace(
            prefix=GDN,
            kv_cache=(
                torch.randn(8, g.conv_width - 1, g.conv_dim, generator=generator).bfloat16(),
                torch.randn(8, g.v_heads, g.head_dim, g.head_dim, generator=generator),
            ),
        )
        self.fixed = {
            "conv_weights": torch.randn(g.conv_dim, g.conv_width, generator=generator).bfloat16(),
            "A_log": torch.rand(g.v_heads, generator=generator), "dt_bias": torch.rand(g.v_heads, generator=generator).bfloat16(),
        }  # fmt: skip

    def step(self, tokens: dict[str, int]) -> None:
        """One step of the scheduler, as vLLM's worker takes it: decoding requests first."""
        r, g = self.recorder, GEOMETRY
        names = sorted(tokens, key=lambda n: tokens[n])
        computed = np.array([self.computed.get(n, 0) for n in names])
        prompts = np.array([self.prompts[n] for n in names])
        known = np.array([max(self.known.get(n, 0), self.prompts[n]) for n in names])
        batch = {"num_computed_tokens_cpu": computed, "num_prompt_tokens": prompts, "num_tokens_no_spec": known}
        runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=names, **batch))
        r.begin(runner)
        rows = sum(tokens.values()) + self.padding
        for layer in LAYERS:
            logits = torch.randn(rows, g.experts, generator=self.generator)
            weights, ids = logits.softmax(1).topk(g.top_k)
            r.gate(layer, torch.randn(rows, g.hidden, generator=self.generator).bfloat16(), logits.bfloat16())
            r.route(layer, weights, ids.int())
            self.routed.append((layer, ids.int(), weights))
        self._gdn(names, tokens)
        r.whose(runner, tokens)
        r.logits(torch.randn(len(names), g.vocab, generator=self.generator).bfloat16())
        r.end()
        for name, had, knew in zip(names, computed.tolist(), known.tolist(), strict=True):
            self.computed[name] = had + tokens[name]
            self.known[name] = knew + (self.computed[name] == knew)

    def _gdn(self, names: list[str], tokens: dict[str, int]) -> None:
        r, g = self.recorder, GEOMETRY
        decodes = [n for n in names if tokens[n] == 1]
        slots = torch.tensor([list(self.prompts).index(n) + 1 for n in names], dtype=torch.int32)
        rows = sum(tokens.values()) + self.padding
        inputs = {
            name: torch.randn(rows, width, generator=self.generator).bfloat16()
            for name, width in (("mixed_qkv", g.conv_dim), ("a", g.v_heads), ("b", g.v_heads))
        }
        metadata = SimpleNamespace(num_decodes=len(decodes), non_spec_state_indices_tensor=slots)
        held = r.gdn_begins(self.layer, metadata, **inputs)
        if held is not None:
            modes = {"state_layout": "k_v", "dt_bias": "bf16", "ssm_state": "f32"}
            r.gdn_weights(self.layer, lambda layer: self.fixed, lambda layer: modes)
        r.gdn_ends(self.layer, held, torch.randn(rows, g.v_heads, g.head_dim, generator=self.generator).bfloat16())
        r.gdn_z(GDN, torch.randn(rows, g.v_heads, g.head_dim, generator=self.generator).bfloat16())
