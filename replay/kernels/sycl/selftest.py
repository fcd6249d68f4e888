"""Run the self-test kernels of ``sycl/selftest.cpp``: arrays in, arrays out; what they should be is not this room's to say."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from replay.devices import Device
from replay.kernels.sycl.runtime import Program

Array = NDArray[np.generic]


def answer(device: Device, kernel: str, inputs: Sequence[Array], outputs: Mapping[str, str], group: int = 64) -> dict[str, Array]:
    """One launch of ``kernel`` over as many items as its inputs have elements; ``outputs``: name → numpy dtype."""
    import torch

    items = len(inputs[0])
    given = {f"in{i}": torch.from_numpy(array.view(_carrier(array.dtype))).to(device.name) for i, array in enumerate(inputs)}
    made = {n: torch.from_numpy(np.zeros(items, _carrier(np.dtype(d)))).to(device.name) for n, d in outputs.items()}
    program = Program(device.kind).add("selftest", kernel, (items,), (group,), *given, *made)
    program.run({**given, **made})
    device.synchronize()
    return {n: made[n].cpu().numpy().view(dtype) for n, dtype in outputs.items()}


def _carrier(dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """torch carries 16-bit patterns as int16."""
    return np.dtype(np.int16) if dtype == np.uint16 else dtype
