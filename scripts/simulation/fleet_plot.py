"""The picture of a fleet: replicas and their load over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import pyplot
from simulation.fleet import Moment
from simulation.plot import INK, plain


def plot_fleet(moments: Sequence[Moment], path: Path, *, window_s: float, title: str) -> None:
    """Write a PNG: the replicas that are up and those yet to come; below, the work that came per second and replica, of
    which 1 keeps it busy, and the seconds of work that are outstanding at each."""
    minutes = [moment.at_ns / 6e10 for moment in moments]
    up = [moment.up for moment in moments]
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 5), layout="constrained", sharex=True)
    figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left")
    above.step(minutes, up, where="pre", color="#2b6c8f", label="take requests")
    above.step(minutes, [moment.up + moment.coming for moment in moments], where="pre", color="#e8871e", ls=":")
    above.plot([], [], color="#e8871e", ls=":", label="with those in cold start")
    above.set_ylabel("replicas")
    above.set_ylim(bottom=0)
    came = [moment.came_ns / 1e9 / window_s / moment.up for moment in moments]
    below.plot(minutes, came, color="#4f9d4a", label="work that came, s per s and replica")
    outstanding = [moment.outstanding_ns / 1e9 / moment.up for moment in moments]
    below.plot(minutes, outstanding, color="#8c5fb0", label="outstanding work, s per replica")
    below.axhline(1.0, color="#59616b", lw=0.6)
    below.set_ylim(bottom=0)
    below.set_xlabel("minutes")
    for axes in (above, below):
        axes.legend(fontsize=8.5, frameon=False)
        axes.tick_params(axis="x", labelsize=8, colors="#59616b")
        plain(axes)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
