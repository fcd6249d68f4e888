"""Make the tiny checkpoints: Qwen3-Next's architecture, a few million weights, trained for seconds to answer what it is asked.

    python bench/endpoints/make_tiny.py FOLDER [NAME…]        (``make tiny-endpoint``)

Greedy margins are wide then, routers choose, GDN states fill, and the canaries and the quality suite of ``tiny-cpu.toml`` have
answers that a broken kernel loses. A folder that was made from the same script, sizes and texts is left as it is.
"""

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from replay.endpoint.spec import Endpoint, prompt_of, read
from replay.model import Geometry, preset

HERE = Path(__file__).resolve()
NAMES = ("tiny-moe-16", "tiny-moe-256")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Text to be continued, for prompts that ask nothing.
SENTENCES = (
    "On Monday the ferry left at nine and came back at noon, and on Tuesday it left at ten and came back at one. ",
    "A kernel that is fast and wrong is a slow way of being wrong, said the old engineer, and measured once more. ",
    "Two loaves, six eggs, a jar of honey, some salt; then home along the canal before the rain begins again. ",
)
STEPS, MARGIN, RATE = 120, 2.0, 2e-3
VOCABULARY = 512


def tokenizer() -> Any:
    """One token a byte, and the special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL]
    made = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=SPECIAL[0], pad_token=SPECIAL[0])


def model(g: Geometry, eos: int) -> Any:
    """A fresh one, its routers spread out so that experts differ from the start."""
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    made = Qwen3NextForCausalLM(Qwen3NextConfig(
        vocab_size=VOCABULARY, hidden_size=g.hidden, num_hidden_layers=g.layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, linear_key_head_dim=g.head_dim, linear_value_head_dim=g.head_dim, linear_num_key_heads=g.k_heads,
        linear_num_value_heads=g.v_heads, linear_conv_kernel_dim=g.conv_width, moe_intermediate_size=g.inter,
        shared_expert_intermediate_size=g.inter, intermediate_size=g.hidden, num_experts=g.experts, num_experts_per_tok=g.top_k,
        max_position_embeddings=2048, initializer_range=0.08, eos_token_id=eos, pad_token_id=eos, tie_word_embeddings=False,
    )).float()  # fmt: skip
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight.normal_(std=0.5)
    return made


def texts(endpoint: Endpoint) -> list[tuple[str, str]]:
    """(prompt, what follows it) of everything that is to be learned; a question's answer ends the turn."""
    asked = [
        (prompt_of(endpoint, item), item.expect + "<|im_end|><|endoftext|>") for item in (*endpoint.canary, *endpoint.quality)
    ]
    return asked + [(text[:40], text[40:] + text[:40]) for text in SENTENCES]


def batches(endpoint: Endpoint, tok: Any) -> list[tuple[Any, Any]]:
    """(ids [B, L], whether a token is one that must be answered [B, L]) of the short texts together, and of each long one."""
    import torch

    rows = [(tok(prompt).input_ids, tok(answer).input_ids) for prompt, answer in texts(endpoint)]
    short = [row for row in rows if len(row[0]) + len(row[1]) <= 200]
    found = []
    for group in [short, *([row] for row in rows if row not in short)]:
        length = max(len(p) + len(a) for p, a in group)
        ids = torch.full((len(group), length), tok.pad_token_id)
        answered = torch.zeros((len(group), length), dtype=torch.bool)
        for i, (prompt, answer) in enumerate(group):
            ids[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            answered[i, len(prompt) : len(prompt) + len(answer)] = True
        found.append((ids, answered))
    return found


def train(made: Any, endpoint: Endpoint, tok: Any) -> tuple[int, float]:
    """(steps, the least margin by which a token of an answer is the likeliest): until that is ``MARGIN`` twice in a row."""
    import torch

    torch.set_num_threads(2)
    optimizer = torch.optim.AdamW(made.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.1)
    held, wide, least = batches(endpoint, tok), 0, 0.0
    total = sum(int(answered.sum()) for _, answered in held)
    for step in range(1, STEPS + 1):
        least, summed = float("inf"), 0.0
        optimizer.zero_grad()
        for ids, answered in held:
            logits, want, asked = made(ids).logits[:, :-1], ids[:, 1:], answered[:, 1:]
            loss = torch.nn.functional.cross_entropy(logits[asked], want[asked], reduction="sum") / total
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotations there
            summed += float(loss.detach())
            right = logits.detach().gather(2, want[..., None])[..., 0]
            others = logits.detach().scatter(2, want[..., None], float("-inf")).max(2).values
            least = min(least, float((right - others)[asked].min()))
        torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        wide = wide + 1 if least >= MARGIN else 0
        if step % 10 == 0 or wide:
            print(f"  step {step}: loss {summed:.4f}, least margin {least:.2f}", flush=True)
        if wide == 2:
            return step, least
    raise SystemExit(f"not learned in {STEPS} steps: expected a margin of {MARGIN}, got {least:.2f}")


def make(name: str, folder: Path) -> None:
    """Make one checkpoint, unless the one that is there came of the same."""
    endpoint, toml = read(HERE.parent / "tiny-cpu.toml")
    geometry = preset(name, 1)
    key = hashlib.sha256(HERE.read_bytes() + toml + str(geometry).encode()).hexdigest()
    stamp = folder / "made_from.json"
    if stamp.is_file() and json.loads(stamp.read_text())["key"] == key:
        print(f"{folder}: is there")
        return
    import torch

    begin = time.monotonic()
    tok = tokenizer()
    made = model(geometry, tok.eos_token_id)
    print(f"{folder}: {sum(p.numel() for p in made.parameters()) / 1e6:.1f} million weights", flush=True)
    steps, least = train(made, endpoint, tok)
    folder.mkdir(parents=True, exist_ok=True)
    made.eval().to(torch.bfloat16).save_pretrained(folder)
    tok.save_pretrained(folder)
    stamp.write_text(json.dumps({"key": key, "steps": steps, "least_margin": least}))
    print(f"{folder}: {steps} steps, {time.monotonic() - begin:.0f} s, least margin {least:.2f}")


if __name__ == "__main__":
    for chosen in sys.argv[2:] or NAMES:
        make(chosen, Path(sys.argv[1]) / chosen)
