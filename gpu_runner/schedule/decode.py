"""Which rows decode in a step, and whose pages they take to grow."""

from __future__ import annotations

import numpy as np

from asyncengine.config import PAGE_SIZE
from gpu_runner.schedule.counters import Counters
from gpu_runner.schedule.departures import Departures
from gpu_runner.schedule.plan_builder import PlanDraft
from gpu_runner.schedule.precedence import Precedence
from gpu_runner.schedule.rows import Rows
from gpu_runner.schedule.running import DecodeRows, Running


class Decode:
    """Every decoding row gets its token, and a page where it needs one; if none is left, the newest make room.

    While there are plenty, all rows take the pages of the next PAGE_SIZE steps as soon as one of them needs its own:

        step     N - 1 | N              | N + 1 | ... | N + 15 | N + 16         | ...
        rows     -     | a page each    | -     |     | -      | a page each    |

    So most steps give nobody a page and have none to upload, and looking who needs one, which costs the same for one
    page as for hundreds, is done once for all. A row holds half a page more for that, on average.
    """

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
        draft = PlanDraft(rows, rows.start) if rows.steps_before_growth > 0 else self._begin_with_growth(rows)
        draft.decode.advance()
        self._counters.decode_tokens += draft.num_decode_rows
        return draft

    def _begin_with_growth(self, rows: DecodeRows) -> PlanDraft:
        """The same where some row has no page for its token."""
        pages = self._rows
        growing = rows.short_of_pages(PAGE_SIZE)
        # Nobody is retracted for what others need later only: each must find another page, as `Admission` sees to.
        if not pages.has_pages(len(growing) + len(rows)) or pages.missing_pages(len(growing)):
            growing = rows.short_of_pages(1)
            if missing := pages.missing_pages(len(growing)):
                self._retract_for(missing)
                rows = self._running.decode
                growing = rows.short_of_pages(1)
                missing = pages.missing_pages(len(growing))
            if missing:
                # Pages of the retracted come back when the step that reads them is done: the newest rows skip this one.
                self._running.store()
                runs = np.ones(len(rows), np.bool_)
                runs[growing[-missing:]] = False
                rows = DecodeRows(pages.slots, rows.slot[runs])
                growing = rows.short_of_pages(1)
        draft = PlanDraft(rows, rows.start)
        if len(growing):
            draft.write_pages(*pages.grow(rows, growing))
        return draft

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
