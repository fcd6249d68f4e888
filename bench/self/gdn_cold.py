"""Where the time of the recurrence goes on a CPU: warm, cold, and the same cold bytes changed in place with no arithmetic.

python bench/self/gdn_cold.py
"""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns

import numpy as np

from replay.devices import Device
from replay.kernels.probes import memory, waker
from replay.kernels.registry import registered
from replay.session.arms import Arms
from replay.session.plan import Asked, make_plan

KERNEL, TIMES = "sycl:gdn.recurrent:heads", 60


def median_us(device: Device, calls: Sequence[Callable[[], object]], wake: Callable[[], object], *, cold: bool) -> float:
    """µs of one call, each on the next of some bindings."""
    found = []
    for number in range(TIMES):
        if cold:
            device.flush()
        wake()
        begin = perf_counter_ns()
        calls[number % len(calls)]()
        found.append(perf_counter_ns() - begin)
    return float(np.median(found)) / 1e3


def main() -> None:
    """One line a batch."""
    device, kernel = Device("cpu"), registered()[KERNEL]
    wake = waker(device)
    for batch in (1, 8, 32):
        asked = Asked(
            capture="qwen36-states-generated", route_layer_regex=r"layers\.0\.", stages=("gdn.recurrent",), max_cases=1,
            route_windows=(batch,), kernels=(KERNEL,), modes={}, processes=1,
        )  # fmt: skip
        (case,) = make_plan(asked).cases
        arms = Arms(device)
        inputs = arms.begin(case)
        run = arms.prepare(kernel, {})
        bindings = [arms.binding(inputs, {}) for _ in range(4)]
        calls = [partial(run, b.tensors) for b in bindings]
        nbytes = batch * case.problem.geometry.v_heads * case.problem.geometry.head_dim**2 * 4
        inplace = [p.call for p in memory(device, nbytes) if p.name == "torch.bitwise_not_"]
        warm, cold = (median_us(device, c, wake, cold=is_cold) for c, is_cold in ((calls[:1], False), (calls, True)))
        alone = median_us(device, inplace, wake, cold=True)
        print(f"{batch:2} sequences: warm {warm:.0f} µs, cold {cold:.0f} µs; {nbytes >> 10} KiB in place, cold {alone:.0f} µs")


if __name__ == "__main__":
    main()
