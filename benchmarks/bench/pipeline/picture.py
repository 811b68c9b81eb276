"""Bars: how fast a model trains whole, in stages one after the other, and as a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["draw"]

_COLOURS = {"whole": "#8c8c8c", "naive": "#c44e52", "pipelined": "#4c72b0"}


def draw(path: Path, title: str, seconds: Mapping[str, float]) -> None:
    """Draws a bar for each way to train: examples a second, one device being 1.

    Args:
        path: a PNG file.
        title: what was trained.
        seconds: of a step, by `"whole"` and by schedule and microbatches.

    Raises:
        ModuleNotFoundError: if there is no matplotlib.
    """
    from matplotlib.figure import Figure

    rows = [name for name in seconds if name == "whole" or name.startswith("1f1b")]
    labels = {"whole": "one device", "1f1b, m = 1": "two stages,\nnaive (m = 1)"}
    kinds = {"whole": "whole", "1f1b, m = 1": "naive"}
    figure = Figure(figsize=(1.4 * len(rows) + 1, 3.6), layout="constrained")
    axes = figure.subplots()
    for place, name in enumerate(rows):
        height = seconds["whole"] / seconds[name]
        kind = kinds.get(name, "pipelined")
        axes.bar(place, height, width=0.65, color=_COLOURS[kind], zorder=2)
        axes.annotate(
            f"{height:.2f}\n{seconds[name]:.2f} s",
            (place, height),
            ha="center",
            va="bottom",
            fontsize=8,
            xytext=(0, 2),
            textcoords="offset points",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    shown = [labels.get(name, name.replace("1f1b, ", "two stages,\n")) for name in rows]
    axes.set_xticks(range(len(rows)), shown, fontsize=8)
    axes.set_ylabel("speed, one device = 1")
    axes.axhline(1, color="#8c8c8c", linewidth=0.8, zorder=1)
    axes.set_ylim(0, 1.25 * max(seconds["whole"] / seconds[name] for name in rows))
    axes.set_title(title, fontsize=9, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=130)
