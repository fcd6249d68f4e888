"""One cold call of the recurrence in Triton for a profiler: what bounds it.

ncu --clock-control none --kernel-name recurrent --launch-skip 1 --launch-count 1 --section SpeedOfLight --section Occupancy
    --section MemoryWorkloadAnalysis python bench/self/gdn_profile.py 32
"""

import sys

from replay.devices import Device
from replay.kernels.registry import registered
from replay.session.arms import Arms
from replay.session.plan import Asked, make_plan

KERNEL = "triton:gdn.recurrent:rows"


def main(batch: int) -> None:
    """Two calls, each on states of its own; the first one compiles."""
    device = Device("cuda")
    asked = Asked(
        capture="qwen36-tp1-states-generated", stages=("gdn.recurrent",), route_windows=(batch,), kernels=(KERNEL,), modes={},
        max_cases=1, processes=1, device=device.name,
    )  # fmt: skip
    (case,) = make_plan(asked).cases
    arms = Arms(device)
    inputs = arms.begin(case)
    run = arms.prepare(registered()[KERNEL], {})
    for binding in [arms.binding(inputs, {}) for _ in range(2)]:
        device.flush()
        run(binding.tensors)
        device.synchronize()


if __name__ == "__main__":
    main(int(sys.argv[1]))
