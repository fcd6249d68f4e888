"""Our SYCL MoE layers beside vLLM's CPU fused MoE, in interleaved blocks of one process.

    python bench/self/peers.py [--tokens 1,16] [--blocks 30]

Runs in an environment that holds vLLM's CPU build and this package (docs/moe.md says how to make one). Same shapes, same
captured routes, cold weights on both sides: experts relabelled onto disjoint slots. vLLM's kernel computes in bf16
weights and activations, ours in int8 with bf16 between; so this compares what an engine would wait for, not bits. Each
block holds one span of every arm in random order; a line's ratio is the median over blocks, with its 95 % interval.
"""

from collections.abc import Callable, Mapping
from time import perf_counter_ns, sleep
from typing import Any

import click
import numpy as np

from replay.captures import Select, cases, locate, open_capture
from replay.devices import Device
from replay.kernels.registry import registered
from replay.model import Case, Interval, preset
from replay.oracle.moe import ExpertRows
from replay.session.arms import Arms, Ring
from replay.session.buffers import to_torch
from replay.stages import STAGES, problem_for
from replay.timing.ceilings import Ceiling
from replay.timing.estimate import median_interval
from replay.timing.floors import floor_case

OURS = ("sycl:moe.layer:staged", "sycl:moe.layer:fused_prologue_offsets", "sycl:moe.layer:full_layerlet")
MIN_SPAN_NS = 1_000_000
POOL_SLEEP_S = 0.003

Calls = list[Callable[[], Any]]


def vllm_calls(ring: Ring, inputs: Mapping[str, Any]) -> Calls:
    """One call of vLLM's fused MoE per binding of the ring; weights dequantised to bf16, [E, N, K], prepacked."""
    import torch
    from vllm import _custom_ops as ops

    assert ring.slots is not None
    tables = []
    for name in ("w13", "w2"):
        rows, scales = inputs[name], inputs[f"{name}_scale"]
        assert isinstance(rows, ExpertRows)
        wide = to_torch(rows.rows, "i8").float() * to_torch(scales.rows, "f32")[:, None, :]
        active = wide.transpose(1, 2).to(torch.bfloat16).contiguous()
        table = active[torch.arange(rows.total) % len(active)].contiguous()
        tables.append(ops.cpu_prepack_moe_weight(table, "vec"))
    w13, w2 = tables

    def call(t: Mapping[str, Any]) -> Callable[[], Any]:
        args = (t["x"], w13, w2, None, None, t["topk_weights"], t["topk_ids"], "silu", "vec", False)
        return lambda: ops.cpu_fused_moe(t["out"], *args)

    return [call(binding.tensors) for binding in ring.bindings]


def time_arms(arms: Mapping[str, Calls], blocks: int, seed: int) -> dict[str, np.ndarray]:
    """µs a call per arm and block."""
    rng = np.random.default_rng(seed)
    position, per_span = 0, {}

    def span(arm: str, calls: int) -> float:
        nonlocal position
        # The other arm's thread pool spins for a while after its work; let it go to sleep, and wake this arm's.
        sleep(POOL_SLEEP_S)
        arms[arm][position % len(arms[arm])]()
        position += 1
        todo = [arms[arm][(position + i) % len(arms[arm])] for i in range(calls)]
        position += calls
        begin = perf_counter_ns()
        for call in todo:
            call()
        return (perf_counter_ns() - begin) / calls

    for arm in arms:
        once = min(span(arm, 1) for _ in range(20))
        per_span[arm] = int(np.clip(MIN_SPAN_NS // once, 1, 16))
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(blocks):
        for i in rng.permutation(len(arms)):
            arm = list(arms)[int(i)]
            found[arm].append(span(arm, per_span[arm]) / 1e3)
    return {arm: np.array(values) for arm, values in found.items()}


def drawn_cases(tokens: int) -> list[Case]:
    """Four cases of the shipped capture's layer 9."""
    stage, geometry = STAGES["moe.layer"], preset("qwen36", 4)
    select = Select(layer_regex=r"layers\.9\.", windows=(tokens,), max_cases=4)
    return list(cases(open_capture(locate("qwen36-generated")), select, geometry, lambda g, n: problem_for(stage, g, n, {}), 7))


def percent(i: Interval) -> str:
    """vLLM's time over ours, with its interval."""
    return f"{i.mid:.2f}× [{i.lo:.2f}, {i.hi:.2f}]"


@click.command()
@click.option("--tokens", default="1,16", show_default=True)
@click.option("--blocks", default=30, show_default=True)
def main(tokens: str, blocks: int) -> None:
    """Measure and print one table per token count."""
    import torch
    from tabulate import tabulate

    torch.set_num_threads(2)
    device = Device("cpu")
    kernels = registered()
    ceilings = Ceiling(device, quick=False).measure()
    print(f"read ceiling {ceilings.read_gbs.mid:.0f} GB/s [{ceilings.read_gbs.lo:.0f}, {ceilings.read_gbs.hi:.0f}]")
    for count in map(int, tokens.split(",")):
        times: dict[str, list[np.ndarray]] = {}
        floors = []
        for case in drawn_cases(count):
            arms = Arms(device)
            inputs = arms.begin(case)
            ring = Ring(arms, case, inputs, "cold-weights")
            calls: dict[str, Calls] = {"vllm cpu_fused_moe bf16": vllm_calls(ring, inputs)}
            for name in OURS:
                calls[name] = [lambda run=run, t=t: run(t) for run, t in ring.runs(kernels[name])]  # type: ignore[misc]  # bound now
            for arm, values in time_arms(calls, blocks, 7).items():
                times.setdefault(arm, []).append(values)
            floors.append(floor_case(STAGES["moe.layer"].work(case.problem, inputs), ceilings, "cold-weights").us)
        joined = {arm: np.concatenate(values) for arm, values in times.items()}
        peer = joined["vllm cpu_fused_moe bf16"]
        rows = []
        for arm, values in joined.items():
            us = median_interval(values)
            ratio = percent(median_interval(peer / values))
            rows.append([arm, f"{us.mid:.0f} [{us.lo:.0f}, {us.hi:.0f}]", f"{us.mid / np.mean(floors):.2f}", ratio])
        print(f"\nmoe.layer, qwen36 tp4, {count} tokens, cold weights, int8 floor {np.mean(floors):.0f} µs")
        print(
            tabulate(
                rows, ["arm", "time µs [95 %]", "×floor", "vLLM's time / this one's"], tablefmt="github", disable_numparse=True
            )
        )


if __name__ == "__main__":
    main()
