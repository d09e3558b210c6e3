"""The GPU loop. Please be paranoid about changes to this file: it runs once per step, thousands of times a second.

Invariants
    1. Step N is launched before step N-1 is read. Nothing here waits for the device except `executor.collect()`, and
       that only with a newer step already launched, or nothing left to launch.
    2. No Python loop over the rows of a batch; only over rows that start or end (inside the scheduler).
    3. No logging, no allocation that grows, no blocking send. Garbage is collected only when nothing runs.
    4. Frames leave in step order; a frame is sent before the next step is planned.
    5. Rows within a structure run when their masks are there; others never wait for those, but for MASK_SECONDS at
       most, in which the device has a step to do.
    6. Copies of KV pages to and from host memory are started and asked after, never waited for while a step can run.
    7. The cache's bookkeeping is checked when nothing has run for a while, or nothing can.
    8. When detokenizers are so far behind that frames pile up, no step is launched: tokens are never dropped.

Host budget: all of a turn but waiting for the device under 150 us at any batch size, and at batch 512 under 1.5 times
batch 1 (`scripts/bench_host.py` without a GPU, `scripts/bench_step.py` with one, `scripts/profile_host.py` of a running
engine: every turn is in its ring of accounts). A request costs some 100 us more, once: 20 where it arrives, 40 in the
plan in which it starts, the rest where it ends and in steps whose rows are no longer those of the one before.

    host    drain | plan N+1 | launch N+1 | wait N | commit N | send N | drain | plan N+2 | ...
    device  ---- step N ------------------][---- step N+1 -----------------------------][----
"""

from __future__ import annotations

import gc
from collections import deque
from typing import Protocol

from asyncengine.wire.sidecar import HEARTBEAT_SECONDS, Reporter
from gpu_runner.accounting import COMMIT, DRAIN, LAUNCH, PLAN, REPORT, SEND, WAIT, StepAccount
from gpu_runner.grammar.gate import GrammarGate
from gpu_runner.inbox import Inbox
from gpu_runner.outbox import Outbox
from gpu_runner.schedule.plan import StepPlan, StepResult
from gpu_runner.schedule.scheduler import Scheduler
from gpu_runner.schedule.transfers import Transfers

STEPS_IN_FLIGHT = 2
_IDLE_MS = int(HEARTBEAT_SECONDS * 1000)
_BACKLOG_POLL_MS = 1
_MASK_MS = 1
_COPY_MS = 1
_STANDSTILL_MS = 1
MASK_SECONDS = 200e-6
"""What a plan waits for masks that are being computed, while the device is busy with a step."""


class Executor(Protocol):
    """What the loop needs of a device."""

    host_pages: int
    """Of host memory for KV; without, the last two are not called."""

    def launch(self, plan: StepPlan) -> None:
        """Start a step; returns without waiting for it."""

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight."""

    def transfer(self, batch: Transfers) -> None:
        """Start copies; returns without waiting for them."""

    def transferred(self) -> int:
        """The ticket of the last batch that is done; never waits."""


class Loop:
    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        inbox: Inbox,
        outbox: Outbox,
        reporter: Reporter,
        account: StepAccount,
        grammar: GrammarGate | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._inbox = inbox
        self._outbox = outbox
        self._reporter = reporter
        self._account = account
        self._grammar = grammar
        self._in_flight: deque[StepPlan] = deque()
        self._has_host_pages = executor.host_pages > 0
        self._copies_begun = self._copies_done = -1  # tickets

    def heartbeat(self) -> None:
        gauges = self._scheduler.gauges() | self._account.gauges() | {"malformed": self._inbox.malformed}
        for name, choices in self._inbox.gauges().items():
            gauges[name] += choices
        self._reporter.heartbeat(gauges)

    def prepare(self) -> None:
        """To be called before anybody hears that this process is ready: it takes a tenth of a second. What start-up has
        made is never looked through again."""
        gc.collect()
        gc.freeze()
        gc.disable()

    def run(self) -> None:
        """Serve until the process is told to stop (SystemExit from the signal handler)."""
        while True:
            self.turn()

    def turn(self) -> None:
        """One round: take in what arrived, launch at most one step, read at most one."""
        scheduler, enter = self._scheduler, self._account.enter
        enter(DRAIN)
        self._inbox.drain()
        flowing = self._outbox.flush()
        enter(PLAN)
        if self._copies_done != self._copies_begun:
            self._hear_of_copies()
        if scheduler.masked_rows.num_held and self._in_flight and self._grammar is not None:
            self._grammar.await_masks(MASK_SECONDS)
        plan = scheduler.plan() if flowing else None
        if plan is not None:
            enter(LAUNCH)
            self._executor.launch(plan)
            self._in_flight.append(plan)
        if self._has_host_pages:
            self._begin_copies()
        if self._grammar is not None:
            self._grammar.ask()
        if self._reporter.heartbeat_due():  # before the wait: what arrived shows without a step's delay
            enter(REPORT)
            self.heartbeat()
        result = None
        if self._in_flight and (plan is None or len(self._in_flight) == STEPS_IN_FLIGHT):
            enter(WAIT)
            result = self._executor.collect()
            enter(COMMIT)
            output = scheduler.commit(self._in_flight.popleft(), result)
            if self._grammar is not None:
                self._grammar.ask()
            enter(SEND)
            self._outbox.send(output)
        closed = scheduler.take_closed()
        if closed is not None:
            self._outbox.send(closed)
        self._account.end_turn(plan, result, running=scheduler.num_running, waiting=len(scheduler.queue))
        if plan is None and not self._in_flight:
            self._idle(flowing, stands=result is None)

    def _begin_copies(self) -> None:
        batch = self._scheduler.take_transfers()
        if batch is not None:
            self._executor.transfer(batch)
            self._copies_begun = batch.ticket

    def _hear_of_copies(self) -> None:
        done = self._executor.transferred()
        if done != self._copies_done:
            self._copies_done = done
            self._scheduler.transferred(done)

    def _idle(self, flowing: bool, *, stands: bool) -> None:
        """stands: nothing was in flight either."""
        if not flowing:
            self._inbox.wait(_BACKLOG_POLL_MS)
        elif self._scheduler.copying:
            self._inbox.wait(_COPY_MS)
        elif not self._scheduler.has_work:
            self._account.rest(gc.collect)
            while not self._inbox.wait(_IDLE_MS):
                if self._reporter.heartbeat_due():
                    self.heartbeat()
                self._scheduler.audit()
        elif self._scheduler.masked_rows.waiting:
            self._inbox.wait(_MASK_MS)
        elif stands:  # with requests that only lost pages can keep from running
            self._scheduler.audit()
            self._inbox.wait(_STANDSTILL_MS)
