"""What a chain of steps found: as a table, and as a page with its curves."""

from collections.abc import Iterator
from itertools import groupby

import numpy as np
from tabulate import tabulate

from replay.results.report import render, svg
from replay.results.table import providers_text
from replay.studies.curves import CONTRACT, Chain, Curve

SHOWN = (1, 10, 100, 1000, 10_000)  # steps that have a column


def text(chain: Chain, *, markdown: bool = False) -> str:
    """Every case's table: the error of the states by step, the largest of all, and how each arm ended."""
    style = "github" if markdown else "plain"
    parts = []
    for title, curves in tables(chain):
        parts += [("### " if markdown else "") + title, tabulate(
            [cells(c, chain) for c in curves], heads(chain), tablefmt=style, disable_numparse=True),
            *(f"reproduce: {c.reproduce}" for c in curves if c.reproduce), ""]  # fmt: skip
    return "\n".join([*parts, *notes(chain)])


def tables(chain: Chain) -> Iterator[tuple[str, list[Curve]]]:
    """(title, curves of what could run) of every case; the contract's own is the first."""
    for case, curves in groupby(chain.curves, key=lambda c: c.case):
        found = [c for c in curves if c.status != "UNAVAILABLE"]
        stage, layer, captured = case.partition("@")[0], found[0].layer, chain.captured.get(case, 0)
        inputs = f"inputs of {captured} captured" + (", the others drawn" if captured < chain.steps else "")
        state = f"{found[0].dtype} state"
        yield f"{stage} · {chain.capture} {layer} · {state} · {chain.steps} steps, reset {chain.reset}; {inputs}", found


def heads(chain: Chain) -> list[str]:
    """The columns."""
    return ["kernel", "bits", *(f"ulp at {n}" for n in _shown(chain)), "largest", "beyond contract", "result"]


def cells(curve: Curve, chain: Chain) -> list[str]:
    """One line."""
    taken = len(curve.state_ulp)
    right = curve.differs - 1 if curve.differs else taken
    whole = "budgeted" if curve.budgeted else "BITWISE"
    bits = "–" if curve.kernel == CONTRACT else whole if right == chain.steps else f"to step {right}" if right else "none"
    after = [f"{curve.state_ulp[n - 1]:.3g}" if n <= len(curve.state_ulp) else "" for n in _shown(chain)]
    told = ": ".join(part for part in (curve.status, curve.detail) if part)
    known = taken > 0
    beyond = "–" if curve.kernel == CONTRACT else f"{curve.farther:.2g}"
    largest = f"{max(curve.state_ulp):.3g}" if known else ""
    return [
        curve.kernel,
        "" if curve.status == "MISTRUSTED" else bits,
        *after,
        largest,
        beyond if known else "",
        told,
    ]


def _shown(chain: Chain) -> list[int]:
    return sorted({n for n in SHOWN if n < chain.steps} | {chain.steps})


def notes(chain: Chain) -> list[str]:
    """What holds for all of it."""
    missing = {c.kernel: c.detail for c in chain.curves if c.status == "UNAVAILABLE"}
    unavailable = ["unavailable: " + ", ".join(providers_text(missing))] if missing else []
    return [
        *["interrupted: this is what was found by then"] * chain.interrupted,
        *unavailable,
        "ulp at a step: the largest |state − f64|, in ulp of the state's dtype at the largest element of its row. Beyond the "
        "contract: how much farther from f64 a kernel was than it at the same step, in any head, in states or output "
        f"(limit {chain.max_scaled_ulp:g}).",
    ]


def page(chain: Chain, folder: str) -> str:
    """A self-contained page with a curve for every arm."""
    shown = [
        (title, [(cells(c, chain), c.reproduce) for c in curves], picture(curves, number))
        for number, (title, curves) in enumerate(tables(chain))
    ]
    return render("chain.html.j2", chain=chain, folder=folder, heads=heads(chain), tables=shown, notes=notes(chain))


def picture(curves: list[Curve], case: int) -> str:
    """Error of the states against f64 by step, a line an arm."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots()
    for number, curve in enumerate(c for c in curves if c.state_ulp):
        steps = np.arange(1, len(curve.state_ulp) + 1)
        width = 2.5 if curve.kernel == CONTRACT else 1
        axes.plot(steps, curve.state_ulp, linewidth=width, label=curve.kernel, gid=f"curve-{case}-{number}")
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.set_ylabel("scaled ulp from f64")
    axes.legend(fontsize=8, frameon=False)
    return svg(figure)
