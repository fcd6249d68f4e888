"""What every launch of ours asks: on which device."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def device_kind(weights: "Mapping[str, torch.Tensor]") -> str:
    """The kind of device to launch on: that of the weights; a stage without weights takes what this process began."""
    import torch

    if weights:
        return next(iter(weights.values())).device.type
    began = torch.xpu.is_initialized()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return "xpu" if began else "cpu"
