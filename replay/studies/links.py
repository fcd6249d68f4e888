"""What runs in a child: one kernel taking step after step, given back the states that it wrote."""

import contextlib
from collections.abc import Iterator
from multiprocessing.connection import Connection

from replay.devices import Device
from replay.model import Case, Kernel
from replay.session.arms import Arms
from replay.session.child import Done, Linked, begin, log_to, raised
from replay.stages.gdn_chain import carried, links
from replay.stages.stage import Outputs


def chain_main(
    pipe: Connection, kernel: Kernel, case: Case, steps: int, reset: str, device_name: str, load: tuple[str, ...], log: str
) -> None:
    """Take ``steps`` steps and send back what each one wrote."""
    log_to(log)
    with contextlib.suppress(BrokenPipeError):
        try:
            begin(load)
            for step in _steps(kernel, case, steps, reset, Device(device_name)):
                pipe.send(step)
        except Exception as error:  # the boundary to user code: whatever it raises is how its chain ended
            pipe.send(raised(0, error))
        pipe.send(Done())


def _steps(kernel: Kernel, case: Case, steps: int, reset: str, device: Device) -> Iterator[Linked]:
    arms = Arms(device)
    first = arms.begin(case)
    run, binding = arms.prepare(kernel, {}), arms.binding(first, {})
    before: Outputs | None = None
    for _, link in zip(range(steps), links(case, reset), strict=False):
        binding.pose({**link.inputs, **carried(case, reset, first, before)})
        run(binding.tensors)
        device.synchronize()
        before = binding.outputs()
        yield Linked(before, tuple(binding.trespasses()))
