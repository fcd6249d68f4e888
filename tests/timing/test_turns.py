"""Processes that share a schedule do its steps one after another, each its own."""

import multiprocessing
import threading

import numpy as np

from replay.timing.turns import Seat, Turns


def test_every_step_is_done_once_and_in_order() -> None:
    """Three seats walk through 300 steps that belong to one of them each; nobody's step begins before the last is done."""
    turns = Turns(multiprocessing.get_context("spawn"), 3)
    owners = np.random.default_rng(1).integers(0, 3, 300)
    done: list[tuple[int, int]] = []
    at_work = threading.Lock()

    def walk(number: int) -> None:
        seat = Seat(turns, number)
        for step, owner in enumerate(owners):
            with seat.turn(int(owner)) as mine:
                assert mine == (owner == number)
                if mine:
                    assert at_work.acquire(blocking=False), "two seats at once"
                    done.append((step, number))
                    at_work.release()

    threads = [threading.Thread(target=walk, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert done == [(step, int(owner)) for step, owner in enumerate(owners)]


def test_a_case_begins_when_all_steps_before_are_done() -> None:
    """The index that a death is charged to is that of the step being done, however far another seat has walked."""
    turns = Turns(multiprocessing.get_context("spawn"), 2)
    first, second = Seat(turns, 0), Seat(turns, 1)
    first.begin_case(4)
    second.begin_case(4)  # passes by: it is not the first
    with first.turn(1) as mine:
        assert not mine
    walker = threading.Thread(target=first.begin_case, args=(5,))  # waits for the other's step
    walker.start()
    walker.join(0.1)
    assert turns.case.value == 4
    with second.turn(1) as mine:
        assert mine
    walker.join(30)
    assert turns.case.value == 5
    assert first.since_ns() > 0
