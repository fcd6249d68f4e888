"""What runs in a child: one kernel taking step after step, given back the states that it wrote."""

import contextlib
from collections.abc import Iterator
from multiprocessing.connection import Connection

from replay.devices import Device
from replay.model import Case, Kernel
from replay.session.arms import Arms
from replay.session.child import Done, Linked, begin, loaded_files, log_to, raised
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
        pipe.send(Done(loaded_files()))


def _steps(kernel: Kernel, case: Case, steps: int, reset: str, device: Device) -> Iterator[Linked]:
    """Each step is taken twice, at two sets of addresses: who keeps a state of his own has it a step ahead the second time."""
    arms = Arms(device)
    first = arms.begin(case)
    run, bindings = arms.prepare(kernel, {}), [arms.binding(first, {}) for _ in range(2)]
    before: Outputs | None = None
    for _, link in zip(range(steps), links(case, reset), strict=False):
        given = {**link.inputs, **carried(case, reset, first, before)}
        calls, trespasses = [], []
        for binding in bindings:
            binding.pose(given)
            run(binding.tensors)
            device.synchronize()
            calls.append(binding.outputs())
            if found := binding.trespasses():
                trespasses += [t for t in found if t not in trespasses]
                binding.mend()
        before = calls[0]
        yield Linked(calls[0], calls[1], tuple(trespasses))
