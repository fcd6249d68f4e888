"""Provider ``eager``, the stages of selection: plain torch operations over integer keys, so that a NaN is masked before torch,
which would pick it, sees it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from replay.kernels.eager_common import eager_kernel, exp_cr, strided32_tree
from replay.model import Problem

if TYPE_CHECKING:
    import torch

    from replay.kernels.registry import Run

    T = torch.Tensor
    Tensors = Mapping[str, T]

NO_KEY = -(1 << 31)  # below −inf's


KERNELS = (
    eager_kernel("topk.greedy", __name__, "prepare_greedy"),
    eager_kernel("topk.rows", __name__, "prepare_rows"),
    eager_kernel("topk.router", __name__, "prepare_router", graph_safe=True),
)


def keys(logits: "T") -> "T":
    """int32, in the order of the logits with −0.0 at +0.0, and NO_KEY for a NaN."""
    import torch

    x = logits.float() + 0.0
    bits = x.view(torch.int32)
    return torch.where(x.isnan(), NO_KEY, bits ^ ((bits >> 31) & 0x7FFFFFFF))


def prepare_greedy(problem: Problem, weights: "Tensors") -> "Run":
    """torch's argmax gives the first of equals."""
    import torch

    def run(t: "Tensors") -> None:
        ordered = keys(t["logits"])
        best = ordered.argmax(1)
        there = ordered.gather(1, best[:, None])[:, 0] != NO_KEY
        token = torch.where(there, best, -1)
        t["token"].copy_(token)
        real = t["slots"] >= 0
        t["next_input_ids"][t["slots"][real].long()] = token[real]

    return run


def prepare_rows(problem: Problem, weights: "Tensors") -> "Run":
    """torch's topk, which takes any of equals; k may be more than there are columns."""
    import torch

    k, next_n = int(problem.mode("k")), int(problem.mode("next_n"))

    def run(t: "Tensors") -> None:
        ordered = keys(t["logits"])
        rows, columns = ordered.shape
        row = torch.arange(rows, device=ordered.device)
        last = t["seq_lens"].long()[row // next_n] - next_n + row % next_n + 1
        ordered = ordered.masked_fill(torch.arange(columns, device=ordered.device) >= last[:, None], NO_KEY)
        found, chosen = ordered.topk(min(k, columns), dim=1)
        t["indices"].fill_(-1)
        t["indices"][:, : chosen.shape[1]] = torch.where(found == NO_KEY, -1, chosen).int()

    return run


def prepare_router(problem: Problem, weights: "Tensors") -> "Run":
    """topk.router: a stable sort of the keys of p + bias."""
    import torch

    k, renormalize = problem.geometry.top_k, problem.mode("renormalize") == "on"

    def run(t: "Tensors") -> None:
        x = t["gating_output"].float()
        e = exp_cr(x - x.amax(1, keepdim=True))
        total = strided32_tree(e)
        p = e * (torch.ones_like(total) / total)[:, None]
        score = p + t["bias"] if "bias" in t else p
        ids = keys(score).sort(dim=1, descending=True, stable=True)[1][:, :k]
        chosen = p.gather(1, ids)
        if renormalize:
            total = torch.zeros_like(total)
            for j in range(k):
                total = total + chosen[:, j]
            chosen = chosen / total[:, None]
        if "is_padding" in t:
            padded = (t["is_padding"] != 0)[:, None]
            chosen, ids = torch.where(padded, 0.0, chosen), torch.where(padded, -1, ids)
        t["topk_weights"].copy_(chosen)
        t["topk_ids"].copy_(ids.int())

    return run
