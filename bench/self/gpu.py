"""Our Triton kernels beside other people's on a GPU, in interleaved blocks of one process: what a call takes in a graph of calls.

    VLLM_FUSED_MOE=…/fused_moe.py PYTHONPATH=. python bench/self/gpu.py cuda FOLDER [--blocks 20]

A graph holds a call on each of so many bindings that weights, or states, pass the last-level cache three times: those are cold.
Logits are not, since the head has just written them. It is replayed four times, the last three of which are timed together.
Whoever cannot be captured is timed call by call, and says so. Bits are judged by ``b70-replay run`` (bench/self/gpu.sh does
both); here nothing is. Raw samples go to FOLDER/beside.json, the table to the terminal.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.self import gdn_peers, moe_gpu_peers, topk_peers
from replay import data
from replay.devices import CACHE_PASSES, Device
from replay.errors import InputError, ReplayError
from replay.kernels.registry import missing, registered
from replay.kernels.triton import launch
from replay.model import Floor, Kernel
from replay.oracle.moe import ExpertRows
from replay.session.arms import Arms, Ring
from replay.session.plan import Asked, make_plan
from replay.stages import STAGES
from replay.timing.ceilings import Ceiling
from replay.timing.estimate import median_interval
from replay.timing.floors import floor_case

LEAST_CALLS, REPLAYS = 8, 3
Call = Callable[[], object]
FILES = tuple(str(m.__file__) for m in (gdn_peers, moe_gpu_peers, topk_peers))


def graph_us(calls: Sequence[Call], blocks: int) -> list[float]:
    """µs of a call, a number a block: replays of a graph of all of them."""
    for call in calls:
        call()
    replay = captured(calls)
    return [replay() for _ in range(blocks)]


def captured(calls: Sequence[Call]) -> Callable[[], float]:
    """A function that replays all calls, which have been made before, in one graph and returns µs a call."""
    import torch

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
    for call in calls:
        call()
    try:
        return Line(name, captured(calls))
    except RuntimeError:  # an operation that cannot be captured
        return Line(name, lambda: _timed(lambda: [call() for call in calls], len(calls)), "calls")


@dataclass(frozen=True)
class Workload:
    """A case of a stage and the kernels that take it, the one that others are held against first."""

    asked: Mapping[str, Any]
    kernels: tuple[str, ...]
    more: "Callable[[Posed], Iterator[Line]] | None" = None


class Posed:
    """A workload's case on a device, on as many bindings as make what is cold cold."""

    def __init__(self, work: Workload, device: Device) -> None:
        asked: dict[str, Any] = {"modes": {}, "kernels": work.kernels, "load": FILES, "max_cases": 1, "processes": 1}
        (self.case,) = make_plan(Asked(**asked | {"device": device.name, **work.asked})).cases
        self.problem, self.arms = self.case.problem, Arms(device)
        self.inputs = self.arms.begin(self.case)
        self.work = STAGES[self.problem.stage].work(self.problem, self.inputs)
        self.ring: Ring | None = None
        goal = CACHE_PASSES * device.llc_bytes()
        if any(isinstance(t, ExpertRows) for t in self.inputs.values()):
            self.ring = Ring(self.arms, self.case, self.inputs, "cold-weights")
            self.count = min(max(-(-goal // self.ring.set_bytes), LEAST_CALLS), len(self.ring.bindings))
            bindings = self.ring.bindings[: self.count]
            self.told = f"{self.count} calls on {self.count * self.ring.set_bytes >> 20} MiB of weights, cold"
            assert self.count * self.ring.set_bytes >= goal, "the ring is too small for weights that are cold"
        else:
            cold = self.work.read_bytes
            self.count = max(-(-goal // cold), LEAST_CALLS) if cold else 4 * LEAST_CALLS
            bindings = [self.arms.binding(self.inputs, {}) for _ in range(self.count)]
            what = f"{self.count * cold >> 20} MiB of states, cold" if cold else "inputs that lie in the cache"
            self.told = f"{self.count} calls on {what}"
        self.tensors = [b.tensors for b in bindings]

    def line(self, kernel: Kernel, name: str = "") -> Line:
        """A kernel of the registry as an arm."""
        if self.ring:
            runs = self.ring.runs(kernel)[: self.count]
        else:
            run = self.arms.prepare(kernel, {})
            runs = [(run, dict(t)) for t in self.tensors]
        return line(name or kernel.id, [partial(run, t) for run, t in runs])


def one_after_the_other(posed: Posed) -> Iterator[Line]:
    """Our five launches without any that begins early, as other people's are launched."""
    launch.EARLY = False
    try:
        yield posed.line(registered(FILES)["triton:moe.layer:staged"], "triton:moe.layer:staged, no launch early")
    finally:
        launch.EARLY = True


def fla_alone(posed: Posed) -> Iterator[Line]:
    """fla's operation and nothing else: gates, heads and states are given to it as it wants them, and its states are its own."""
    if missing("python:fla"):
        return
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    def call(t: Mapping[str, Any]) -> Call:
        q, k, v = (x[:, None].contiguous() for x in gdn_peers.split(posed.problem, t["qkv"]))
        decay, beta = (x[:, None] for x in gdn_peers.gates(t, posed.problem))
        state = t["ssm_state"][t["slots"].long()].float().transpose(2, 3).contiguous()
        return partial(
            fused_recurrent_gated_delta_rule, q, k, v, g=decay, beta=beta, initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    yield line("fla fused_recurrent_gated_delta_rule, alone", [call(t) for t in posed.tensors])


def of_torch(posed: Posed) -> Iterator[Line]:
    """torch's operation and nothing else."""
    # A router's logits have another name, and there is no one operation of torch's for them.
    logits = [t["logits"] for t in posed.tensors if "logits" in t]
    if posed.problem.stage == "topk.greedy":
        yield line("torch.argmax, alone", [partial(x.argmax, 1) for x in logits])
        yield line("torch.topk(1), alone", [partial(x.topk, 1, dim=1) for x in logits])
    elif posed.problem.stage == "topk.rows":
        k = int(posed.problem.mode("k"))
        yield line(f"torch.topk({k}), alone", [partial(x.topk, k, dim=1) for x in logits])


def bytes_in_place(posed: Posed) -> Iterator[Line]:
    """The states' bytes changed in place, and fla's operation."""
    rows, live = [t["ssm_state"] for t in posed.tensors], posed.problem.rows
    yield line("torch.mul_ of as many bytes of state", [partial(x[:live].mul_, 1.0) for x in rows])
    yield from fla_alone(posed)


def workloads(folder: Path) -> Iterator[Workload]:
    """What the table holds; ``folder`` keeps routes away from their manifest, which says that they are of TP4."""
    routes = str(shutil.copy(data.path("captures") / "qwen36-generated" / "routes.jsonl", folder))
    ours = ("triton:moe.layer:halves", "triton:moe.layer:staged", "eager:moe.layer:gathered")
    for tp in (4, 1):
        for tokens in (1, 4, 16):
            asked = {"capture": routes, "model": "qwen36", "tp": tp, "stages": ("moe.layer",)}
            selected = {"route_layer_regex": r"layers\.9\.", "route_windows": (tokens,)}
            # For more tokens vLLM sorts pairs by expert and shares weights, in an operation of its own.
            theirs = ("vllm:moe.layer:triton",) if tokens * 8 * moe_gpu_peers.SPARSITY <= 256 else ()
            yield Workload(asked | selected, (*theirs, *ours), one_after_the_other)
    for batch in (1, 8, 32):
        states = {"capture": "qwen36-tp1-states-generated", "stages": ("gdn.recurrent",), "route_windows": (batch,)}
        yield Workload(states, ("triton:gdn.recurrent:rows", "eager:gdn.recurrent"), bytes_in_place)
    logits = {"capture": "qwen36-logits-generated", "route_layer_regex": "lm_head"}
    for stage, kernel, modes in (
        ("topk.greedy", "single_pass", {}),
        ("topk.rows", "groups", {"k": "50"}),
        ("topk.rows", "groups", {"k": "50", "shard": "0/4"}),
        ("topk.router", "rows", {}),
    ):
        yield Workload({**logits, "stages": (stage,), "modes": modes}, (f"triton:{stage}:{kernel}", f"eager:{stage}"), of_torch)


@click.command(help=__doc__)
@click.argument("device_name")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--blocks", type=click.IntRange(5), default=20)
def main(device_name: str, folder: Path, blocks: int) -> None:
    """Print a table a workload, and keep the samples."""
    try:
        if not device_name.startswith("cuda"):
            raise InputError("gpu.py", "DEVICE", "cuda or cuda:N, whose graphs and events these are", device_name)
        measure(Device(device_name), folder, blocks)
    except ReplayError as error:
        click.echo(error, err=True)
        sys.exit(error.exit_code)


def measure(device: Device, folder: Path, blocks: int) -> None:
    """Every workload, its arms interleaved."""
    moe_gpu_peers.fused_moe_kernel()  # what is missing is told before anything is measured
    ceilings = Ceiling(device, quick=True).measure()
    empty = line("empty", [device.empty_bytes(4).zero_] * LEAST_CALLS)
    kept: dict[str, Any] = {"device": device.facts(), "blocks": blocks, "us": {}}
    rng = np.random.default_rng(7)
    print(f"a call of torch.zero_ on four bytes: {np.median([empty.replay() for _ in range(blocks)]):.2f} µs")
    with tempfile.TemporaryDirectory() as made:
        for work in workloads(Path(made)):
            posed = Posed(work, device)
            known = registered(FILES)
            arms = [posed.line(known[name]) for name in work.kernels] + list(work.more(posed) if work.more else ())
            for _ in range(blocks):
                for number in rng.permutation(len(arms)):
                    arms[number].us.append(arms[number].replay())
            kept["us"][str(posed.case.id)] = {"calls": posed.count, **{arm.name: arm.us for arm in arms}}
            print(table(posed, arms, floor_case(posed.work, ceilings, "cold-weights")), flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "beside.json").write_text(json.dumps(kept, indent=1))


def table(posed: Posed, arms: Sequence[Line], floor: Floor) -> str:
    """A line an arm."""
    from tabulate import tabulate

    first, rows = np.array(arms[0].us), []
    for arm in arms:
        us, ratio = median_interval(np.array(arm.us)), median_interval(first / np.array(arm.us))
        times = f"{us.mid:.2f} [{us.lo:.2f}, {us.hi:.2f}]", f"{us.mid / floor.us:.2f}"
        rows.append([arm.name, arm.how, *times, f"{ratio.mid:.2f} [{ratio.lo:.2f}, {ratio.hi:.2f}]"])
    heads = ["arm", "as", "µs a call", "×floor", "the first one's time / this one's"]
    title = f"{posed.case.id}: {posed.told}; floor {floor.us:.2f} µs = {floor.term}"
    return f"\n{title}\n{tabulate(rows, heads, disable_numparse=True)}"


if __name__ == "__main__":
    main()
