"""What a chain found, as it is kept: a curve for every case and kernel."""

from pathlib import Path
from typing import Any, Literal

import msgspec

from replay.errors import InputError
from replay.model import Value

CONTRACT = "the contract (f32 oracle)"
Status = Literal["BOUNDED", "DRIFTED", "OVERFLOWED", "FAIL", "MISTRUSTED", "CRASHED", "TIMEOUT", "DEVICE_LOST", "UNAVAILABLE"]


class Curve(Value, frozen=True, kw_only=True):
    """One kernel on one case: after each step the largest error of the states and of the output against f64, in ulp of their
    dtype at what was reduced (semantics: WITHIN_ULP), and how it ended. ``differs``: the first step without the contract's
    bits, where a ``budgeted`` kernel's sums are not looked at. ``farther``: by how much at most it was farther from f64 than
    the contract at the same step. ``reproduce``: the command that shows again what is wrong with it."""

    case: str
    layer: str
    kernel: str
    dtype: str
    state_ulp: tuple[float, ...]
    out_ulp: tuple[float, ...]
    status: Status
    detail: str = ""
    differs: int | None = None
    budgeted: bool = False
    farther: float = 0.0
    reproduce: str | None = None


class Chain(Value, frozen=True, kw_only=True):
    """What ``chain`` found. ``captured``: case → steps whose inputs the capture has; the others were drawn. ``loaded``: the files
    that children had loaded, and their sha256."""

    capture: str
    device: str
    stages: tuple[str, ...]
    steps: int
    reset: str
    max_scaled_ulp: float
    captured: dict[str, int]
    curves: tuple[Curve, ...]
    interrupted: bool
    identity: dict[str, Any]
    loaded: dict[str, str]


def encode(chain: Chain) -> bytes:
    """chain.json."""
    return msgspec.json.encode(chain) + b"\n"


def decode(path: Path) -> Chain:
    """A chain.json; InputError where it is none, or contradicts itself."""
    try:
        chain = msgspec.json.decode(path.read_bytes(), type=Chain)
    except (msgspec.DecodeError, OSError) as error:
        raise InputError(str(path), "content", "what `chain` writes", str(error)) from None
    for curve in chain.curves:
        lengths = len(curve.state_ulp), len(curve.out_ulp)
        if not lengths[0] == lengths[1] <= chain.steps or min((*curve.state_ulp, *curve.out_ulp), default=0) < 0:
            told = f"{lengths[0]} and {lengths[1]} of {chain.steps} steps"
            raise InputError(str(path), curve.kernel, "an error of 0 or more for each step that was taken", told)
    return chain
