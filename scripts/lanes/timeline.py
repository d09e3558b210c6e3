"""Lanes of time out of the rings of accounts: what each process and the device did when, and where the device idled.

Times here are us of CLOCK_MONOTONIC. The device has a clock of its own, of which only this is known: a step cannot have
begun before its launch did, nor have ended after its results were there.

    host     | launch N ...                                   wait ......| commit N
    device             | begin N ................. end N |               ^ no later than this
             ^ no earlier than this

Each bounds the difference of the clocks from one side, and for other steps too, but for what the clocks may have
drifted apart in between; of all bounds the tightest count. Where the host waits it is woken soon after the end, so the
upper bound is taken, less the `NOTICE_US` that this takes on an H200; else the lower one. `ClockFit.error` is the
distance of the bounds. Lengths are by the device's clock alone.

A GPU's step is timed by its first kernel and its last: the copies before and after it are in the gaps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from lanes.gaps import Gap, Interval, overlaps
from numpy.typing import NDArray

from asyncengine.wire.accounting import StepRecord, TurnRecord

STEP_PHASES = ("drain", "plan", "launch", "report", "wait", "commit", "send")
TURN_PHASES = {
    "tokenizer_proc": ("encode", "pass on"),
    "detokenizer_proc": ("detokenize", "send deltas"),
    "engine": ("read", "write"),
}
MAX_DRIFT = 1e-4
WAITED_US = 5.0
NOTICE_US = 10.0


class Slice(NamedTuple):
    begin: float
    end: float
    name: str
    args: dict[str, int]


@dataclass(frozen=True)
class Lane:
    """One process, or the device (pid 0). Slices are in order and disjoint. cpu: cores' worth of processor time."""

    name: str
    role: str
    pid: int
    slices: list[Slice]
    cpu: float | None = None

    def busy_share(self, begin: float, end: float) -> float:
        """Of that time, in anything but `wait`."""
        inside = (max(0.0, min(s.end, end) - max(s.begin, begin)) for s in self.slices if s.name != "wait")
        return sum(inside) / (end - begin)


@dataclass(frozen=True)
class DeviceStep:
    """A step as the device ran it, in the host's time.

    idle: how long the device had run nothing before; None where nothing was to do, or what was before is not known.
    """

    step: int
    begin: float
    end: float
    idle: float | None
    args: dict[str, int]


@dataclass(frozen=True)
class ClockFit:
    """shift_ns: what is added to the device's times, by step. error: us that they may be off at the most (median)."""

    shift_ns: dict[int, int]
    error: float


@dataclass(frozen=True)
class Timeline:
    """lanes: the device's, gpu_runner's, those of the other processes."""

    lanes: list[Lane]
    steps: list[DeviceStep]
    clock_error: float
    begin: float
    end: float
    lost_records: int = 0
    host_us: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By phase of the loop: median and 99th percentile per step; `total` is all but `wait`."""

    @property
    def gaps(self) -> list[Gap]:
        """The device's idle time before each step that did not come after a rest."""
        return [Gap(s.step, s.begin - s.idle, s.begin) for s in self.steps if s.idle is not None]

    @property
    def device_busy_share(self) -> float:
        """Of the time in which the device had a step or should have had one; as the gauge `gpu_busy_permille`."""
        busy = sum(step.end - step.begin for step in self.steps)
        return busy / (busy + sum(gap.length for gap in self.gaps)) if busy else 0.0

    def gap_causes(self) -> list[dict[str, float]]:
        """us of each of `gaps` by what gpu_runner did meanwhile, the most first; `other` is what no phase covers."""
        loop = self.lanes[1].slices
        begins = [s.begin for s in loop]
        causes = []
        for gap in self.gaps:
            first = max(0, bisect_right(begins, gap.begin) - 1)
            near = loop[first : bisect_left(begins, gap.end)]
            found = overlaps(gap, (Interval(s.begin, s.end, s.name) for s in near))
            causes.append(dict(sorted(found.items(), key=lambda item: -item[1])))
        return causes


def phases(record: StepRecord) -> list[tuple[str, int, int]]:
    """(name, begin, end) of each in ns; those that the turn had none of are left out."""
    begins = [(name, getattr(record, name)) for name in STEP_PHASES if getattr(record, name)]
    return [(name, begin, end) for (name, begin), (_, end) in pairwise([*begins, ("end", record.end)])]


def loop_slices(records: Iterable[StepRecord]) -> list[Slice]:
    slices = []
    for record in records:
        for name, begin, end in phases(record):
            step = record.collected if name in ("wait", "commit", "send") else record.step
            args = {"step": step} if step else {}
            if name == "plan":
                args |= {"running": record.running, "waiting": record.waiting}
            elif name == "launch":
                args |= _sizes(record)
            slices.append(Slice(begin / 1e3, end / 1e3, name, args))
    return slices


