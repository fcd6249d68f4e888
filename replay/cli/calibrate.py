"""``b70-replay calibrate``: the rates that floors are made of."""

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from replay.model import Interval
    from replay.timing.ceilings import Calibration

TERMS = {
    "read_gbs": ("read", "GB/s"), "copy_gbs": ("copy", "GB/s"), "inplace_gbs": ("in place", "GB/s"),
    "hot_gbs": ("from cache", "GB/s"), "int8_gops": ("int8 product", "GOP/s"), "bf16_gops": ("bf16 product", "GOP/s"),
    "launch_us": ("empty launch", "µs"),
}  # fmt: skip


@click.command("calibrate")
@click.option("--device", default="cpu", show_default=True, help="cpu, xpu[:N] or cuda[:N].")
def command(device: str) -> int:
    """Read, copy and in-place rates, int8 and bf16 peaks, an empty launch: before and after a sweep over sizes.

    Each is the best of torch's operations and our own kernels, with its interval; the data sheet of a known card stands beside
    it. A run measures the same before and after its samples.
    """
    from replay.devices import parse
    from replay.session.exclusive import timing_on
    from replay.session.workers import calibrated

    with timing_on(parse(device), lambda told: click.echo(told, err=True)):
        click.echo(text(calibrated(device)))
    return 0


def text(found: "Calibration") -> str:
    """The tables."""
    from tabulate import tabulate

    from replay.devices import data_sheet
    from replay.timing.floors import drifted

    sheet = data_sheet(found.device)
    rows = [
        [name, unit, _shown(getattr(found.before, term)), _shown(getattr(found.after, term)), sheet.get(term, "–"),
         found.after.best_of[term.partition("_")[0]]]
        for term, (name, unit) in TERMS.items()
    ]  # fmt: skip
    sizes = [[f"{s.mib} MiB", _shown(s.read_gbs), _shown(s.copy_gbs), _shown(s.inplace_gbs)] for s in found.sweep]
    moved = drifted(found.before, found.after, 0.01)
    told = f"moved between before and after: {', '.join(moved)}" if moved else "read, copy and in place: the intervals overlap"
    head = ["ceiling", "unit", "before [99 %]", "after [99 %]", "data sheet", "reached by"]
    return "\n".join(
        [
            found.device,
            tabulate(rows, head, disable_numparse=True),
            "",
            tabulate(sizes, ["moved", "read GB/s", "copy GB/s", "in place GB/s"], disable_numparse=True),
            "",
            f"the clock steps by {found.clock_step_ns} ns; {told}.",
        ]
    )


def _shown(i: "Interval") -> str:
    digits = 0 if i.mid >= 10 else 2
    return f"{i.mid:.{digits}f} [{i.lo:.{digits}f}, {i.hi:.{digits}f}]"
