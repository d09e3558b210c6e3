"""The picture of real runs beside their simulations: a row of panels for each run, bars by class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from simulation.plot import INK, plain, save

COLOURS = {"real": "#2b6c8f", "simulated": "#e8871e"}
PANELS = ("TTFT p50", "TTFT p99", "TPOT p50", "gap p99", "within %", "out tok/s")


def plot(runs: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Write a PNG. runs: what `compare_with_simulation.py` puts into its JSON."""
    size = (2.3 * len(PANELS), 0.7 + 2.3 * len(runs))
    figure, grid = pyplot.subplots(len(runs), len(PANELS), figsize=size, layout="constrained", squeeze=False)
    figure.suptitle(f"{title}; times in ms", fontsize=11, color=INK, x=0.01, ha="left")
    for run, line in zip(runs, grid, strict=True):
        names = [row["class"] for row in run["rows"]]
        for axes, name in zip(line, PANELS, strict=True):
            place = list(run["rows"][0]["columns"]).index(name)
            for shift, kind in ((-0.2, "real"), (0.2, "simulated")):
                heights = [row[kind][place] or 0.0 for row in run["rows"]]
                axes.bar([at + shift for at in range(len(names))], heights, 0.4, color=COLOURS[kind], label=kind)
            axes.set_title(f"{run['run']}\n{name}", fontsize=8.5, loc="left", color=INK)
            axes.set_xticks(range(len(names)), names, fontsize=7)
            plain(axes)
    save(figure, path, grid[0][0])
