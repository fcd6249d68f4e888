"""A cheat for a machine with an accelerator: its work is done on a stream that no event of ours is on.

``b70-replay run --capture qwen36-generated --stage moe.combine --device cuda --load tests/adversarial/side_stream.py --quick …``
must make its line INVALID (clock_disagrees); bench/results/h200/side-stream.txt holds such a run.
"""

import torch

from replay.kernels import eager
from replay.model import Kernel


def prepare(problem, weights):
    """moe.combine, elsewhere."""
    combine = eager.prepare_combine(problem, weights)
    aside = torch.Stream()

    def run(t):
        with aside:
            combine(t)

    return run


KERNELS = [Kernel(id="cheat:moe.combine:side_stream", prepare=":prepare", devices=("xpu", "cuda"))]
