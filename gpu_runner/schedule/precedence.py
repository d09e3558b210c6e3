"""Who goes before whom: which prompts a request that starts passes, and which rows give up their place for others."""

from __future__ import annotations

import numpy as np

from gpu_runner.schedule.ageing import MAX_OVERTAKES, MAX_OVERTAKES_OF_BACKGROUND
from gpu_runner.schedule.plan import Int32
from gpu_runner.schedule.request import Request
from gpu_runner.schedule.running import Running
from gpu_runner.schedule.slots import Slots
from gpu_runner.schedule.tenants import Tenants


class Precedence:
    """Compares requests that wait with rows that run: by class, then by what their tenants were served, and with policy
    priority by that, within a tenant. Decides, changes nothing. `Tenants` must know of all decoded tokens."""

    def __init__(self, slots: Slots, running: Running, tenants: Tenants, *, by_priority: bool) -> None:
        self._slots = slots
        self._running = running
        self._tenants = tenants
        self._by_priority = by_priority

    def place(self, request: Request) -> int:
        """Before which of the rows that prefill a request's prompt is computed: an index of `Running.prefill`."""
        prefill = self._running.prefill
        place = len(prefill)
        while place and self._passes(request, prefill[place - 1]):
            place -= 1
        return place

    def place_again(self, slot: int) -> int:
        """The same of a row that started before and had to wait for copies: it goes before rows of its tenant, class
        and priority that started since, too."""
        slots, prefill = self._slots, self._running.prefill
        request = slots.request[slot]
        assert request is not None
        place = len(prefill)
        while place and (self._passes(request, prefill[place - 1]) or self._is_before(slot, prefill[place - 1])):
            place -= 1
        return place

    def _is_before(self, slot: int, other: int) -> bool:
        slots = self._slots
        alike = all(of[slot] == of[other] for of in (slots.account, slots.background, slots.priority))
        return alike and bool(slots.admitted[slot] < slots.admitted[other])

    def _passes(self, request: Request, slot: int) -> bool:
        """A tenant passes rows of another that was served as much even without what the row's prompt has had yet. So
        the other does not pass back as soon as the first one's chunk is counted. It never passes its own rows."""
        slots, served = self._slots, self._tenants.served
        other = slots.request[slot]
        assert other is not None
        if request.background != other.background:
            return other.background and other.overtaken < MAX_OVERTAKES_OF_BACKGROUND
        if other.overtaken >= MAX_OVERTAKES:
            return False
        if request.account == other.account:
            return self._by_priority and request.priority < slots.priority[slot]
        had = int(slots.charged[slot] - slots.begun[slot])
        return bool(served[request.account] <= served[other.account] - had)

    def may_displace(self, request: Request) -> bool:
        """Whether it may be worth looking for a row that gives up its place for `request`; costs next to nothing."""
        others = self._slots.num_background and not request.background
        return bool(others or self._by_priority or len(self._tenants) > 1)

    def displaced_by(self, request: Request) -> int | None:
        """The row that gives up its place so that `request` can start, None if each keeps it.

        Of the background for an interactive one: the newest row. Else of the same class: with policy priority, the
        newest of its tenant's least important rows, if they are less important than it; and the newest row of the
        tenant that was served most of those that were served more than its own and will still have as many rows.
        """
        slots = self._slots
        rows = self._running.active
        free = rows[~slots.keeps_place[rows]]
        if not request.background:
            behind = free[slots.background[free]]
            if len(behind):
                return self._last(behind)
        free = free[slots.background[free] == request.background]
        if self._by_priority:
            own = free[(slots.account[free] == request.account) & (slots.priority[free] > request.priority)]
            if len(own):
                return self._last(own)
        if len(self._tenants) == 1 or not len(free):
            return None
        served = self._tenants.served
        counts = np.bincount(slots.account[rows], minlength=len(served))
        accounts = slots.account[free]
        more_rows = counts[accounts] > counts[request.account] + 1
        rich = free[more_rows & (served[accounts] > served[request.account])]
        if not len(rich):
            return None
        return self._last(rich[served[slots.account[rich]] == served[slots.account[rich]].max()])

    def least_deserving(self) -> int | None:
        """The row whose pages others take to grow: the newest one, of the background if there are any, with policy
        priority of the least important. Those that have lost their pages too often already keep them; None if all have.
        """
        slots, rows = self._slots, self._running.active
        rows = rows[~slots.keeps_pages[rows]]
        if not len(rows):
            return None
        behind = rows[slots.background[rows]]
        return self._last(behind if len(behind) else rows)

    def _last(self, rows: Int32) -> int:
        slots = self._slots
        if self._by_priority:
            rows = rows[slots.priority[rows] == slots.priority[rows].max()]
        return int(rows[slots.admitted[rows].argmax()])
