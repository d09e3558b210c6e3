"""The picture of simulated figures: per model and load, the policies side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {"fcfs": "#2b6c8f", "priority": "#e8871e", "shortest": "#4f9d4a", "longest": "#8c5fb0"}
INK = "#22262b"
PANELS = (
    ("TTFT p50, ms", ("ttft_ms", "p50")),
    ("TTFT p99, ms", ("ttft_ms", "p99")),
    ("time between tokens p99, ms", ("gap_ms", "p99")),
    ("requests within the targets, %", ("good_share",)),
)


def plot(rows: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Write a PNG. rows: what `simulate.py` puts into its JSON."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    size = (3.4 * len(PANELS), 0.6 + 2.7 * len(models))
    figure, grid = pyplot.subplots(len(models), len(PANELS), figsize=size, layout="constrained", squeeze=False)
    figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left")
    for model, line in zip(models, grid, strict=True):
        own = [row for row in rows if row["model"] == model and row["ended"]]
        for axes, (name, keys) in zip(line, PANELS, strict=True):
            _panel(axes, own, keys)
            axes.set_title(f"{model}\n{name}", fontsize=8.5, loc="left", color=INK)
    save(figure, path, grid[0][0])


def _panel(axes: Axes, rows: Sequence[dict[str, Any]], keys: tuple[str, ...]) -> None:
    loads = list(dict.fromkeys(row["load"] for row in rows))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    width = 0.8 / max(1, len(policies))
    for place, policy in enumerate(policies):
        own = [row for row in rows if row["policy"] == policy]
        at = [loads.index(row["load"]) + (place - (len(policies) - 1) / 2) * width for row in own]
        axes.bar(at, [_value(row, keys) for row in own], width, color=COLOURS[policy], label=policy)
    axes.set_xticks(range(len(loads)), loads, fontsize=8)
    plain(axes)


def _value(row: dict[str, Any], keys: tuple[str, ...]) -> float:
    if len(keys) == 1:
        return 100 * float(row[keys[0]])
    return float((row[keys[0]] or {}).get(keys[1], 0.0))


def plain(axes: Axes) -> None:
    axes.tick_params(axis="y", labelsize=8, colors="#59616b")
    axes.grid(axis="y", color="#e3e6ea", lw=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def save(figure: Figure, path: Path, labelled: Axes) -> None:
    """With the labels of one of its axes below."""
    handles, labels = labelled.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8.5, frameon=False)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
