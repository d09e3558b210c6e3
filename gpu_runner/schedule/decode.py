"""Which rows decode in a step, and whose pages they take to grow."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncengine.config import PAGE_SIZE
from gpu_runner.schedule.counters import Counters
from gpu_runner.schedule.departures import Departures
from gpu_runner.schedule.plan_builder import PlanDraft
from gpu_runner.schedule.precedence import Precedence
from gpu_runner.schedule.rows import Rows
from gpu_runner.schedule.running import DecodeRows, Running


class Decode:
    """Every decoding row gets its token, and a page where it needs one; if none is left, the newest make room."""

    def __init__(
        self, rows: Rows, running: Running, *, precedence: Precedence, departures: Departures, counters: Counters
    ) -> None:
        self._rows = rows
        self._running = running
        self._precedence = precedence
        self._departures = departures
        self._counters = counters

    def begin(self) -> PlanDraft:
        """A step with the rows that decode in it."""
        rows = self._running.decode
        needs_page, missing = self._pages_needed(rows)
        if missing:
            self._retract_for(missing)
            rows = self._running.decode
            needs_page, missing = self._pages_needed(rows)
        if missing:
            # Pages of the retracted come back when the step that reads them is done: the newest rows skip this step.
            self._running.store()
            runs = np.ones(len(rows), np.bool_)
            runs[needs_page[-missing:]] = False
            rows = DecodeRows(self._rows.slots, rows.slot[runs])
            needs_page, _ = self._pages_needed(rows)
        draft = PlanDraft(rows, rows.start)
        if len(needs_page):
            draft.write_pages(rows.slot[needs_page], *self._rows.grow(rows.index[needs_page]))
        rows.advance()
        self._counters.decode_tokens += len(rows)
        return draft

    def _pages_needed(self, rows: DecodeRows) -> tuple[NDArray[np.intp], int]:
        """Which of the rows begin a page with their next token, and how many of those pages cannot be had now."""
        needs_page = ((rows.start & (PAGE_SIZE - 1)) == 0).nonzero()[0]  # a row's pages hold what is computed, no more
        return needs_page, self._rows.missing_pages(len(needs_page))

    def _retract_for(self, missing: int) -> None:
        """Retract the rows that deserve their pages least until these cover `missing`. What is pinned goes when none is
        left to be retracted."""
        slots, running = self._rows.slots, self._running
        running.store()
        while missing > 0:
            victim = self._precedence.least_deserving() if running.num_active > 1 else None
            if victim is None:
                break
            growing = slots.computed[victim] == slots.num_pages[victim] * PAGE_SIZE
            missing -= int(slots.num_pages[victim]) + int(growing)
            self._departures.retract(victim)
        if missing > 0 and len(running) == running.num_active:  # no row that drains gives any back
            first = slots.request[int(running.active[0])]
            assert first is not None
            self._rows.unpin_for(missing, first.terms.tenant)
