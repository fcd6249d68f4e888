"""Operations of vllm-xpu-kernels that are nobody's kernels: registered under the same schemas, computed by the oracles, and strict.

A fake looks at every argument as the library's text describes it: dtype, shape, stride, counters that the caller zeroes, numbers that
must agree with the tensors beside them. What is wrong is refused with the argument's name. So an adapter that confuses two of them is
seen without a card.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from replay.kernels.adapters import BINDINGS
from tests.fakes import gdn, moe, topk
from tests.fakes.arguments import Arguments, Refused

__all__ = ["FAKES", "Refused", "library"]

FAKES: Mapping[str, Callable[[Arguments], Any]] = {
    "_moe_C::remap_hidden_states": moe.remap_hidden_states,
    "_moe_C::moe_gather": moe.moe_gather,
    "_xpu_C::per_token_quant_int8_xpu_out": moe.per_token_quant_int8_xpu_out,
    "_xpu_C::silu_and_mul_quant_int8_xpu_out": moe.silu_and_mul_quant_int8_xpu_out,
    "_xpu_C::cutlass_grouped_gemm_w8a8_int8_interface": moe.grouped,
    "_xpu_C::cutlass_grouped_gemm_w8a8_int8_offsets_interface": moe.grouped_offsets,
    "_xpu_C::cutlass_grouped_gemm_w8a8_int8_active_offsets_interface": moe.grouped_active,
    "_xpu_C::cutlass_grouped_gemm_w8a8_int8_topk8_gemm1_interface": moe.grouped_topk8,
    "_C::silu_and_mul": moe.silu_and_mul,
    "_xpu_C::cutlass_grouped_gemm_interface": moe.grouped_16bit,
    "_xpu_C::int8_gemm_w8a8": moe.int8_gemm_w8a8,
    "_moe_C::fused_moe_prologue": moe.fused_moe_prologue,
    "_xpu_C::causal_conv1d_non_spec": gdn.causal_conv1d_non_spec,
    "_xpu_C::gated_delta_rule_non_spec": gdn.gated_delta_rule_non_spec,
    "_xpu_C::gdn_attention": gdn.gdn_attention,
    "_C::top_k_per_row_decode": topk.top_k_per_row_decode,
    "_moe_C::topk_softmax": topk.topk_softmax,
}


@contextlib.contextmanager
def library(schemas: Mapping[str, str] | None = None) -> Iterator[list[dict[str, Any]]]:
    """The fakes as torch operations on a CPU while it lasts; the arguments of each call are kept. ``schemas`` replaces some."""
    calls: list[dict[str, Any]] = []
    texts = {b.op: b.schema for b in BINDINGS.values()} | dict(schemas or {})
    spaces = {op.partition("::")[0] for op in FAKES}
    libraries = {space: torch.library.Library(space, "FRAGMENT") for space in spaces}
    try:
        for op, fake in FAKES.items():
            space, _, name = op.partition("::")
            libraries[space].define(name + texts[op])
            names = [a.name for a in torch._C.parse_schema(op + texts[op]).arguments]
            libraries[space].impl(name, _recorded(fake, names, calls), "CPU")
        yield calls
    finally:
        for one in libraries.values():
            one._destroy()


def _recorded(fake: Callable[[Arguments], Any], names: list[str], calls: list[dict[str, Any]]) -> Callable[..., Any]:
    def run(*given: Any, **named: Any) -> Any:
        arguments = dict(zip(names, given, strict=False)) | named
        calls.append(arguments)
        return fake(arguments)

    return run
