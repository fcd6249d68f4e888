"""Cheats for a machine with an accelerator: their work is done on a stream that no event of ours is on.

``b70-replay run --capture qwen36-generated --stage moe.combine --device cuda --load tests/adversarial/side_stream.py --quick …``
must make those that work ahead FAIL, and the other no faster than it is; bench/results/h200/side-stream.txt holds such a run.
"""

import torch

from replay.kernels import eager
from replay.model import Kernel


def ahead(problem, weights):
    """Does its work while the lead runs: it is done before the clock starts."""
    combine = eager.prepare_combine(problem, weights)
    aside = torch.Stream()

    def run(t):
        with aside:
            combine(t)

    return run


def behind(problem, weights):
    """Waits for what was queued before it, and nobody waits for it: what is done after the clock has stopped is a FAIL."""
    combine = eager.prepare_combine(problem, weights)
    aside = torch.Stream()

    def run(t):
        aside.wait_stream(torch.accelerator.current_stream())
        with aside:
            combine(t)

    return run


def secretly(problem, weights):
    """Works ahead into a tensor of its own, and only copies from there when it is its turn."""
    combine = eager.prepare_combine(problem, weights)
    aside = torch.Stream()

    def run(t):
        own = torch.empty_like(t["out"])
        with aside:
            combine({**t, "out": own})
        t["out"].copy_(own)

    return run


NAMES = ("ahead", "behind", "secretly")
KERNELS = [Kernel(id=f"cheat:moe.combine:{name}", prepare=f":{name}", devices=("xpu", "cuda")) for name in NAMES]
