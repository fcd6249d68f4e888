"""torch's own argmax and topk as kernels: judged like any other, and timed beside ours, right or not.

    b70-replay run --logits qwen36-logits-generated --route-layer-regex lm_head --load bench/self/topk_peers.py --kernel 'torch:*'
    python bench/self/topk_peers.py [--blocks 60]

Both pick a NaN, and topk knows nothing of lengths and of −1: they are red on edges. The table of times is of what they take all
the same.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from replay.model import Kernel, Problem

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]
    Run = Callable[[Tensors], None]


def _peer(stage: str, name: str) -> Kernel:
    return Kernel(id=f"torch:{stage}:{name}", prepare=f":prepare_{name}", devices=("cpu", "cuda", "xpu"))


KERNELS = (_peer("topk.greedy", "argmax"), _peer("topk.rows", "topk"))


def prepare_argmax(problem: Problem, weights: "Tensors") -> "Run":
    """argmax, and the token where the next step reads it."""

    def run(t: "Tensors") -> None:
        token = t["logits"].argmax(1)
        t["token"].copy_(token)
        real = t["slots"] >= 0
        t["next_input_ids"][t["slots"][real].long()] = token[real]

    return run


def prepare_topk(problem: Problem, weights: "Tensors") -> "Run":
    """topk, of whole rows."""
    k = int(problem.mode("k"))

    def run(t: "Tensors") -> None:
        t["indices"].copy_(t["logits"].topk(k, dim=1)[1])

    return run


Calls = dict[str, list[Callable[[], object]]]


def arms_of(rows: int, ks: tuple[int, ...]) -> Calls:
    """A call of nothing, of torch's operations and of our kernels, each on logits of so many captured rows."""
    import torch

    from replay.devices import Device
    from replay.kernels.registry import registered
    from replay.kernels.sycl.runtime import Program
    from replay.session.arms import Arms
    from replay.session.plan import Asked, make_plan

    cell = torch.zeros(1, dtype=torch.int64)
    nothing = Program("cpu").add("bandwidth", "launch_nothing", (1,), (1,), "cell")
    arms: Calls = {"empty launch": [partial(nothing.run, {"cell": cell})]}
    kernels = {"topk.greedy": "sycl:topk.greedy:single_pass", "topk.rows": "sycl:topk.rows:select"}
    for stage, k in (("topk.greedy", 1), *(("topk.rows", k) for k in ks)):
        asked = Asked(
            capture="qwen36-logits-generated", route_layer_regex="lm_head", stages=(stage,), route_windows=(rows,),
            kernels=(kernels[stage],), modes={} if stage == "topk.greedy" else {"k": str(k)}, processes=1, max_cases=1,
        )  # fmt: skip
        (case,) = make_plan(asked).cases
        held = Arms(Device("cpu"))
        tensors = held.binding(held.begin(case), {}).tensors
        logits, run = tensors["logits"], held.prepare(registered()[kernels[stage]], {})
        if stage == "topk.greedy":
            arms |= {"torch.amax": [partial(logits.amax, 1)], "torch.argmax": [partial(logits.argmax, 1)]}
            arms[kernels[stage]] = [partial(run, tensors)]
        else:
            arms |= {f"torch.topk({k})": [partial(logits.topk, k, 1)], f"{kernels[stage]} k={k}": [partial(run, tensors)]}
    return arms


def main(blocks: int = 60, windows: tuple[int, ...] = (1, 4), ks: tuple[int, ...] = (20, 64, 2048)) -> None:
    """One table: what a call takes, and over ``amax + launch``: the rows read once by torch, and a SYCL launch of nothing and its
    wait, in the same blocks."""
    import torch
    from tabulate import tabulate

    from bench.self.peers import time_arms
    from replay.timing.estimate import median_interval

    torch.set_num_threads(2)
    lines = []
    for rows in windows:
        times = time_arms(arms_of(rows, ks), blocks, 7)
        least = times["torch.amax"] + times["empty launch"]
        for name, values in times.items():
            us, over = median_interval(values), median_interval(values / least)
            ratio = f"{over.mid:.2f}× [{over.lo:.2f}, {over.hi:.2f}]"
            lines.append([rows, name, f"{us.mid:.0f} [{us.lo:.0f}, {us.hi:.0f}]", ratio])
    print(tabulate(lines, ["rows", "arm", "time µs [95 %]", "over amax + launch"], tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
