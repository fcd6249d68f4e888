"""What a fake asks of its arguments; what is wrong is refused with the argument's name."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from replay.session.buffers import to_torch

Arguments = Mapping[str, Any]


class Refused(ValueError):
    """An argument that is not what the schema's text says."""


def require(condition: bool, name: str, expected: str, got: object) -> None:
    """Refused, by the argument's name, where the condition does not hold."""
    if not condition:
        raise Refused(f"{name}: expected {expected}, got {got}")


def tensor(a: Arguments, name: str, dtypes: str, *shape: int | None, strided: bool = False) -> torch.Tensor:
    """An argument of one of these dtypes and this shape, None being any extent; contiguous unless its first stride may be larger."""
    t = a[name]
    require(isinstance(t, torch.Tensor), name, "a tensor", type(t).__name__)
    require(str(t.dtype).removeprefix("torch.") in dtypes.split(), name, dtypes, t.dtype)
    require(t.dim() == len(shape), name, f"{len(shape)} dimensions", t.dim())
    for extent, want in zip(t.shape, shape, strict=True):
        require(want is None or extent == want, name, f"shape {shape}", tuple(t.shape))
    require((t[0] if strided else t).is_contiguous(), name, "contiguous" + (" rows" if strided else ""), t.stride())
    return t


def number(a: Arguments, name: str, want: object) -> None:
    """This value, of this type."""
    require(a[name] == want and type(a[name]) is type(want), name, repr(want), repr(a[name]))


def counts_of(a: Arguments, *names: str) -> None:
    """Numbers, and not below zero."""
    for name in names:
        require(type(a[name]) is int and a[name] >= 0, name, "a number", a[name])


def apart(a: Arguments, *names: str) -> None:
    """No two of these are one tensor."""
    seen: dict[int, str] = {}
    for name in names:
        at = a[name].data_ptr()
        require(at not in seen or not a[name].numel(), name, f"memory apart from {seen.get(at)}", "the same")
        seen[at] = name


def fill(t: torch.Tensor, value: Any, dtype: str) -> None:
    """Write the rows that an oracle gave."""
    made = to_torch(np.ascontiguousarray(value), dtype)
    t[: len(made)].copy_(made.view(t[: len(made)].shape))
