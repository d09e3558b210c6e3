"""Arithmetic on the intervals in which a GPU's kernels ran: how busy it was, and where it idled between steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LONGEST_GAPS = 5


class Interval(NamedTuple):
    """In us; `name` is a kernel's, or a phase's of the host."""

    begin: float
    end: float
    name: str = ""


class Gap(NamedTuple):
    """step: index of the step before it."""

    step: int
    begin: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.begin


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Their union as disjoint intervals in order; those that touch become one."""
    result: list[Interval] = []
    for begin, end, _ in sorted(intervals):
        if result and begin <= result[-1].end:
            result[-1] = Interval(result[-1].begin, max(result[-1].end, end))
        else:
            result.append(Interval(begin, end))
    return result


def step_gaps(kernels: Sequence[Interval], step_begins: Sequence[float]) -> list[Gap]:
    """Idle time between consecutive steps. A kernel belongs to the last step that began before it did.

    The gap after step i ends with the first kernel of step i + 1; a step without kernels has none before it or after.
    Its length is 0 where the steps' kernels overlap.
    """
    begins = np.array([kernel.begin for kernel in kernels])
    ends = np.array([kernel.end for kernel in kernels])
    owner = np.searchsorted(np.array(step_begins), begins, side="right") - 1
    gaps = []
    for step in range(len(step_begins) - 1):
        before, after = owner == step, owner == step + 1
        if before.any() and after.any():
            last, first = float(ends[before].max()), float(begins[after].min())
            gaps.append(Gap(step, min(last, first), first))
    return gaps


def overlaps(gap: Gap, phases: Iterable[Interval]) -> dict[str, float]:
    """Microseconds of a gap by the phase the host was in; `other` is what no phase covers. Phases are disjoint."""
    found: dict[str, float] = {}
    for begin, end, name in phases:
        shared = min(end, gap.end) - max(begin, gap.begin)
        if shared > 0:
            found[name] = found.get(name, 0.0) + shared
    other = gap.length - sum(found.values())
    return found | {"other": other} if other > 0 else found


@dataclass(frozen=True)
class Report:
    """Times in us. idle: by percentile. kernels: name, us per step, launches per step, the longest first.

    longest: the longest gaps with what the host did in them.
    """

    steps: int
    step_us: float
    busy_us: float
    kernels_per_step: float
    idle: dict[str, float]
    kernels: list[tuple[str, float, float]]
    longest: list[tuple[Gap, dict[str, float]]]

    @property
    def busy_share(self) -> float:
        return self.busy_us / self.step_us


def analyse(kernels: Sequence[Interval], step_begins: Sequence[float], phases: Sequence[Interval]) -> Report:
    """Of the steps that begin and end within `step_begins`; the last one of those only ends the one before."""
    first, last = step_begins[0], step_begins[-1]
    inside = [kernel for kernel in kernels if first <= kernel.begin < last]
    steps = len(step_begins) - 1
    busy = sum(min(end, last) - begin for begin, end, _ in merged(inside))
    gaps = step_gaps(kernels, step_begins)
    lengths = [gap.length for gap in gaps] or [0.0]
    totals: dict[str, list[float]] = {}
    for begin, end, name in inside:
        totals.setdefault(name, []).append(end - begin)
    top = sorted(totals.items(), key=lambda item: -sum(item[1]))
    return Report(
        steps=steps,
        step_us=(last - first) / steps,
        busy_us=busy / steps,
        kernels_per_step=len(inside) / steps,
        idle={
            "p50": float(np.percentile(lengths, 50)),
            "p99": float(np.percentile(lengths, 99)),
            "max": max(lengths),
        },
        kernels=[(name, sum(times) / steps, len(times) / steps) for name, times in top],
        longest=[
            (gap, overlaps(gap, phases))
            for gap in sorted(gaps, key=lambda gap: -gap.length)[:LONGEST_GAPS]
            if gap.length
        ],
    )
