"""Other people's GDN decode kernels as kernels of ours: judged by the budgets of their stages, timed like any other.

    PYTHONPATH=. PEERS_PYTHON -m replay run --state qwen36-states-generated --load bench/self/gdn_peers.py --mode state_layout=k_v

Run in an environment that holds vLLM's CPU build or fla (docs/gdn.md says how to make one). Both keep a head's state as [K, V],
which ``state_layout=k_v`` poses, so it is handed over as it lies. They sum in orders of their own: budgeted. Batches without
padding rows.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from replay.kernels import eager_gdn
from replay.model import Case, Kernel, Problem
from replay.stages import STAGES

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]
    Run = Callable[[Tensors], None]

_LAYOUT = (("state_layout", ("k_v",)), ("l2norm", ("div_sqrt_eps_in", "rsqrt_eps_in")), ("batch", ("decode",)))


def _peer(id_: str, prepare: str, needs: tuple[str, ...], devices: tuple[str, ...], modes: Any = _LAYOUT) -> Kernel:
    return Kernel(id=id_, prepare=prepare, needs=needs, devices=devices, modes=modes, layouts=("contiguous",), budgeted=True)


_CONV = (("batch", ("decode",)), ("conv_bias", ("off",)), ("padding_z", ("written",)))

KERNELS = (
    _peer("vllm:gdn.conv:cpu", ":prepare_vllm_conv", ("python:vllm",), ("cpu",), _CONV),
    _peer("vllm:gdn.recurrent:cpu", ":prepare_vllm", ("python:vllm",), ("cpu",), (*_LAYOUT, ("ssm_state", ("f32",)))),
    _peer("fla:gdn.recurrent:naive", ":prepare_fla_naive", ("python:fla", "python:triton"), ("cpu", "cuda", "xpu")),
    _peer("fla:gdn.recurrent:fused", ":prepare_fla_fused", ("python:fla", "python:triton"), ("cuda", "xpu")),
)


def split(problem: Problem, qkv: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
    """qkv [T, conv_dim] → q, k [T, Hk, K], v [T, Hv, V], as views."""
    g = problem.geometry
    width = g.k_heads * g.head_dim
    q, k, v = qkv[:, :width], qkv[:, width : 2 * width], qkv[:, 2 * width :]
    return q.view(-1, g.k_heads, g.head_dim), k.view(-1, g.k_heads, g.head_dim), v.view(-1, g.v_heads, g.head_dim)


def prepare_vllm_conv(problem: Problem, weights: "Tensors") -> "Run":
    """vLLM's decode conv on a CPU, states in place; the projections are split by views, as its caller splits them."""
    import torch
    from vllm import _custom_ops  # noqa: F401  # registers torch.ops._C

    update = torch.ops._C.causal_conv1d_update_cpu
    g, order = problem.geometry, problem.mode("reorder_input")

    def run(t: "Tensors") -> None:
        mixed, z = eager_gdn.split_qkvz(t["qkvz"], g, order)
        b, a = eager_gdn.split_ba(t["ba"], g, order)
        states = t["conv_state"].transpose(1, 2)
        # silu, no accepted tokens, −1 for padding, weights as they come.
        made = update(mixed.contiguous(), states, t["conv_weights"], None, True, None, t["slots"], -1, False)
        for name, value in (("qkv", made), ("z", z), ("b", b), ("a", a)):
            t[name].copy_(value)

    return run


def prepare_vllm(problem: Problem, weights: "Tensors") -> "Run":
    """vLLM's fused decode operation on a CPU: gates, norm, recurrence and the states, in place."""
    import torch
    from vllm import _custom_ops  # noqa: F401  # registers torch.ops._C

    step = torch.ops._C.fused_sigmoid_gating_delta_rule_update_cpu

    def run(t: "Tensors") -> None:
        q, k, v = (x[None].contiguous() for x in split(problem, t["qkv"]))
        out = step(
            t["A_log"], t["dt_bias"], q, k, v, t["a"], t["b"], t["ssm_state"], t["slots"], t["query_start_loc"], True, 1.0, 20.0
        )
        t["core_attn_out"].copy_(out.view(t["core_attn_out"].shape))

    return run


def gates(t: "Tensors", problem: Problem) -> "tuple[torch.Tensor, torch.Tensor]":
    """(log decay, beta) in f32, as fla's callers compute them."""
    import torch

    spread = torch.nn.functional.softplus(t["a"].float() + t["dt_bias"].float())
    return -t["A_log"].exp() * spread, t["b"].float().sigmoid()


