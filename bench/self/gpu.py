"""Our Triton kernels beside other people's on a GPU, in interleaved blocks of one process: what a call takes in a graph of cold
calls.

    VLLM_FUSED_MOE=…/fused_moe.py python bench/self/gpu.py cuda FOLDER [--blocks 20]

A call's operands are those of a ring of bindings, so none of them is in a cache; a graph holds one call on each of 32, and is
replayed four times, the last three of which are timed together. Whoever cannot be captured is timed call by call, and says so.
Bits are judged by ``b70-replay run`` (bench/self/gpu.sh does both); here nothing is. Raw samples go to FOLDER/beside.json, the
table to the terminal.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.self import gdn_peers, moe_gpu_peers, topk_peers
from replay import data
from replay.devices import Device
from replay.kernels.registry import missing, registered
from replay.session.arms import Arms, Ring
from replay.session.plan import Asked, make_plan
from replay.stages import STAGES
from replay.timing.ceilings import Ceiling
from replay.timing.estimate import median_interval
from replay.timing.floors import floor_case

CALLS, REPLAYS = 32, 3
Call = Callable[[], object]
FILES = tuple(str(m.__file__) for m in (gdn_peers, moe_gpu_peers, topk_peers))


def graph_us(calls: Sequence[Call], blocks: int) -> list[float]:
    """µs of a call, a number a block: a replay of a graph of all of them."""
    replay = captured(calls)
    return [replay() for _ in range(blocks)]


def captured(calls: Sequence[Call]) -> Callable[[], float]:
    """A function that replays all calls in one graph and returns µs a call."""
    import torch

    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return lambda: _timed(graph.replay, len(calls))


def _timed(work: Call, count: int) -> float:
    """µs of one of ``count`` calls that ``work`` makes; it has just been done once, so clocks are up and what it needs is
    there."""
    import torch

    work()
    begin, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / (count * REPLAYS)


@dataclass
class Line:
    """One arm of a workload."""

    name: str
    replay: Callable[[], float]
    how: str = "graph"
    us: list[float] = field(default_factory=list)


def line(name: str, calls: Sequence[Call]) -> Line:
    """An arm as a graph, or call by call where it waits for the device."""
    try:
        return Line(name, captured(calls))
    except RuntimeError:  # an operation that cannot be captured
        return Line(name, lambda: _timed(lambda: [call() for call in calls], len(calls)), "calls")


@dataclass(frozen=True)
class Workload:
    """A case of a stage and the kernels that take it, the one that others are held against first."""

    asked: Mapping[str, Any]
    kernels: tuple[str, ...]
    more: Callable[[Any, Ring], Iterator[Line]] | None = None


def fla_alone(problem: Any, ring: Ring) -> Iterator[Line]:
    """fla's operation and nothing else: gates, heads and states are given to it as it wants them, and its states are its own."""
    if missing("python:fla"):
        return
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    def call(t: Mapping[str, Any]) -> Call:
        q, k, v = (x[:, None].contiguous() for x in gdn_peers.split(problem, t["qkv"]))
        decay, beta = (x[:, None] for x in gdn_peers._gates(t, problem))
        state = t["ssm_state"][t["slots"].long()].float().transpose(2, 3).contiguous()
        return lambda: fused_recurrent_gated_delta_rule(
            q, k, v, g=decay, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )

    yield line("fla fused_recurrent_gated_delta_rule, alone", [call(b.tensors) for b in ring.bindings[:CALLS]])


def of_torch(problem: Any, ring: Ring) -> Iterator[Line]:
    """torch's operation and nothing else."""
    logits = [b.tensors["logits"] for b in ring.bindings[:CALLS]]
    if problem.stage == "topk.greedy":
        yield line("torch.argmax, alone", [lambda x=x: x.argmax(1) for x in logits])  # type: ignore[misc]  # bound at once
        yield line("torch.topk(1), alone", [lambda x=x: x.topk(1, dim=1) for x in logits])  # type: ignore[misc]
    else:
        k = int(problem.mode("k"))
        yield line(f"torch.topk({k}), alone", [lambda x=x: x.topk(k, dim=1) for x in logits])  # type: ignore[misc]


def bytes_in_place(problem: Any, ring: Ring) -> Iterator[Line]:
    """The states' bytes changed in place, and fla's operation."""
    rows, live = [b.tensors["ssm_state"] for b in ring.bindings[:CALLS]], problem.rows
    yield line("torch.mul_ of as many bytes of state", [lambda x=x: x[:live].mul_(1.0) for x in rows])  # type: ignore[misc]
    yield from fla_alone(problem, ring)


