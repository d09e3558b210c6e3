"""Rows that leave the batch: for good, or to wait for pages again."""

from __future__ import annotations

from collections.abc import Callable

from gpu_runner.schedule.charges import Charges
from gpu_runner.schedule.counters import Counters
from gpu_runner.schedule.prefill_marks import PrefillMarks
from gpu_runner.schedule.prompt_scores import PromptScores
from gpu_runner.schedule.queues import WaitingQueue
from gpu_runner.schedule.rows import Rows
from gpu_runner.schedule.running import Running


class Departures:
    """Has everybody who knows of a row let go of it, in the order in which they need one another."""

    def __init__(
        self,
        rows: Rows,
        running: Running,
        queue: WaitingQueue,
        *,
        charges: Charges,
        marks: PrefillMarks,
        prompt_scores: PromptScores,
        counters: Counters,
        clock: Callable[[], int],
    ) -> None:
        """clock: as in `Scheduler`."""
        self._rows = rows
        self._running = running
        self._queue = queue
        self._charges = charges
        self._marks = marks
        self._prompt_scores = prompt_scores
        self._counters = counters
        self._clock = clock

    def end(self, slot: int) -> None:
        """The row is over, whether it runs or waits."""
        request = self._rows.slots.request[slot]
        assert request is not None
        self._queue.remove(request.rid)  # where a retracted row waits
        self._running.leave(slot)
        self._charges.rest(slot)
        self._queue.tenants.leave(request.account)
        self._prompt_scores.forget(slot)
        self._marks.forget(slot)
        self._rows.end(slot)

    def retract(self, slot: int) -> None:
        """As `set_aside`, because others want the row's pages, which may befall a row only so often."""
        self.set_aside(slot)
        request = self._rows.slots.request[slot]
        assert request is not None
        request.preemptions += 1
        self._counters.preemptions += 1

    def set_aside(self, slot: int) -> None:
        """Take the row's pages, keeping what it computed in the prefix tree, and put it at the head of its tenant's."""
        self._running.leave(slot)
        self._charges.rest(slot)
        self._queue.push(self._rows.retract(slot))
        self._marks.retracted(slot, self._clock())
