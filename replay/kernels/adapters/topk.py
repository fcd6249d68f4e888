"""Operations that select: of logits, and of a router's."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from replay.kernels.adapters.binding import Binding, Is, Room, Value, of_problem

if TYPE_CHECKING:
    import torch

    T = torch.Tensor
    Tensors = Mapping[str, T]


_TOP_K = Binding(
    op="_C::top_k_per_row_decode", stage="topk.rows", variant="top_k_per_row_decode",
    schema="(Tensor logits, int next_n, Tensor seq_lens, Tensor! indices, int numRows, int stride0, int stride1, int topK) -> ()",
    arguments={
        "logits": Is("logits"), "next_n": of_problem(lambda p: int(p.mode("next_n"))), "seq_lens": Is("seq_lens"),
        "indices": Is("indices"), "numRows": of_problem(lambda p: p.rows), "stride0": Value(lambda p, t: t["logits"].stride(0)),
        "stride1": Value(lambda p, t: t["logits"].stride(1)), "topK": of_problem(lambda p: int(p.mode("k"))),
    },
    writes=("indices",), modes=(("logits", ("f32",)),),
)  # fmt: skip


_SOFTMAX = Binding(
    op="_moe_C::topk_softmax", stage="topk.router", variant="topk_softmax",
    schema="(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, Tensor gating_output, bool renormalize, "
    "Tensor? bias, Tensor? is_padding) -> ()",
    arguments={
        "topk_weights": Is("topk_weights"), "topk_indices": Is("topk_ids"),
        "token_expert_indices": Room("int32", lambda p: (p.rows, p.geometry.top_k)), "gating_output": Is("gating_output"),
        "renormalize": of_problem(lambda p: p.mode("renormalize") == "on"), "bias": Value(lambda p, t: t.get("bias")),
        "is_padding": Value(lambda p, t: t["is_padding"].bool() if "is_padding" in t else None),
    },
    writes=("topk_weights", "topk_indices", "token_expert_indices"),
)  # fmt: skip


BINDINGS = (_TOP_K, _SOFTMAX)