def workloads() -> Iterator[Workload]:
    """What the table holds."""
    # Away from its manifest, which says that it is of TP4.
    routes = shutil.copy(data.path("captures") / "qwen36-generated" / "routes.jsonl", tempfile.mkdtemp())
    for tp in (4, 1):
        for tokens in (1, 4, 16):
            yield Workload(
                {"capture": routes, "model": "qwen36", "tp": tp, "route_layer_regex": r"layers\.9\.", "stages": ("moe.layer",),
                 "route_windows": (tokens,)},
                ("vllm:moe.layer:triton", "triton:moe.layer:halves", "triton:moe.layer:staged", "eager:moe.layer:gathered"),
            )  # fmt: skip
    for batch in (1, 8, 32):
        yield Workload(
            {"capture": "qwen36-tp1-states-generated", "stages": ("gdn.recurrent",), "route_windows": (batch,)},
            ("triton:gdn.recurrent:rows", "eager:gdn.recurrent"), bytes_in_place,
        )  # fmt: skip
    for shard in ("whole", "0/4"):
        for stage, kernel in (("topk.greedy", "triton:topk.greedy:single_pass"), ("topk.rows", "triton:topk.rows:groups")):
            modes = {"k": "50", "shard": shard} if stage == "topk.rows" else {}
            if stage == "topk.rows" or shard == "whole":
                logits = {"capture": "qwen36-logits-generated", "route_layer_regex": "lm_head"}
                eager = kernel.replace("triton", "eager").rpartition(":")[0]
                yield Workload({**logits, "stages": (stage,), "modes": modes}, (kernel, eager), of_torch)


def lines_of(work: Workload, device: Device) -> tuple[Any, Ring, list[Line]]:
    """(the case, its ring, its arms)."""
    asked = Asked(
        **{
            "modes": {},
            "kernels": work.kernels,
            "load": FILES,
            "max_cases": 1,
            "processes": 1,
            "device": device.name,
            **work.asked,
        }
    )
    (case,) = make_plan(asked).cases
    known, arms = registered(FILES), Arms(device)
    ring = Ring(arms, case, arms.begin(case), "cold-weights")
    made = []
    for name in work.kernels:
        runs = ring.runs(known[name])[:CALLS]
        made.append(line(name, [lambda run=run, t=t: run(t) for run, t in runs]))  # type: ignore[misc]  # bound at once
    made += work.more(case.problem, ring) if work.more else ()
    return case, ring, made


@click.command(help=__doc__)
@click.argument("device_name")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--blocks", default=20)
def main(device_name: str, folder: Path, blocks: int) -> None:
    """Print a table a workload, and keep the samples."""
    from tabulate import tabulate

    device = Device(device_name)
    ceilings = Ceiling(device, quick=True).measure()
    empty = line("empty", [device.empty_bytes(4).zero_] * CALLS)
    kept: dict[str, Any] = {"device": device.facts(), "blocks": blocks, "calls": CALLS, "us": {}}
    rng = np.random.default_rng(7)
    print(f"a call of torch.zero_ on four bytes: {np.median([empty.replay() for _ in range(blocks)]):.2f} µs")
    for work in workloads():
        case, ring, lines = lines_of(work, device)
        for _ in range(blocks):
            for number in rng.permutation(len(lines)):
                lines[number].us.append(lines[number].replay())
        floor = floor_case(STAGES[case.problem.stage].work(case.problem, ring.inputs), ceilings, "cold-weights")
        first, rows = np.array(lines[0].us), []
        for arm in lines:
            us, ratio = median_interval(np.array(arm.us)), median_interval(first / np.array(arm.us))
            rows.append([arm.name, arm.how, f"{us.mid:.2f} [{us.lo:.2f}, {us.hi:.2f}]", f"{us.mid / floor.us:.2f}",
                         f"{ratio.mid:.2f} [{ratio.lo:.2f}, {ratio.hi:.2f}]"])  # fmt: skip
        kept["us"][str(case.id)] = {arm.name: arm.us for arm in lines}
        print(f"\n{case.id}: floor {floor.us:.2f} µs = {floor.term}")
        print(
            tabulate(rows, ["arm", "as", "µs a call", "×floor", "the first one's time / this one's"], disable_numparse=True),
            flush=True,
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "beside.json").write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