def turn_slices(records: Iterable[TurnRecord], role: str) -> list[Slice]:
    first, second = TURN_PHASES[role]
    slices = []
    for record in records:
        args = {name: getattr(record, name) for name in ("messages", "items", "open", "waiting")}
        slices.append(Slice(record.begin / 1e3, record.middle / 1e3, first, args))
        slices.append(Slice(record.middle / 1e3, record.end / 1e3, second, args))
    return slices


def _sizes(record: StepRecord) -> dict[str, int]:
    return {"rows": record.rows, "prefill_tokens": record.prefill_tokens, "bucket": record.bucket}


def fit_clock(records: Sequence[StepRecord]) -> ClockFit:
    """Between the device's clock and the host's; see above. All zero where both may be the same clock."""
    launches = {record.step: record.launch for record in records if record.step}
    ends = [record for record in records if record.device_end]
    if not ends:
        return ClockFit({}, 0.0)
    steps = [record.collected for record in ends]
    # as differences from about the right shift, which is too large a number for floating point
    about = ends[0].commit - ends[0].device_end
    upper = np.array([record.commit - record.device_end - about for record in ends], dtype=np.float64)
    lower = np.array(
        [launches[r.collected] - r.device_begin - about if r.collected in launches else -np.inf for r in ends]
    )
    if (lower <= -about).all() and (upper >= -about).all():
        return ClockFit(dict.fromkeys(steps, 0), 0.0)
    drift = MAX_DRIFT * np.array([record.commit - ends[0].commit for record in ends], dtype=np.float64)
    upper = _tightened(upper, drift)
    lower = -_tightened(-lower, drift)
    waited = any(record.commit - record.wait > 1e3 * WAITED_US for record in ends)
    shift = upper - np.minimum(1e3 * NOTICE_US, (upper - lower) / 2) if waited else lower
    shifts = {step: about + int(ns) for step, ns in zip(steps, shift, strict=True)}
    return ClockFit(shifts, float(np.median(upper - lower)) / 1e3)


def _tightened(bounds: NDArray[np.float64], drift: NDArray[np.float64]) -> NDArray[np.float64]:
    """Upper bounds, each made as tight as all others allow, which hold at other times but for the drift until there."""
    from_earlier = np.minimum.accumulate(bounds - drift) + drift
    from_later = np.minimum.accumulate((bounds + drift)[::-1])[::-1] - drift
    return np.minimum(from_earlier, from_later)


def device_steps(records: Sequence[StepRecord], fit: ClockFit) -> list[DeviceStep]:
    launched = {record.step: record for record in records if record.step}
    steps: list[DeviceStep] = []
    last_step = last_end = -1
    for record in records:
        if not record.device_end:
            continue
        step, shift = record.collected, fit.shift_ns[record.collected]
        launch = launched.get(step)
        follows = step == last_step + 1 and launch is not None and not launch.after_rest
        steps.append(
            DeviceStep(
                step=step,
                begin=(record.device_begin + shift) / 1e3,
                end=(record.device_end + shift) / 1e3,
                idle=(record.device_begin - last_end) / 1e3 if follows else None,
                args={"step": step} | (_sizes(launch) if launch else {}),
            )
        )
        last_step, last_end = step, record.device_end
    return steps


def host_us(records: Iterable[StepRecord]) -> dict[str, tuple[float, float]]:
    """Of the turns that both launched a step and collected one."""
    turns = [
        {name: (end - begin) / 1e3 for name, begin, end in phases(record)}
        for record in records
        if record.step and record.collected
    ]
    if not turns:
        return {}
    columns = {name: [turn.get(name, 0.0) for turn in turns] for name in STEP_PHASES}
    columns["total"] = [sum(turn.values()) - turn.get("wait", 0.0) for turn in turns]
    return {name: (float(np.median(us)), float(np.percentile(us, 99))) for name, us in columns.items()}


def make_timeline(records: Sequence[StepRecord], processes: Sequence[Lane], *, lost_records: int = 0) -> Timeline:
    """records: gpu_runner's, whose time is the timeline's. processes: gpu_runner's lane and then all others."""
    fit = fit_clock(records)
    steps = device_steps(records, fit)
    slices = [Slice(step.begin, step.end, "prefill" if _prefills(step) else "decode", step.args) for step in steps]
    loop = processes[0].slices
    begin = min((times[0].begin for times in (loop, slices) if times), default=0.0)
    end = max((times[-1].end for times in (loop, slices) if times), default=0.0)
    others = [replace(lane, slices=[s for s in lane.slices if s.begin >= begin]) for lane in processes[1:]]
    lanes = [Lane("device", "device", 0, slices), processes[0], *others]
    return Timeline(
        lanes=lanes,
        steps=steps,
        clock_error=fit.error,
        begin=begin,
        end=end,
        lost_records=lost_records,
        host_us=host_us(records),
    )


def _prefills(step: DeviceStep) -> bool:
    return bool(step.args.get("prefill_tokens"))
