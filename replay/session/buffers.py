"""Buffers a kernel is handed: fresh addresses, guard bands on both sides, poison where it must write.

Every buffer belongs to the harness. A *binding* is one set of a stage's tensors; a ring of bindings holds equal bytes
at different addresses. Expert weights live in a *table* that is shared by all bindings.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from replay.devices import Device
from replay.model import DTYPE_BYTES, Spec
from replay.stages.stage import Tensors
from replay.stages.vary import varied

if TYPE_CHECKING:
    import torch

GUARD_BYTES = 4096
GUARD_BYTE = 0xA5
_INTEGERS = {1: "i8", 2: "i16", 4: "i32", 8: "i64"}
# Two patterns in turn: whatever a right output holds, a row left unwritten differs from it under one of them.
POISON_BYTES = (0xFF, 0x7B)
ALIGN = 64


def torch_dtype(name: str) -> "torch.dtype":
    """torch's dtype for one of the model's."""
    import torch

    integers = {"i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64}
    return (integers | {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32})[name]


def to_torch(array: NDArray[Any], dtype: str) -> "torch.Tensor":
    """A CPU tensor over the array's memory; uint16 bit patterns become bf16."""
    import torch

    contiguous = np.ascontiguousarray(array)
    if not contiguous.flags.writeable:
        contiguous = contiguous.copy()
    tensor = torch.from_numpy(contiguous)
    return tensor.view(torch.bfloat16) if dtype == "bf16" else tensor


def to_numpy(tensor: "torch.Tensor") -> NDArray[Any]:
    """A contiguous copy on the host, detached from the tensor's memory; bf16 becomes uint16 bit patterns."""
    import torch

    host = tensor.detach().contiguous().cpu()
    if host.dtype == torch.bfloat16:
        host = host.view(torch.uint16)
    return host.numpy().copy()


@functools.cache
def _band(device: str, size: int) -> "torch.Tensor":
    """A band as it should be; comparing with it makes no copy."""
    import torch

    return torch.full((size,), GUARD_BYTE, dtype=torch.uint8, device=device)


class Guarded:
    """One tensor of a spec inside its own allocation, with a guard band before and behind it."""

    def __init__(self, spec: Spec, device: Device) -> None:
        self.spec = spec
        size = DTYPE_BYTES[spec.dtype]
        stride = spec.stride or _contiguous(spec.shape)
        extent = 1 + sum((n - 1) * s for n, s in zip(spec.shape, stride, strict=True)) if all(spec.shape) else 0
        self.begin = GUARD_BYTES + spec.offset * size
        self.end = self.begin + extent * size
        raw = device.empty_bytes(self.end + GUARD_BYTES + ALIGN)
        shift = -raw.data_ptr() % ALIGN
        self.bytes = raw[shift : shift + self.end + GUARD_BYTES]
        self.guard()
        self.stride = stride
        self.tensor = self._held(self.bytes) if extent else self._nothing()

    def _held(self, raw: "torch.Tensor") -> "torch.Tensor":
        """The tensor that lies in these bytes."""
        whole = raw[self.begin : self.end].view(torch_dtype(self.spec.dtype))
        return whole.as_strided(self.spec.shape, self.stride)

    def _nothing(self) -> "torch.Tensor":
        return self.bytes[:0].view(torch_dtype(self.spec.dtype)).reshape(self.spec.shape)

    def guard(self) -> None:
        """Write both bands, and with them the gaps between the rows of a strided tensor, which its elements follow."""
        self.bytes[: self.end if self.spec.stride else self.begin] = GUARD_BYTE
        self.bytes[self.end :] = GUARD_BYTE

    def guards_intact(self) -> bool:
        """True while nothing was written to a band or a gap."""
        import torch

        if self.spec.stride and self.end > self.begin:
            rest = self.bytes.clone()
            held, size = self._held(rest), DTYPE_BYTES[self.spec.dtype]
            held.view(torch_dtype(_INTEGERS[size])).fill_(int.from_bytes(bytes([GUARD_BYTE]) * size, "little", signed=True))
            return bool((rest == GUARD_BYTE).all())
        return all(torch.equal(band, _band(str(band.device), len(band))) for band in self.bands())

    def bands(self) -> "tuple[torch.Tensor, torch.Tensor]":
        """The bytes before and behind the tensor."""
        return self.bytes[: self.begin], self.bytes[self.end :]


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


