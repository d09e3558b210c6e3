"""The rings of an engine that never ran: steps of one length, on a device with a clock of its own."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from asyncengine.wire.accounting import RingWriter, StepRecord, TurnRecord

DEVICE_CLOCK_NS = 1_700_000_000_000_000_000
"""What the device's clock shows when the host's shows 0."""
STEP_US = 700
GAP_US = 6
DRAIN_US, PLAN_US, LAUNCH_US, COMMIT_US, SEND_US = 4, 16, 25, 14, 15
TO_IDLE_DEVICE_US = 20
"""From the begin of a launch to that of its step, when nothing runs."""
WAKE_UP_US = 11
"""From the end of a step to that of the wait for it."""
LATE_STEP, LATE_PLAN_US = 30, 800
LATE_GAP_US = WAKE_UP_US + COMMIT_US + SEND_US + DRAIN_US + LATE_PLAN_US + TO_IDLE_DEVICE_US - GAP_US - STEP_US
"""The device's idle time before the step whose plan took so long."""


def write_rings(run_dir: Path, steps: int, keep: ExitStack) -> None:
    """A ring of each role, until `keep` is closed. The first step prefills, the others decode 64 rows."""

    def ns(us: int) -> int:
        return 50_000_000 + 1000 * us

    loop = RingWriter(run_dir, "gpu_runner", 0, StepRecord)
    detokenizer, engine, tokenizer = (
        RingWriter(run_dir, role, 0, TurnRecord) for role in ("detokenizer_proc", "engine", "tokenizer_proc")
    )
    for ring in (loop, detokenizer, engine, tokenizer):
        keep.callback(ring.close)
    tokenizer.write((ns(-900), ns(-400), ns(-300), 2, 90, 0, 0))  # before the loop's first turn
    tokenizer.write((ns(100), ns(150), ns(200), 1, 40, 0, 0))
    now = begin = end = 0
    for step in range(steps + 1):  # collected; the turn launches the next one
        drain = now
        plan = drain + DRAIN_US
        launch = plan + (LATE_PLAN_US if step + 1 == LATE_STEP else PLAN_US)
        wait = launch + LAUNCH_US
        commit = max(wait, end + WAKE_UP_US)
        now = commit + COMMIT_US + SEND_US if step else wait
        launches = step < steps
        loop.write(
            (
                *((step + 1, 64, 64, 0 if step else 50, 64, 1) if launches else (0, 0, 0, 0, 64, 1)),
                *(ns(drain), ns(plan), ns(launch) if launches else 0, 0),
                *((ns(wait), ns(commit), ns(commit + COMMIT_US)) if step else (0, 0, 0)),
                *(ns(now), step),
                *((DEVICE_CLOCK_NS + ns(begin), DEVICE_CLOCK_NS + ns(end)) if step else (0, 0)),
                *(int(step == 0), 0),
            )
        )
        if step:
            detokenizer.write((ns(now + 40), ns(now + 190), ns(now + 210), 1, 64, 64, 0))
            engine.write((ns(now + 260), ns(now + 330), ns(now + 600), 1, 64, 64, 0))
        begin = max(end + GAP_US if step else 0, launch + TO_IDLE_DEVICE_US)
        end = begin + STEP_US
