"""The options that choose cases and kernels, which several commands share."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from replay.errors import InputError


def _capture(option: str, holding: str | None, text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """One of the spellings of what is replayed; together they give ``capture``, and ``holding``: what it must then hold."""

    def given(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
        ctx.params.setdefault("capture", None)
        ctx.params.setdefault("holding", None)
        if value is not None:
            if ctx.params["capture"] is not None:
                raise InputError(option, "capture", "one", f"{ctx.params['capture']} and {value}")
            ctx.params |= {"capture": value, "holding": holding}

    return click.option(option, metavar="PATH", help=text, expose_value=False, callback=given)


_OPTIONS = (
    _capture("--route-jsonl", "routes", "Route JSONL, or a capture that holds routes."),
    _capture("--state", "states", "GDN state file, or a capture that holds states."),
    _capture("--logits", "logits", "Logit file, or a capture that holds logits."),
    _capture("--capture", None, "Any of these; of several kinds in one the stages asked for say which."),
    click.option("--route-layer-regex", help="Keep records whose layer name matches."),
    click.option("--route-start-indices", help="First token rows: ints and start:stop[:step], e.g. 0:64:4. [16 a layer]"),
    click.option("--route-window-size", default="1", show_default=True, help="W[,W…] consecutive token rows a case."),
    click.option("--max-cases", type=click.IntRange(1), help="At most this many cases a layer and window."),
    click.option("--stage", "stages", multiple=True, help="Stages by name or glob. [moe.*, gdn.* or topk.*]"),
    click.option("--kernel", "kernels", multiple=True, help="Kernels by id or glob. [all]"),
    click.option("--case", "case_ids", multiple=True, help="Replay exactly this case."),
    click.option("--load", multiple=True, metavar="FILE.py", help="Register the KERNELS of a Python file."),
    click.option("--device", default="cpu", show_default=True, help="cpu, xpu[:N] or cuda[:N]."),
    click.option("--model", help="Geometry preset, where the capture has no manifest. [qwen36]"),
    click.option("--tp", type=int, help="Tensor-parallel size of the geometry. [4, of logits 1]"),
    click.option("--mode", "modes", multiple=True, metavar="NAME=VALUE", help="A named mode, e.g. quant=recip_half_even."),
    click.option(
        "--timeout",
        type=click.IntRange(1),
        default=120,
        show_default=True,
        help="Seconds a kernel may be silent: over a case, in a chain over a step.",
    ),
    click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=7, show_default=True, help="Seed of everything drawn."),
    click.option("-o", "--output", type=click.Path(path_type=Path), help="Run folder. [runs/TIME-ID]"),
)


def chosen(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a capture, its rows, stages and kernels, a device, a seed and a folder."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def parse_modes(pairs: tuple[str, ...]) -> dict[str, str]:
    """``name=value`` words; InputError for one that is none, or for two values of a name."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name or not value:
            raise InputError("--mode", "value", "name=value", repr(pair))
        if found.get(name, value) != value:
            raise InputError("--mode", name, "one value", f"{found[name]} and {value}")
        found[name] = value
    return found


def parse_windows(text: str) -> tuple[int, ...]:
    """``1,8,32``; InputError for anything else."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise InputError("--route-window-size", "value", "W[,W…], each 1 or more", repr(text))
    return tuple(map(int, text.split(",")))