@dataclass
class Binding:
    """One set of a stage's tensors, weights included; ``tensors`` is what a kernel's run is given.

    ``origin`` are the case's inputs, ``given`` those that lie in the buffers now: the origin, or a variation of it.
    """

    specs: tuple[Spec, ...]
    buffers: dict[str, Guarded]
    origin: Tensors
    tensors: dict[str, "torch.Tensor"]
    poison: int = POISON_BYTES[0]

    def __post_init__(self) -> None:
        self.given = self.origin
        self.written: dict[str, torch.Tensor] = {}  # inputs as they are written, on the device
        self.staged: list[str] = []  # those that are yet to be written

    def vary(self, number: int) -> None:
        """Stage another variation of the inputs."""
        self.given = varied(self.specs, self.origin, number)
        self._stage(name for name, array in self.given.items() if array is not self.origin[name])

    def pose(self, origin: Tensors) -> None:
        """Write the inputs of another case."""
        self.origin = self.given = origin
        self.fill()

    def fill(self) -> None:
        """Write the inputs."""
        self._stage(name for name, buffer in self.buffers.items() if buffer.spec.role in ("in", "inout"))
        put([self])

    def _stage(self, names: Iterable[str]) -> None:
        for name in names:
            array = self.given[name]
            assert isinstance(array, np.ndarray)  # only weights are expert rows
            buffer = self.buffers[name]
            self.written[name] = to_torch(array, buffer.spec.dtype).to(buffer.tensor.device)
            self.staged.append(name)

    def mend(self) -> None:
        """Put guards and inputs right after a kernel that wrote to them."""
        for buffer in self.buffers.values():
            buffer.guard()
        self.fill()

    def restore(self) -> None:
        """Stage those inputs that a kernel is meant to change."""
        self._stage(name for name, buffer in self.buffers.items() if buffer.spec.role == "inout")

    def poison_outputs(self, pattern: int) -> None:
        """Overwrite every output and scratch byte."""
        self.poison = pattern
        for buffer in self.buffers.values():
            if buffer.spec.role in ("out", "scratch"):
                buffer.bytes[buffer.begin : buffer.end] = pattern

    def untouched(self) -> bool:
        """Whether the first row of some output still holds poison and nothing else."""
        return any(
            bool((b.bytes[b.begin : b.begin + (b.end - b.begin) // b.spec.shape[0]] == self.poison).all())
            for b in self.written_to()
        )

    def written_to(self) -> list[Guarded]:
        """The buffers of outputs that hold anything."""
        return [b for b in self.buffers.values() if b.spec.role == "out" and b.end > b.begin]

    def changed(self) -> list[Guarded]:
        """The buffers that a call changes in place."""
        return [b for b in self.buffers.values() if b.spec.role == "inout" and b.end > b.begin]

    def outputs(self) -> dict[str, NDArray[Any]]:
        """Copies of what the kernel wrote."""
        return {n: to_numpy(b.tensor) for n, b in self.buffers.items() if b.spec.role in ("out", "inout")}

    def trespasses(self) -> list[str]:
        """What was written that must not be: guard bands, inputs."""
        found = [f"wrote outside {n}" for n, b in self.buffers.items() if not b.guards_intact()]
        for name, buffer in self.buffers.items():
            if buffer.spec.role == "in":
                given = self.given[name]
                assert isinstance(given, np.ndarray)
                if to_numpy(buffer.tensor).tobytes() != np.ascontiguousarray(given).tobytes():
                    found.append(f"changed its input {name}")
        return found


def put(bindings: Iterable[Binding]) -> None:
    """Write what is staged, where the device comes to it."""
    _copy(_pairs(bindings))


def _pairs(bindings: Iterable[Binding]) -> "tuple[list[torch.Tensor], list[torch.Tensor]]":
    """(where staged inputs go, what they are), which are staged no more; as bytes wherever both lie in one piece."""
    import torch

    to, given = [], []
    for binding in bindings:
        for name in binding.staged:
            pair = binding.buffers[name].tensor, binding.written[name]
            flat = [t.reshape(-1).view(torch.uint8) for t in pair] if all(t.is_contiguous() for t in pair) else pair
            to.append(flat[0])
            given.append(flat[1])
        binding.staged.clear()
    return to, given


def _copy(pairs: "tuple[list[torch.Tensor], list[torch.Tensor]]") -> None:
    import torch

    if pairs[0]:
        torch._foreach_copy_(*pairs)


class Use:
    """Some bindings as one span uses them, one call each.

    Inputs are staged beforehand and written when the clock starts: what works ahead of it, on another stream, finds those of
    another call. When it stops a byte of each output, at a place that was drawn, and the outputs of the call that is ``kept``
    are copied: what is written later is not in them. Both are queued in the order of the device's work.
    """

    def __init__(
        self, bindings: Sequence[Binding], kept: int | None, rng: np.random.Generator, flush: Callable[[], None]
    ) -> None:
        self.bindings, self.kept, self.flush = bindings, None if kept is None else bindings[kept], flush
        self.pairs = _pairs(bindings)
        buffers = [b for binding in bindings for b in (*binding.written_to(), *binding.changed())]
        places = [b.begin + int(share * (b.end - b.begin)) for b, share in zip(buffers, rng.random(len(buffers)), strict=True)]
        self.bytes = [b.bytes[place : place + 1] for b, place in zip(buffers, places, strict=True)]
        self.then: torch.Tensor | None = None
        self.copies: dict[str, torch.Tensor] = {}

    def start(self) -> None:
        """Where the clock starts."""
        _copy(self.pairs)
        self.flush()

    def stop(self) -> None:
        """Where the clock stops."""
        self.then = self._look()
        if self.kept:
            self.copies = {n: b.tensor.clone() for n, b in self.kept.buffers.items() if b.spec.role in ("out", "inout")}

    def _look(self) -> "torch.Tensor | None":
        import torch

        return torch.cat(self.bytes) if self.bytes else None

    def outputs(self) -> dict[str, NDArray[Any]]:
        """What the kept call had written when the clock stopped."""
        return {name: to_numpy(copied) for name, copied in self.copies.items()}

    def idle(self) -> int:
        """How many calls had an output that was not written to when the clock stopped.

        An output may hold the poison's byte by right; then it still does, and its first row holds something else besides. What a
        call changes in place must hold what it held when the clock stopped.
        """
        now = self._look()
        if self.then is None or now is None:
            return 0
        found = 0
        bytes_ = iter(zip(self.then.tolist(), now.tolist(), strict=True))
        for binding in self.bindings:
            waiting = [(was, still) for was, still in (next(bytes_) for _ in binding.written_to()) if was == binding.poison]
            later = [was != still for was, still in (next(bytes_) for _ in binding.changed())]
            found += any(later) or any(was != still for was, still in waiting) or (bool(waiting) and binding.untouched())
        return found


def all_intact(bindings: Sequence[Binding]) -> bool:
    """Whether no guard and no input of contiguous bindings was written to, in one question to an accelerator.

    On a CPU each binding's own ``trespasses`` is quicker, since it makes no copies.
    """
    import torch

    bands = torch.cat([band for binding in bindings for b in binding.buffers.values() for band in b.bands()])
    inputs = [(b.tensor, binding.written[n]) for binding in bindings for n, b in binding.buffers.items() if b.spec.role == "in"]
    held, given = (torch.cat([pair[i].reshape(-1).view(torch.uint8) for pair in inputs]) for i in (0, 1))
    return bool((bands == GUARD_BYTE).all() & (held == given).all())


def bind(
    specs: tuple[Spec, ...],
    given: Tensors,
    weights: Mapping[str, "torch.Tensor"],
    device: Device,
) -> Binding:
    """A fresh binding with its inputs written and its outputs poisoned."""
    buffers = {s.name: Guarded(s, device) for s in specs if s.role != "weight"}
    # The kernel gets views of its own: what it does to a tensor's shape is not done to ours.
    views = {n: b.tensor.as_strided(b.tensor.shape, b.tensor.stride()) for n, b in buffers.items()}
    binding = Binding(specs, buffers, given, {**views, **weights})
    binding.fill()
    binding.poison_outputs(POISON_BYTES[0])
    return binding


@dataclass
class Tables:
    """Expert tables, kept between cases: allocating 200 MB a case would take longer than the case.

    ``place`` writes rows at their experts' slots; every other slot holds poison, so that reading a neighbour shows.
    """

    device: Device
    kept: dict[tuple[str, tuple[int, ...], str, int], "torch.Tensor"] = field(default_factory=dict)
    dirty: dict[tuple[str, tuple[int, ...], str, int], NDArray[Any]] = field(default_factory=dict)

    def place(self, name: str, total: int, slots: NDArray[Any], rows: "torch.Tensor", copy: int = 0) -> "torch.Tensor":
        """Table [total, …] with ``rows[i % len(rows)]`` at ``slots[i]``."""
        import torch

        key = (name, (total, *rows.shape[1:]), str(rows.dtype), copy)
        if key not in self.kept:
            nbytes = math.prod(key[1]) * rows.element_size()
            storage = self.device.empty_bytes(nbytes)
            storage.fill_(POISON_BYTES[0])
            self.kept[key] = storage.view(rows.dtype).reshape(key[1])
        table = self.kept[key]
        stale = np.setdiff1d(self.dirty.get(key, np.empty(0, np.int64)), slots)
        if len(stale):
            table.reshape(total, -1).view(torch.uint8)[torch.from_numpy(stale).to(table.device)] = POISON_BYTES[0]
        on_device = rows.to(self.device.name)
        for start in range(0, len(slots), max(len(rows), 1)):
            part = np.asarray(slots[start : start + len(rows)], np.int64)
            if part[-1] - part[0] == len(part) - 1:  # a run of slots copies an order of magnitude faster
                table[part[0] : part[-1] + 1] = on_device[: len(part)]
            else:
                table[torch.from_numpy(part).to(table.device)] = on_device[: len(part)]
        self.dirty[key] = np.asarray(slots, np.int64)
        return table


def checksum(tensors: Mapping[str, "torch.Tensor"]) -> int:
    """A wrap-around sum over every byte of the tables, to see that nobody wrote to them."""
    import torch

    total = 0
    for tensor in tensors.values():
        flat = tensor.reshape(-1).view(torch.uint8)
        words = flat[: flat.numel() // 8 * 8].view(torch.int64)
        total += int(words.sum()) + int(flat[words.numel() * 8 :].sum(dtype=torch.int64))
    return total
