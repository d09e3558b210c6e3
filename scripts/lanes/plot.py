"""The picture of a timeline: a lane per process and one for the device, as a whole and a few steps of it enlarged."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from lanes.timeline import Lane, Slice, Timeline
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch

COLOURS = {
    "decode": "#2b6c8f",
    "prefill": "#17a398",
    "drain": "#8d99ae",
    "plan": "#4c78c9",
    "launch": "#e8871e",
    "report": "#b56576",
    "wait": "#eef0f3",
    "commit": "#4f9d4a",
    "send": "#8c5fb0",
    "encode": "#4c78c9",
    "pass on": "#8c5fb0",
    "detokenize": "#4f9d4a",
    "send deltas": "#8c5fb0",
    "read": "#e0b13c",
    "write": "#c8553d",
}
IDLE = "#d62839"
INK = "#22262b"
LANE_HEIGHT = 0.62
ZOOM_STEPS = 3
MIN_WINDOW_STEPS = 6
LABEL_POINTS = 7.5


def plot(timeline: Timeline, path: Path, *, window_ms: float, title: str) -> None:
    """Write a PNG of the last `window_ms` before the device's last step ended, and of a few steps at the least."""
    end = timeline.steps[-1].end
    recent = timeline.steps[-MIN_WINDOW_STEPS:]
    begin = max(min(end - 1e3 * window_ms, recent[0].begin), timeline.begin)
    zoomed = timeline.steps[-(ZOOM_STEPS + 1) : -1] or timeline.steps
    step_us = (zoomed[-1].end - zoomed[0].begin) / len(zoomed)
    zoom = (zoomed[0].begin - 0.15 * step_us, zoomed[-1].end + 0.15 * step_us)

    height = 1.6 + 2 * 0.55 * len(timeline.lanes) + 1.2
    figure, (whole, near) = pyplot.subplots(2, 1, figsize=(15, height), layout="constrained")
    figure.suptitle(title, fontsize=12, color=INK, x=0.01, ha="left")
    _draw(whole, timeline, begin, end, labels=False)
    whole.set_title(f"the last {(end - begin) / 1e3:.1f} ms", fontsize=10, loc="left", color=INK)
    whole.axvspan(zoom[0] - begin, zoom[1] - begin, color="#f6c445", alpha=0.22, lw=0, zorder=0)
    _draw(near, timeline, *zoom, labels=True)
    near.set_title(f"{len(zoomed)} steps of it (shaded above)", fontsize=10, loc="left", color=INK)
    used = dict.fromkeys(s.name for lane in timeline.lanes for s in lane.slices if s.end > begin)
    patches = [
        Patch(facecolor=COLOURS[name], edgecolor="#b8bec6" if name == "wait" else "none", label=name) for name in used
    ]
    patches.append(Patch(facecolor=IDLE, alpha=0.25, edgecolor=IDLE, label="device idle"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8.5, frameon=False)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def _draw(axes: Axes, timeline: Timeline, begin: float, end: float, *, labels: bool) -> None:
    """Times on the axis are us since `begin`. labels: on all slices and gaps; else on the longest gap only."""
    for row, lane in enumerate(timeline.lanes):
        bottom = -row - LANE_HEIGHT / 2
        axes.broken_barh([(0, end - begin)], (bottom, LANE_HEIGHT), facecolor="#f8f9fa", lw=0)
        inside = [s for s in lane.slices if s.end > begin and s.begin < end]
        _bars(axes, inside, begin, end, bottom, separated=labels or lane.role == "device")
        if labels:
            _label_slices(axes, inside, begin, end, -row, step_numbers=lane.role == "device")
    bottom = -LANE_HEIGHT / 2
    gaps = [gap for gap in timeline.gaps if gap.end > begin and gap.begin < end]
    spans = [(max(gap.begin, begin) - begin, min(gap.end, end) - max(gap.begin, begin)) for gap in gaps]
    axes.broken_barh(spans, (bottom, LANE_HEIGHT), facecolor=IDLE, alpha=0.25, lw=0)
    for gap in gaps if labels else sorted(gaps, key=lambda gap: gap.length)[-1:]:
        axes.annotate(
            f"idle {_us(gap.length)}",
            ((gap.begin + gap.end) / 2 - begin, LANE_HEIGHT / 2),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=LABEL_POINTS,
            color=IDLE,
        )
    axes.set_xlim(0, end - begin)
    axes.set_ylim(-len(timeline.lanes) + 0.45, 0.62)
    axes.set_yticks(range(0, -len(timeline.lanes), -1), [_lane_label(lane) for lane in timeline.lanes], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(lambda us, _: f"{us / 1e3:g} ms")
    axes.tick_params(axis="x", labelsize=8.5, colors="#59616b")
    axes.grid(axis="x", color="#e3e6ea", lw=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#b8bec6")


def _bars(axes: Axes, slices: list[Slice], begin: float, end: float, bottom: float, *, separated: bool) -> None:
    """separated: with an edge round each, which would hide the narrow ones."""
    for name in dict.fromkeys(s.name for s in slices):
        spans = [(max(s.begin, begin) - begin, min(s.end, end) - max(s.begin, begin)) for s in slices if s.name == name]
        edge = "#c9ced6" if name == "wait" else "white"
        axes.broken_barh(
            spans, (bottom, LANE_HEIGHT), facecolor=COLOURS[name], edgecolor=edge, lw=0.4 if separated else 0
        )


def _label_slices(axes: Axes, slices: list[Slice], begin: float, end: float, row: float, *, step_numbers: bool) -> None:
    """The name and length of each slice that is wide enough for the text."""
    points = axes.get_position().width * axes.figure.get_figwidth() * 72  # type: ignore[union-attr]
    for s in slices:
        left, right = max(s.begin, begin), min(s.end, end)
        name = f"step {s.args['step']}" if step_numbers else s.name
        room = (right - left) / (end - begin) * points / (0.58 * LABEL_POINTS)
        text = next((text for text in (f"{name}  {_us(s.end - s.begin)}", name) if len(text) < room), None)
        if text is not None:
            axes.text(
                (left + right) / 2 - begin,
                row,
                text,
                ha="center",
                va="center",
                fontsize=LABEL_POINTS,
                color="#59616b" if s.name == "wait" else "white",
            )


def _lane_label(lane: Lane) -> str:
    return lane.name if lane.cpu is None else f"{lane.name}\n{100 * lane.cpu:.0f} % of a core"


def _us(us: float) -> str:
    return f"{us:.0f} us" if us < 1e3 else f"{us / 1e3:.2f} ms"
