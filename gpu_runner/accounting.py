"""The loop's account of itself: one record per turn in the process's ring, and two gauges summed up from the same."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from asyncengine.wire.accounting import RingWriter, StepRecord
from gpu_runner.schedule.plan import StepPlan, StepResult

# the loop's phases are places in the record
DRAIN, PLAN, LAUNCH, REPORT, WAIT, COMMIT, SEND, END = range(6, 14)
_COLLECTED, _AFTER_REST, _GARBAGE = 14, 17, 18
_NONE_ENTERED: Final = (0,) * (END - DRAIN)
_NOTHING: Final = (0,) * (_GARBAGE + 1 - DRAIN)
WINDOW_NS = 1_000_000_000


class _Totals(NamedTuple):
    """Sums from the start to `at`; all but `steps` in ns."""

    at: int
    steps: int = 0
    busy: int = 0
    due: int = 0
    host: int = 0


class StepAccount:
    """Clocks the turns of one loop. A turn is any number of `enter`s in the phases' order, then `end_turn`.

    Costs the loop 3 to 6 us a step: a clock reading per phase, one record, a few sums. The gauges, over the steps that
    were collected in the last second and at most one heartbeat more (0 where there was none):

        gpu_busy_permille   of the time in which the device had a step or should have had one, the share in which it
                            had: sum(end - begin) / sum(end - the end before), where a step that came after a rest
                            counts from its own begin. All by the device's clock.
        host_us_per_step    what a step takes of this process: all phases but `wait`, and no sleep.
    """

    def __init__(self, ring: RingWriter[StepRecord], clock: Callable[[], int] = time.monotonic_ns) -> None:
        """clock: in ns."""
        self._ring = ring
        self._clock = clock
        self._fields = [0] * (len(StepRecord._fields) - 1)
        self._rested = True
        self._first_after_rest = 0  # step number
        self._last_end = 0  # by the device's clock
        self._steps = self._busy = self._due = self._host = 0
        self._marks = deque([_Totals(clock())])  # by heartbeat; the first is the window's begin

    def enter(self, phase: int) -> None:
        """`phase` begins, and the one before has ended."""
        self._fields[phase] = self._clock()

    def rest(self, collect_garbage: Callable[[], object]) -> None:
        """There is nothing to do: that the device idles from here to the next step is nobody's fault."""
        self._rested = True
        began = self._clock()
        collect_garbage()
        self._fields[_GARBAGE] += self._clock() - began

    def end_turn(self, launched: StepPlan | None, collected: StepResult | None, *, running: int, waiting: int) -> None:
        """launched, collected: the steps that were in this turn. running, waiting: requests."""
        fields = self._fields
        if launched is None and collected is None:
            fields[DRAIN:END] = _NONE_ENTERED
            return
        fields[END] = end = self._clock()
        self._host += end - fields[DRAIN]
        if launched is not None:
            fields[:DRAIN] = (
                *(launched.step, launched.bucket, len(launched.row_slot), len(launched.prefill_tokens)),
                *(running, waiting),
            )
            if self._rested:
                self._rested, self._first_after_rest = False, launched.step
                fields[_AFTER_REST] = 1
        else:
            fields[:DRAIN] = (0, 0, 0, 0, running, waiting)
        if collected is not None:
            self._take_in(collected)
        self._ring.write(fields)
        fields[DRAIN:] = _NOTHING

    def gauges(self) -> dict[str, int]:
        """For a heartbeat: asking moves the window on."""
        marks = self._marks
        now = _Totals(self._clock(), self._steps, self._busy, self._due, self._host)
        marks.append(now)
        while now.at - marks[1].at >= WINDOW_NS:
            marks.popleft()
        since = marks[0]
        due, steps = now.due - since.due, now.steps - since.steps
        return {
            "gpu_busy_permille": 1000 * (now.busy - since.busy) // due if due else 0,
            "host_us_per_step": (now.host - since.host) // (1000 * steps) if steps else 0,
        }

    def _take_in(self, result: StepResult) -> None:
        fields = self._fields
        begin, end = result.device_begin_ns, result.device_end_ns
        fields[_COLLECTED:_AFTER_REST] = result.step, begin, end
        self._steps += 1
        self._host -= fields[COMMIT] - fields[WAIT]
        self._busy += end - begin
        self._due += end - (begin if result.step == self._first_after_rest else self._last_end)
        self._last_end = end
