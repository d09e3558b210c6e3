"""Which processes are silent, and for how long that is borne; what is known of an engine in which nothing moves.

    silence of a ready process     0 .. STALL_SECONDS .. hang_timeout_seconds
                                   | "stalled" in /health  | killed, and so replaced
    steps stand still with work    0 .. STANDSTILL_SECONDS -> one report in the log, and where gpu_runner's threads are

gpu_runner on a CPU computes a whole step between two heartbeats, so that its silence means less; but a process that is
stopped computes nothing.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from asyncengine.child import Child
from asyncengine.wire.accounting import SUFFIX, RingError, RingReader, StepRecord

STALL_SECONDS = 4.0
CPU_STEP_STALL_SECONDS = 60.0
CPU_STEP_FACTOR = 10
"""What a CPU's steps are to those of a GPU, in the other limits."""
STANDSTILL_SECONDS = 10.0
QUIET_SECONDS = 60.0
"""Least time between two reports."""
REPORTED_STEPS = 4
LOOK_SECONDS = 0.5
"""How often `Watchdog.look` is to be called."""


class Watchdog:
    """Watches the processes of one engine."""

    def __init__(self, *, hang_timeout_seconds: float) -> None:
        self._hang_timeout_seconds = hang_timeout_seconds
        self._looked = time.monotonic()
        self._steps = 0
        self._moved = self._looked
        self._reported = False
        self._quiet_until = 0.0

    def stalled(self, children: Collection[Child]) -> list[Child]:
        """The ready ones that have not been heard of for too long."""
        now = time.monotonic()
        return [child for child in children if child.ready and _is_stalled(child, now - child.heard)]

    def look(self, children: Collection[Child], run_dir: Path) -> str | None:
        """Kill what hangs; the report, if one is due. To be called after what has arrived was read.

        Time in which this process itself stood still, and all others perhaps with it, is nobody's silence.
        """
        now = time.monotonic()
        late = now - self._looked - LOOK_SECONDS
        self._looked = now
        if late > LOOK_SECONDS:
            self._moved += late
            for child in children:
                child.heard = min(now, child.heard + late)
        for child in children:
            limit = self._hang_timeout_seconds * (CPU_STEP_FACTOR if _computes_on_cpu(child) else 1)
            if child.ready and child.hung is None and now - child.heard > limit:
                child.hung = f"{child.name} gave no sign of life for {limit:g} s and was killed"
                child.signal(signal.SIGKILL)
        return self._report(children, run_dir, now)

    def _report(self, children: Collection[Child], run_dir: Path, now: float) -> str | None:
        runner = next((child for child in children if child.role == "gpu_runner"), None)
        if runner is None or not runner.ready:
            self._moved = now
            return None
        gauges = runner.gauges
        steps = gauges.get("steps", 0)
        if steps != self._steps or not gauges.get("running", 0) + gauges.get("waiting", 0):
            self._steps, self._moved, self._reported = steps, now, False
            return None
        limit = STANDSTILL_SECONDS * (CPU_STEP_FACTOR if _computes_on_cpu(runner) else 1)
        if self._reported or now - self._moved < limit or now < self._quiet_until:
            return None
        self._reported, self._quiet_until = True, now + QUIET_SECONDS
        for child in {runner, *self.stalled(children)}:
            child.signal(signal.SIGUSR1)
        head = f"requests wait or run, and gpu_runner has launched no step for {now - self._moved:.0f} s"
        return "\n  ".join([head, *_states(children, now), *_last_steps(run_dir)])


def _computes_on_cpu(child: Child) -> bool:
    return child.ready is not None and child.ready.info.get("device") == "cpu"


def _is_stalled(child: Child, silent: float) -> bool:
    if silent <= STALL_SECONDS:
        return False
    return silent > CPU_STEP_STALL_SECONDS or not _computes_on_cpu(child) or _is_stopped(child.process.pid)


def _is_stopped(pid: int) -> bool:
    """By SIGSTOP or a debugger; False where the system does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def _states(children: Collection[Child], now: float) -> Iterator[str]:
    for child in children:
        gauges = " ".join(f"{name}={value}" for name, value in child.gauges.items())
        phase = "" if child.ready else f", busy with: {child.phase}"
        yield f"{child.name} (pid {child.process.pid}), heard {now - child.heard:.1f} s ago{phase}: {gauges}"


def _last_steps(run_dir: Path) -> Iterator[str]:
    try:
        ring = RingReader(run_dir / f"gpu_runner.0{SUFFIX}", StepRecord)
    except (RingError, OSError):  # its process has just ended, or a stand-in keeps none
        return
    for record in ring.snapshot(max(0, ring.written - REPORTED_STEPS)):
        yield " ".join(f"{name}={value}" for name, value in record._asdict().items() if value)
    ring.close()
