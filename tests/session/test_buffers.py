"""Buffers: fresh addresses, guards on both sides, poison, strides and offsets."""

import numpy as np
import pytest
import torch

from replay.devices import Device
from replay.model import Spec
from replay.session.arms import HOT_RING, WARM_SHARE, Arms, Ring
from replay.session.buffers import POISON_BYTES, Binding, Guarded, Tables, Use, all_intact, bind, checksum, to_torch
from replay.stages import STAGES
from tests.conftest import STATE_FOLDER, make_case
from tests.topk import logit_case

CPU = Device("cpu")


@pytest.mark.parametrize(
    "spec", [Spec("y", "out", (3, 5), "bf16"), Spec("y", "out", (3, 5), "f32", (9, 1), 7), Spec("y", "out", (0, 5), "i64")]
)
def test_guards_see_one_byte_on_either_side(spec: Spec) -> None:
    """Intact while only elements are written; broken by the byte before and the byte behind."""
    buffer = Guarded(spec, CPU)
    buffer.tensor.fill_(1)
    assert buffer.tensor.shape == spec.shape
    assert buffer.tensor.stride() == (spec.stride or buffer.tensor.stride())
    assert buffer.guards_intact()
    for at in (buffer.begin - 1, buffer.end):
        kept = int(buffer.bytes[at])
        buffer.bytes[at] = kept ^ 0xFF
        assert not buffer.guards_intact()
        buffer.bytes[at] = kept


@pytest.mark.parametrize("dtype", ["i8", "bf16", "f32", "i32", "i64"])
def test_a_gap_between_rows_is_guarded(dtype: str) -> None:
    """Elements of a strided tensor may be written, and no byte between its rows."""
    buffer = Guarded(Spec("x", "in", (3, 5), dtype, (8, 1), 5), CPU)
    buffer.guard()
    buffer.tensor.fill_(1)
    assert buffer.guards_intact()
    gap = buffer.tensor.as_strided((1,), (1,), buffer.tensor.storage_offset() + 6)  # the first row ends at 5
    gap.fill_(2)
    assert not buffer.guards_intact()
    buffer.guard()
    assert buffer.guards_intact()


def test_a_binding_notices_what_was_written() -> None:
    """A changed input and a write behind an output are told by name; outputs begin as poison."""
    specs = (Spec("x", "in", (4,), "f32"), Spec("y", "out", (4,), "f32"))
    binding = bind(specs, {"x": np.arange(4, dtype=np.float32)}, {}, CPU)
    assert binding.trespasses() == []
    assert (binding.outputs()["y"].view(np.uint8) == POISON_BYTES[0]).all()
    binding.tensors["x"][2] = 9
    binding.buffers["y"].bytes[binding.buffers["y"].end] = 0
    assert binding.trespasses() == ["wrote outside y", "changed its input x"]


def test_many_bindings_are_asked_at_once() -> None:
    """One changed input or guard among eight bindings shows."""
    specs = (
        Spec("x", "in", (4,), "bf16"),
        Spec("n", "in", (3,), "i32"),
        Spec("y", "out", (2, 4), "f32"),
        Spec("z", "out", (0,), "i8"),
    )
    given = {"x": np.arange(4, dtype=np.uint16), "n": np.arange(3, dtype=np.int32)}

    def ring() -> list[Binding]:
        return [bind(specs, given, {}, CPU) for _ in range(8)]

    assert all_intact(ring())
    for name, place in (("x", 3), ("n", 0)):
        bindings = ring()
        bindings[5].tensors[name][place] = 77
        assert not all_intact(bindings)
    bindings = ring()
    bindings[7].buffers["z"].bytes[0] = 0
    assert not all_intact(bindings)


class Drawn:
    """A generator that draws the same share each time."""

    def __init__(self, share: float) -> None:
        self.share = share

    def random(self, n: int) -> np.ndarray:
        """So many shares."""
        return np.full(n, self.share)


def a_use(kept: int | None = None, share: float = 0.0) -> tuple[list[Binding], Use]:
    """Four bindings as a span uses them, on other inputs than lie in them yet."""
    specs = (Spec("x", "in", (1, 4), "f32"), Spec("y", "out", (2, 4), "f32"))
    bindings = [bind(specs, {"x": np.arange(4, dtype=np.float32)[None]}, {}, CPU) for _ in range(4)]
    for binding in bindings:
        binding.vary(7)
    return bindings, Use(bindings, kept, Drawn(share), lambda: None)  # type: ignore[arg-type]  # a stand-in


def test_inputs_are_there_when_the_clock_starts_and_not_before() -> None:
    """Who works ahead of it finds those of another call."""
    bindings, use = a_use()
    assert bindings[0].tensors["x"][0].tolist() == [0, 1, 2, 3]
    use.start()
    assert sorted(bindings[0].tensors["x"][0].tolist()) == [0, 1, 2, 3]
    assert bindings[0].tensors["x"][0].tolist() != [0, 1, 2, 3]
    assert bindings[0].trespasses() == []


