"""The operations that select."""

import numpy as np

from replay.oracle import router as router_oracle
from replay.oracle import topk as topk_oracle
from replay.session.buffers import to_numpy
from tests.fakes.arguments import Arguments, apart, counts_of, fill, number, require, tensor


def top_k_per_row_decode(a: Arguments) -> None:
    """The k largest of a row's valid columns."""
    counts_of(a, "next_n", "numRows", "stride0", "stride1", "topK")
    logits = tensor(a, "logits", "float32", a["numRows"], None, strided=True)
    for name, want in (("stride0", logits.stride(0)), ("stride1", 1)):
        number(a, name, want)
    require(a["next_n"] >= 1 and a["numRows"] % a["next_n"] == 0, "next_n", f"a divisor of {a['numRows']}", a["next_n"])
    lengths = tensor(a, "seq_lens", "int32", a["numRows"] // a["next_n"])
    indices = tensor(a, "indices", "int32", a["numRows"], a["topK"])
    valid = topk_oracle.valid_columns(to_numpy(lengths), a["next_n"], len(logits), logits.shape[1])
    fill(indices, topk_oracle.rows(topk_oracle.canonical(to_numpy(logits)), valid, a["topK"]), "i32")


def topk_softmax(a: Arguments) -> None:
    """The k largest of a softmax, and which of the expanded rows each is: slot · tokens + token."""
    x = tensor(a, "gating_output", "float32 bfloat16", None, None)
    weights = tensor(a, "topk_weights", "float32", len(x), None)
    ids, expanded = (tensor(a, name, "int32", *weights.shape) for name in ("topk_indices", "token_expert_indices"))
    require(weights.shape[1] <= x.shape[1], "topk_weights", f"at most {x.shape[1]} columns", weights.shape[1])
    require(type(a["renormalize"]) is bool, "renormalize", "a flag", a["renormalize"])
    bias = None if a["bias"] is None else to_numpy(tensor(a, "bias", "float32", x.shape[1]))
    padding = None if a["is_padding"] is None else tensor(a, "is_padding", "bool", len(x)).numpy()
    apart(a, "topk_indices", "token_expert_indices")
    p, chosen = router_oracle.route(to_numpy(x.float()), bias, padding, weights.shape[1], renormalize=a["renormalize"])
    fill(weights, p, "f32")
    fill(ids, chosen, "i32")
    fill(expanded, np.arange(chosen.size, dtype=np.int32).reshape(chosen.shape[::-1]).T, "i32")