def prepare_fla_naive(problem: Problem, weights: "Tensors") -> "Run":
    """fla's recurrence in plain torch, q and k normed before."""
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    return _fla(problem, lambda q, k, v, g, beta, state: naive_recurrent_gated_delta_rule(
        eager_gdn.l2norm(q.float(), problem.mode("l2norm")), eager_gdn.l2norm(k.float(), problem.mode("l2norm")), v, beta, g,
        initial_state=state, output_final_state=True,
    ))  # fmt: skip


def prepare_fla_fused(problem: Problem, weights: "Tensors") -> "Run":
    """fla's Triton kernel, which norms q and k itself."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    return _fla(problem, lambda q, k, v, g, beta, state: fused_recurrent_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
    ))  # fmt: skip


def _fla(problem: Problem, step: Callable[..., Any]) -> "Run":
    g = problem.geometry
    ratio = g.v_heads // g.k_heads

    def run(t: "Tensors") -> None:
        q, k, v = split(problem, t["qkv"])
        q, k = (x.repeat_interleave(ratio, dim=1) for x in (q, k))
        slots = t["slots"].long()
        decay, beta = gates(t, problem)
        out, state = step(*(x[:, None] for x in (q, k, v, decay, beta)), t["ssm_state"][slots].float())
        t["core_attn_out"].copy_(out[:, 0])
        t["ssm_state"][slots] = state.to(t["ssm_state"].dtype)

    return run


# ---------------------------------------------------------------- beside ours, right or not

# vLLM's operation computes in bf16 what the contract keeps in f32; a step of bf16 is 2^16 ulp of f32, and a state's row may have
# two of them. Not a stage's budget, since nobody would promote such a kernel; but farther than this it would be wrong.
VLLM_SCALED_ULP = 2 * (1 << 16)


def distance(case: Case, got: "torch.Tensor", most: int) -> float:
    """Scaled ulp between a state after one call and the contract's; AssertionError beyond ``most``."""
    from replay.oracle.gdn import widen
    from replay.session.buffers import to_numpy

    stage = STAGES[case.problem.stage]
    inputs = stage.inputs(case)
    want, state = widen(stage.expected(case.problem, inputs)["ssm_state"]), widen(to_numpy(got))
    assert stage.row_scale is not None
    scale = np.maximum(np.abs(want), stage.row_scale(case.problem, inputs, "ssm_state", want))
    farthest = float((np.abs(state - want) / np.spacing(scale)).max())
    assert farthest <= most, f"state after one call: expected at most {most} scaled ulp, got {farthest:.0f}"
    return farthest


def main(batches: tuple[int, ...] = (1, 8, 32), blocks: int = 60) -> None:
    """Warm states, one set of tensors: what a call takes, vLLM's over ours. Their bits are judged by ``run``."""
    import torch
    from tabulate import tabulate

    from bench.self.peers import percent, time_arms
    from replay.devices import Device
    from replay.kernels.registry import registered
    from replay.session.arms import Arms
    from replay.session.plan import Asked, make_plan
    from replay.timing.estimate import median_interval

    torch.set_num_threads(2)
    ours = registered()["sycl:gdn.recurrent:heads"]
    rows = []
    for batch in batches:
        arms: dict[str, list[Callable[[], None]]] = {}
        off: dict[str, str] = {}
        for name, prepare, layout in (("vllm cpu", prepare_vllm, "k_v"), (ours.id, None, "v_k"), (ours.id + " k_v", None, "k_v")):
            asked = Asked(
                capture="qwen36-states-generated", route_layer_regex=r"layers\.0\.", stages=("gdn.recurrent",), max_cases=1,
                route_windows=(batch,), kernels=(ours.id,), modes={"state_layout": layout, "dt_bias": "bf16"}, processes=1,
            )  # fmt: skip
            (case,) = make_plan(asked).cases
            held = Arms(Device("cpu"))
            binding = held.binding(held.begin(case), {})
            run = prepare(case.problem, {}) if prepare else held.prepare(ours, {})
            arms[name] = [partial(run, binding.tensors)]
            run(binding.tensors)
            most = VLLM_SCALED_ULP if prepare else 0
            off[name] = f"{distance(case, binding.tensors['ssm_state'], most):.0f} of {most}"
        times = time_arms(arms, blocks, 7)
        for name, values in times.items():
            us = median_interval(values)
            ratio = percent(median_interval(times["vllm cpu"] / values))
            rows.append([batch, name, off[name], f"{us.mid:.0f} [{us.lo:.0f}, {us.hi:.0f}]", ratio])
    heads = ["sequences", "arm", "scaled ulp, at most", "time µs [95 %]", "vLLM's time / this one's"]
    print(tabulate(rows, heads, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
