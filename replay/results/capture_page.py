"""A capture as a page: its figures, and a picture a layer of how popular experts are and of how many tokens a call has."""

import numpy as np

from replay.captures.describe import LayerSummary
from replay.captures.manifest import Capture
from replay.results.report import render, svg

Key = tuple[str, str, str]


def page(capture: Capture, tables: list[tuple[str, list[str], list[list[str]]]], layers: dict[Key, LayerSummary]) -> str:
    """HTML; ``tables``: (title, heads, rows)."""
    pictures = [(" ".join(key), picture(layer)) for key, layer in layers.items() if layer.tokens]
    return render("capture.html.j2", capture=capture, tables=tables, pictures=pictures)


def picture(layer: LayerSummary) -> str:
    """Tokens by expert, the most popular first, and calls by number of tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.6), layout="constrained")
    experts, calls = figure.subplots(1, 2, width_ratios=[2, 1])
    order = np.argsort(-layer.counts, kind="stable")
    experts.bar(np.arange(len(order)), layer.counts[order], width=1.0)
    experts.set_xlabel(f"experts by popularity; the first ones: {', '.join(map(str, order[:8]))}", fontsize=8)
    experts.set_ylabel("tokens", fontsize=8)
    sizes = sorted(layer.per_call)
    calls.bar([str(size) for size in sizes[:12]], [layer.per_call[size] for size in sizes[:12]])
    calls.set_xlabel("tokens a call" + (f" (of {len(sizes)} sizes the least 12)" if len(sizes) > 12 else ""), fontsize=8)
    calls.set_ylabel("calls", fontsize=8)
    for axes in (experts, calls):
        axes.tick_params(labelsize=7)
    return svg(figure)


def missing() -> str | None:
    """What a page lacks to be made, if anything."""
    import importlib.util

    return None if importlib.util.find_spec("matplotlib") else "matplotlib (pip install 'b70-replay[report]')"
