"""What runs in the processes that time: the green kernels of each case together, in blocks.

Usually it is one process. Where arms cannot share one, each of several does the steps of the schedule that are its own.
"""

import contextlib
import gc
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from replay.devices import Device
from replay.kernels.registry import Run, load_file
from replay.model import Case
from replay.session.arms import Arms, Ring
from replay.session.child import Ceiled, Done, Looked, Sampled, Started, begin, loaded_files, log_to
from replay.stages import STAGES
from replay.timing import spans, watch
from replay.timing.ceilings import Ceiling
from replay.timing.spans import Arm, Options, Place, Timer
from replay.timing.turns import Seat, Turns

Job = tuple[Case, tuple[Arm, ...]]
FIRST = 0  # the seat that measures ceilings and watches what goes on beside


def time_main(
    pipe: Connection, turns: Turns, number: int, jobs: tuple[Job, ...], device_name: str, options: Options, load: tuple[str, ...],
    log: str,
) -> None:  # fmt: skip
    """Time the arms of each case that sit at ``number``; ``load`` are the files that their kernels come from."""
    log_to(log)
    seat = Seat(turns, number)
    with contextlib.suppress(BrokenPipeError):
        begin(())
        for mine in seat.all_in_turn():  # what one imports and prepares is not to be heard in another's ceilings
            if mine:
                place, arms, ceilings = _ready(device_name, options, seat, load)
        with seat.turn(FIRST) as mine:
            if mine and ceilings:
                pipe.send(Ceiled("before", ceilings.measure()))
                watching = watch.begin(place.telemetry)
                before = ceilings.memory()
        waiting: list[Sampled] = []  # for the memory ceilings behind them
        for index, job in enumerate(jobs):
            pipe.send(Started(index))
            waiting.append(_sampled(place, arms, job, index))
            with seat.turn(FIRST) as mine:
                if mine and ceilings and (ceilings.due() or job is jobs[-1]):
                    after = ceilings.memory()
                    waiting, before = [replace(sampled, memory=(before, after)) for sampled in waiting], after
            for mine in seat.all_in_turn():  # what is sent moves memory as well
                if mine and (not ceilings or waiting[-1].memory):
                    while waiting:
                        pipe.send(waiting.pop(0))
        with seat.turn(FIRST) as mine:
            if mine and ceilings:
                pipe.send(Looked(watching.until_now()))
                pipe.send(Ceiled("after", ceilings.measure()))
        for mine in seat.all_in_turn():
            if mine:
                pipe.send(Done(loaded_files()))


def _ready(device_name: str, options: Options, seat: Seat, load: tuple[str, ...]) -> tuple[Place, Arms, Ceiling | None]:
    """What a process has before it times: its place, and for the first one the ceilings."""
    for file in load:
        load_file(file)
    device = Device(device_name)
    place, arms = Place.on(device, options, seat), Arms(device)
    ceilings = Ceiling(device, quick=options.quick) if seat.number == FIRST else None
    gc.collect()
    gc.freeze()  # torch and all that was imported: a collection before each case need not walk through it
    return place, arms, ceilings


def _sampled(place: Place, arms: Arms, job: Job, index: int) -> Sampled:
    """What came of one case in this process."""
    case, named = job
    place.seat.begin_case(index)
    for mine in place.seat.all_in_turn():
        if mine:
            timer, prepared = _prepared(place, arms, case, named)
    samples, outputs = timer.blocks(str(case.id))
    second = timer.answers(lambda: STAGES[case.problem.stage].inputs(case.twinned("second")))
    return Sampled(index, samples, outputs, second, prepared | timer.trespasses)


def _prepared(place: Place, arms: Arms, case: Case, named: tuple[Arm, ...]) -> tuple[Timer, dict[str, str]]:
    """The timer of a case, with this process's arms prepared, and what any of them did that it must not."""
    device, options = place.device, place.options
    runs: dict[str, list[tuple[Run, dict[str, Any]]]] = {arm.name: [] for arm in named if arm.seat == place.seat.number}
    if not runs:
        return Timer(place, None, named, runs, ()), {}
    ring = Ring(arms, case, arms.begin(case), options.cache)
    found: dict[str, str] = {}
    threads = device.threads()
    # In another order in every process: what is prepared first lies elsewhere in memory, and two copies of one kernel then
    # differ by half a percent, the same way each time.
    for number in spans.generator(f"prepare/{case.id}", options).permutation(len(named)):
        arm = named[number]
        if arm.name in runs:
            place.seat.turns.arm.value = number
            runs[arm.name] = ring.runs(arm.kernel)
            if changed := spans.put_back(device, threads):
                found[arm.name] = changed
    flags = () if ring.cold_on(len(ring.bindings)) else (spans.NOT_COLD,)
    return Timer(place, ring, named, runs, flags), found
