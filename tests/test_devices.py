"""Names of devices, and that the accelerator's branch calls only what torch has: no card is needed to know that."""

import ast
from pathlib import Path

import pytest
import torch

import replay
from replay.devices import Device, data_sheet, parse
from replay.errors import EnvironmentRefused, InputError

PACKAGE = Path(replay.__file__).parent


def attributes_of_the_device_module() -> dict[str, set[str]]:
    """Attribute → files that take it from the device's torch module, under whatever name they hold it."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute):
                continue
            holder = node.value
            held = isinstance(holder, ast.Attribute) and holder.attr == "module"
            if held or (path.name == "telemetry.py" and isinstance(holder, ast.Name) and holder.id == "module"):
                found.setdefault(node.attr, set()).add(path.name)
    return found


ONLY_CUDA = {"CUDAGraph"}


def test_every_attribute_is_found() -> None:
    """The walk sees the calls that are known to be there; a walk that sees nothing would hold for any torch."""
    assert {"synchronize", "mem_get_info", "XPUGraph", "device_count", "get_device_properties"} <= set(
        attributes_of_the_device_module()
    )


@pytest.mark.parametrize("attribute", sorted(set(attributes_of_the_device_module()) - ONLY_CUDA))
def test_torch_xpu_has_what_would_be_called(attribute: str) -> None:
    """Resolved in the torch in use, which has the module whether or not it was built for a card."""
    assert hasattr(torch.get_device_module("xpu"), attribute)


@pytest.mark.parametrize("method", ["record", "query", "elapsed_time", "synchronize"])
def test_events_have_their_methods(method: str) -> None:
    """One class of events for every accelerator."""
    assert callable(getattr(torch.Event, method))


def test_graphs_are_there() -> None:
    """torch's own where it has them, else the device module's."""
    if hasattr(torch.accelerator, "Graph"):
        assert {"__enter__", "__exit__", "replay"} <= set(dir(torch.accelerator.Graph))
        assert {"__enter__", "__exit__"} <= set(dir(torch.Stream))
    else:
        assert hasattr(torch.xpu, "graph")


@pytest.mark.parametrize("name", ["xpu", "cuda", "xpu:1"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    """In one line, with torch's version."""
    if torch.get_device_module(name.partition(":")[0]).is_available():
        pytest.skip(f"{name} is here")
    with pytest.raises(EnvironmentRefused, match=f"--device: {name}: torch .* sees no such device"):
        Device(name)


@pytest.mark.parametrize("name", ["", "gpu", "cpu:0", "xpu:", "xpu:one", "cuda:-1"])
def test_names_that_are_none(name: str) -> None:
    """Kind, and an index for those that can be several."""
    with pytest.raises(InputError, match="expected cpu, xpu"):
        parse(name)


def test_the_sheet_of_a_known_card() -> None:
    """By a part of its name; nothing is made up for others."""
    assert data_sheet("Intel(R) Arc(TM) Pro B70 Graphics")["read_gbs"] == 608
    assert data_sheet("a card of next year") == {}


def test_a_flush_leaves_nothing_in_the_cache() -> None:
    """It writes three times the last-level cache, into one buffer that is kept."""
    device = Device("cpu")
    device.flush()
    first = device.flushing
    device.flush()
    assert first is device.flushing
    assert first is not None
    assert len(first) == 3 * device.llc_bytes()