def test_outputs_are_those_that_were_there_when_the_clock_stopped() -> None:
    """What is written later is not compared, and the calls that wrote later are counted."""
    bindings, use = a_use(kept=1)
    use.start()
    for binding in bindings[:2]:
        binding.tensors["y"].fill_(2)
    use.stop()
    for binding in bindings:
        binding.tensors["y"].fill_(3)
    assert (use.outputs()["y"] == 2).all()
    assert use.idle() == 2


@pytest.mark.parametrize(("share", "idle"), [(0.0, 4), (0.9, 0)])
def test_a_part_that_was_written_in_time_hides_no_other(share: float, idle: int) -> None:
    """Which byte is looked at is drawn, for each output of each span."""
    bindings, use = a_use(share=share)
    use.start()
    for binding in bindings:
        binding.tensors["y"][1] = 2
    use.stop()
    for binding in bindings:
        binding.tensors["y"][0] = 2
    assert use.idle() == idle


def test_an_output_may_hold_the_poison_by_right() -> None:
    """The same byte before and after, in a row that was written to, is no fault; a row of poison is."""
    bindings, use = a_use()
    use.start()
    for binding in bindings[:3]:
        binding.tensors["y"].fill_(2)
        binding.tensors["y"].view(torch.uint8)[0, 0] = POISON_BYTES[0]
    use.stop()
    assert use.idle() == 1


def test_what_is_changed_in_place_is_changed_in_time() -> None:
    """A state that is written behind the clock's stop is seen at the byte that is looked at."""
    spec = Spec("s", "inout", (2, 4), "f32")
    bindings = [bind((spec,), {"s": np.ones((2, 4), np.float32)}, {}, CPU) for _ in range(3)]
    use = Use(bindings, None, Drawn(0.99), lambda: None)  # type: ignore[arg-type]  # a stand-in
    use.start()
    bindings[0].tensors["s"].fill_(2)
    use.stop()
    assert use.idle() == 0
    bindings[1].tensors["s"].fill_(2)
    assert use.idle() == 1


def test_bindings_have_addresses_of_their_own() -> None:
    """No two bindings share a buffer."""
    specs = (Spec("x", "in", (4,), "f32"),)
    ring = [bind(specs, {"x": np.zeros(4, np.float32)}, {}, CPU) for _ in range(8)]
    assert len({b.tensors["x"].data_ptr() for b in ring}) == 8


def test_tables_hold_poison_wherever_no_expert_is() -> None:
    """Placed rows at their slots, poison elsewhere, also after the next case placed others."""
    tables = Tables(CPU)
    rows = to_torch(np.arange(8, dtype=np.int8).reshape(2, 4), "i8")
    tables.place("w", 6, np.array([1, 4]), rows)
    table = tables.place("w", 6, np.array([0, 4]), rows)
    assert table[0].tolist() == [0, 1, 2, 3]
    assert table[4].tolist() == [4, 5, 6, 7]
    assert (table[[1, 2, 3, 5]] == -1).all()
    tiled = tables.place("w", 6, np.arange(6), rows)
    assert tiled[::2].tolist() == [[0, 1, 2, 3]] * 3


def test_checksum_sees_one_changed_byte() -> None:
    """Whatever the dtype and the length."""
    for tensor in (torch.zeros(1001, dtype=torch.int8), torch.zeros(33, dtype=torch.float32)):
        before = checksum({"w": tensor})
        tensor.view(torch.uint8)[-1] = 1
        assert checksum({"w": tensor}) != before


@pytest.mark.parametrize(
    ("stage", "cache", "count", "flushed"),
    [
        ("topk.greedy", "cold-weights", "in cache", False), ("topk.greedy", "warm", "in cache", False),
        ("topk.greedy", "cold-all", HOT_RING, True), ("gdn.conv", "cold-weights", HOT_RING, True), ("gdn.conv", "warm", HOT_RING, False),
    ],
)  # fmt: skip
def test_a_ring_keeps_in_the_cache_what_is_not_cold(stage: str, cache: str, count: int | str, flushed: bool) -> None:
    """Logits come out of a cache unless all is to be cold: as many sets as fit a quarter of the last level. States are cold."""
    arms = Arms(CPU)
    case = logit_case(stage, STATE_FOLDER, np.zeros((1, 70_001), np.float32)) if stage == "topk.greedy" else make_case(stage)
    held = sum(s.nbytes for s in STAGES[stage].specs(case.problem))
    ring = Ring(arms, case, arms.begin(case), cache)
    fits = min(CPU.llc_bytes() // WARM_SHARE // held, HOT_RING)
    assert len(ring.bindings) == (fits if count == "in cache" else count)
    assert ring.flushed == flushed
