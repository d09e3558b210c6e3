"""Which waiting requests start in a step, before whose prompts, and in whose place."""

from __future__ import annotations

from collections.abc import Callable

from asyncengine.config import SchedulingPolicy
from gpu_runner.schedule.counters import Counters
from gpu_runner.schedule.departures import Departures
from gpu_runner.schedule.masked_rows import MaskedRows
from gpu_runner.schedule.plan_builder import PlanDraft
from gpu_runner.schedule.precedence import Precedence
from gpu_runner.schedule.prefill import Prefill
from gpu_runner.schedule.queues import WaitingQueue
from gpu_runner.schedule.request import Request
from gpu_runner.schedule.rows import Rows
from gpu_runner.schedule.running import Running
from gpu_runner.schedule.slots import State

STEPS_BETWEEN_LOOKS = 8


class Admission:
    """Takes requests from the queue, in its order, while tokens, rows and pages allow.

    The first one that finds no room blocks those behind it, but for what is shorter and fits, until it starts: rows
    that it goes before give up their places for it (`Precedence`), and what ends leaves it room.
    """

    def __init__(
        self,
        queue: WaitingQueue,
        rows: Rows,
        running: Running,
        *,
        prefill: Prefill,
        precedence: Precedence,
        departures: Departures,
        masked_rows: MaskedRows,
        counters: Counters,
        policy: SchedulingPolicy,
        max_num_seqs: int,
        clock: Callable[[], int],
    ) -> None:
        """clock: as in `Scheduler`."""
        self._queue = queue
        self._rows = rows
        self._slots = rows.slots
        self._running = running
        self._prefill = prefill
        self._precedence = precedence
        self._departures = departures
        self._masked_rows = masked_rows
        self._counters = counters
        self._policy = policy
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._blocked: Request | None = None  # the queue's head, if the last step had no room for it
        self._refused = 0  # pushes of the queue when it had been found that nobody gives way to `_blocked`; 0 = not yet
        self._room_after = 0  # the step with which the pages come back of rows that gave way to it

    @property
    def lacks_pages(self) -> bool:
        """Whether the first request that waits found no room for want of pages, not of a row."""
        return self._blocked is not None and len(self._running) < self._max_num_seqs

    @property
    def rows_to_fill(self) -> int:
        """How many of the requests that wait may be about to start; none while the first of them finds no room."""
        return 0 if self._blocked is not None else self._max_num_seqs - len(self._running)

    @property
    def startable_tokens(self) -> int:
        """Of the requests that wait, as many as there are rows for; if not all, about."""
        waiting, rows = len(self._queue), self._max_num_seqs - len(self._running)
        tokens = self._queue.num_tokens
        return tokens if waiting <= rows else tokens * rows // waiting

    def is_due(self, step: int) -> bool:
        """Whether a request may start in this step."""
        if not len(self._queue):
            self._blocked = None
            return False
        blocked = self._blocked
        full = self._running.num_active >= self._max_num_seqs
        return not (blocked is not None and full and self._is_refused(step) and blocked.rid in self._queue)

    def make_room(self, step: int) -> None:
        """A request that found no room takes the place of rows that it goes before."""
        blocked = self._blocked
        if blocked is None or self._is_refused(step) or blocked.rid not in self._queue:
            return
        # What is first only by its age takes no row from others, but must not keep one from the request that would.
        taker = self._queue.wanted() if blocked.aged else blocked
        assert taker is not None
        if not self._precedence.may_displace(taker):
            self._refused = self._queue.pushes
            return
        slots, completed = self._slots, self._rows.pool.completed_epoch
        if self._room_after > completed:
            return
        if blocked.slot < 0 and not slots.num_free:
            return  # a retracted row would keep its slot: only one that ends makes room
        if blocked.slot >= 0 and slots.last_step[blocked.slot] > completed:
            return  # it waits for its own last step
        victim = self._precedence.displaced_by(taker)
        if victim is None:
            self._refused = self._queue.pushes
            return
        lacking = self._rows.lacking_pages(blocked, watermark=len(self._running))
        # Rows that drain are not counted: their places are free with the next commits.
        while victim is not None and (lacking > 0 or self._running.num_active >= self._max_num_seqs):
            lacking -= int(slots.num_pages[victim]) + 1  # and the one to grow
            self._departures.retract(victim)
            self._room_after = max(self._room_after, int(slots.last_step[victim]))
            victim = self._precedence.displaced_by(taker)

    def fill(self, budget: int, draft: PlanDraft) -> None:
        """Place chunks of the rows that prefill, and start requests, while `budget` tokens last."""
        before, self._blocked = self._blocked, None
        self._pass_prefill(budget)
        self._admit(self._prefill.go_on(budget, draft), draft)
        if self._blocked is not before:
            self._refused = 0

    def loaded(self, slot: int) -> None:
        """A row has what it waited for, and prefills the rest."""
        self._join_prefill(slot, self._precedence.place_again(slot))

    def _join_prefill(self, slot: int, place: int) -> None:
        """A row prefills from now on, before those that are in this place of their order and behind."""
        prefill = self._running.prefill
        for behind in prefill[place:]:
            passed = self._slots.request[behind]
            assert passed is not None
            passed.overtaken += 1
        prefill.insert(place, slot)

    def _is_refused(self, step: int) -> bool:
        """Nobody gives way to what is blocked. Until a request comes or a row ends, only what tenants are served can
        change that: every so many steps is often enough to look."""
        return self._refused == self._queue.pushes and step % STEPS_BETWEEN_LOOKS != 0

    def _pass_prefill(self, budget: int) -> None:
        """Start waiting requests whose prompts go before the rest of ones that are under way, as far as `budget` tokens
        would reach."""
        prefill = self._running.prefill
        while prefill and (request := self._queue.head()) is not None:
            place = self._precedence.place(request)
            # One whose turn came by its age starts though it passes nobody: behind it are others that may.
            if not request.aged and (place == len(prefill) or self._prefill.left(prefill[:place]) >= budget):
                return
            if not self._start(request, place):
                self._blocked = request
                return

    def _admit(self, budget: int, draft: PlanDraft) -> None:
        """Start waiting requests, in the queue's order, while tokens, rows and pages allow."""
        while budget > 0:
            request = self._queue.head()
            if request is None:
                return
            if request is self._blocked or not self._start(request, len(self._running.prefill)):
                self._blocked = request
                request = self._instead_of(request)
                if request is None or not self._start(request, len(self._running.prefill)):
                    return
            if self._slots.state.item(request.slot) == State.PREFILL:
                budget = self._prefill.place(request.slot, budget, draft)

    def _instead_of(self, head: Request) -> Request | None:
        """Which may start though `head` cannot."""
        if head.slot < 0 and not self._slots.num_free:
            # All slots are kept, some by rows that were retracted: if those waited for it, it could wait for them.
            return self._queue.first_with_slot() if len(self._running) < self._max_num_seqs else None
        return self._filler(head)

    def _filler(self, head: Request) -> Request | None:
        """A shorter request to use pages that are too few for `head`; none where rows make room for that instead."""
        if self._policy == "priority" or self._room_after > self._rows.pool.completed_epoch:
            return None
        if len(self._running) >= self._max_num_seqs:
            return None
        filler = self._queue.filler(head)
        if filler is None or not self._rows.has_room(len(filler.prompt), watermark=len(self._running)):
            return None
        return filler

    def _start(self, request: Request, place: int) -> bool:
        """Make a waiting request the prefilling row in this place of their order; False when it has to wait."""
        num_running = len(self._running)
        if num_running >= self._max_num_seqs:
            return False
        # One page to grow for every running row, so that what is admitted now is not retracted in the next steps.
        retracted, fresh = request.slot >= 0, request.fresh
        if not self._rows.start(request, watermark=num_running, alone=not num_running):
            return False
        self._queue.take(request, resumed=not fresh)
        slots, slot, counters = self._slots, request.slot, self._counters
        if slots.state.item(slot) == State.LOADING:
            self._running.loading.append(slot)
        else:
            self._join_prefill(slot, place)
        counters.prefix_query_tokens += slots.known.item(slot)
        counters.prefix_hit_tokens += slots.computed.item(slot)
        if not request.started_ns:
            request.started_ns = self._clock()
        if request.params.structured is not None and not retracted:
            self._masked_rows.opened(slot, request.params.structured, request.resumed)
        return True
