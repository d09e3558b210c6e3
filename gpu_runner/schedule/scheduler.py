"""Iteration-level continuous batching: what runs in the next step, and what the last one meant.

Two steps are in flight, so `plan()` for step N+1 runs before step N has been read:

    host    plan N | launch N | collect N-1, commit N-1 | plan N+1 | launch N+1 | collect N, commit N | ...
    device  [------- step N-1 -------][------- step N -------][------- step N+1 -------]

    - A decode row's input is a token only the device knows; the host knows all counts, so it can place pages.
    - A row that ends by its token limit is known to end when its last step is planned, and is in no further one.
    - A row that ends by a token id is discovered at commit N-1, when step N already holds it (an overshoot row). The
      device drops it by its `done` flag, the host by the slot's generation; its pages become free with step N.
    - A row within a structure (`SamplingParams.structured`) needs a mask for each token, which depends on the one
      before: it is in a step only when its mask is there, and so in one step at a time. Other rows do not wait for it.
    - Pages written by a planned step may be shared at once: a layer writes the K/V of all its rows before any row
      attends, and steps run in order. So the second of two equal prompts finds the first one's pages in the same plan.

All per-step work is numpy over rows. Python loops touch only rows that start, end, prefill or are retracted.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict

import numpy as np

from asyncengine.config import SchedulingPolicy, ServiceClass
from asyncengine.sampling import MAX_N, SamplingParams
from asyncengine.terms import DEFAULT_TERMS, Terms
from asyncengine.wire.requests import Resume
from gpu_runner.kvcache.pages import IntegrityError
from gpu_runner.schedule.admission import Admission
from gpu_runner.schedule.buckets import token_buckets
from gpu_runner.schedule.charges import Charges
from gpu_runner.schedule.counters import Counters
from gpu_runner.schedule.decode import Decode
from gpu_runner.schedule.departures import Departures
from gpu_runner.schedule.host_tier import NO_HOST_GAUGES, recompute_ns
from gpu_runner.schedule.masked_rows import MaskedRows
from gpu_runner.schedule.plan import Int32, StepPlan, StepResult
from gpu_runner.schedule.plan_builder import PlanBuilder
from gpu_runner.schedule.precedence import Precedence
from gpu_runner.schedule.prefill import Prefill
from gpu_runner.schedule.prefill_marks import PrefillMarks
from gpu_runner.schedule.prompt_batches import PromptBatches
from gpu_runner.schedule.prompt_scores import PromptScores
from gpu_runner.schedule.queues import WaitingQueue
from gpu_runner.schedule.request import MAX_PREEMPTIONS, Request
from gpu_runner.schedule.request_length import total_tokens
from gpu_runner.schedule.results import Results
from gpu_runner.schedule.rows import Rows
from gpu_runner.schedule.running import Running
from gpu_runner.schedule.slots import State
from gpu_runner.schedule.step_output import StepOutput, aborted_rows
from gpu_runner.schedule.step_room import StepRooms
from gpu_runner.schedule.step_time import StepTime
from gpu_runner.schedule.transfers import Transfers

logger = logging.getLogger(__name__)

AUDIT_NS = 1_000_000_000
"""Least time between two audits."""
FROM_THE_BEGINNING = tuple(Resume(choice, b"", 0) for choice in range(MAX_N))
"""Each choice of a request that has no output yet."""


class Scheduler:
    """Owns slots, pages, prefix tree and waiting queue. `plan()` and `commit()` are called by one thread, in order."""

    def __init__(
        self,
        *,
        num_pages: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        eos_ids: tuple[int, ...] = (),
        policy: SchedulingPolicy = "fcfs",
        enable_prefix_caching: bool = True,
        gap_ns: Mapping[ServiceClass, int] | None = None,
        session_pin_share: float = 0.25,
        host_pages: int = 0,
        page_load_ns: int = 0,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """gap_ns: the longest that prompts may make a step while rows of a class decode in it; None = any length.
        session_pin_share: as in `EngineConfig`. host_pages: KV pages that host memory has room for; page_load_ns: what
        a page takes from there to the device. clock: in ns; of sessions, and of requests that come, wait to start,
        prefill and have their first token, never of a step in which nothing waits."""
        self.rows = Rows(
            num_slots=num_slots_for(max_num_seqs),
            max_model_len=max_model_len,
            num_pages=num_pages,
            caching=enable_prefix_caching,
            session_pin_share=session_pin_share,
            host_pages=host_pages,
            page_load_ns=page_load_ns,
            prefill_ns=self._recompute_ns,
            clock=clock,
        )
        self.slots = self.rows.slots
        self.queue = WaitingQueue(policy)
        self.counters = Counters()
        self._clock = clock
        self._max_num_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        buckets = token_buckets(max_num_batched_tokens)
        self._builder = PlanBuilder(self.slots, buckets=buckets, eos_ids=eos_ids)
        self._running = Running(self.slots)
        self.masked_rows = MaskedRows(self.slots, self._running)
        self.prompt_scores = PromptScores(self.slots)
        self.step_time = StepTime(buckets)
        marks = PrefillMarks(self.slots.num_slots)
        self._charges = Charges(self.slots, self._running, self.queue.tenants)
        self._departures = Departures(
            self.rows,
            self._running,
            self.queue,
            charges=self._charges,
            marks=marks,
            prompt_scores=self.prompt_scores,
            counters=self.counters,
            clock=clock,
        )
        precedence = Precedence(self.slots, self._running, self.queue.tenants, by_priority=policy == "priority")
        self._decode = Decode(
            self.rows, self._running, precedence=precedence, departures=self._departures, counters=self.counters
        )
        self._prefill = Prefill(
            self.rows,
            self._running,
            self.masked_rows,
            rooms=StepRooms(self.step_time, buckets, self._running, gap_ns or {}),
            charges=self._charges,
            marks=marks,
            counters=self.counters,
            max_scores=max_num_seqs,
            clock=clock,
        )
        self._batches = PromptBatches(self.step_time, buckets, max_num_seqs=max_num_seqs, clock=clock)
        self._admission = Admission(
            self.queue,
            self.rows,
            self._running,
            prefill=self._prefill,
            precedence=precedence,
            departures=self._departures,
            masked_rows=self.masked_rows,
            counters=self.counters,
            policy=policy,
            max_num_seqs=max_num_seqs,
            clock=clock,
        )
        self._results = Results(
            self.rows,
            self._running,
            departures=self._departures,
            masked_rows=self.masked_rows,
            prompt_scores=self.prompt_scores,
            marks=marks,
            counters=self.counters,
            clock=clock,
        )
        self._closed: list[tuple[int, int]] = []  # (slot, gen) aborted since the last output
        self._next_step = 1
        self._next_arrival = 0
        self._next_audit_ns = 0
        self._audited_step = 0  # the next one then

    # -------------------------------------------------------------------------------------------------- requests in

    def add(
        self,
        *,
        rid: int,
        prompt: Int32,
        params: SamplingParams,
        max_tokens: int,
        detok: bytes = b"",
        namespace: str = "",
        resume: tuple[Resume, ...] = (),
        terms: Terms = DEFAULT_TERMS,
    ) -> None:
        """Queue a request's `params.n` choices, or those that `resume` names: they get rids `rid`, `rid + 1`, ...

        A choice with output starts as a retracted row would that lost its pages, but in a new slot. Raises
        InvalidRequestError when one can never run: longer than the context, or than the whole KV cache, or with all the
        output that it may have.
        """
        limit = total_tokens(
            prompt_len=len(prompt),
            params=params,
            max_tokens=max_tokens,
            context=self.slots.max_model_len,
            cache_tokens=self.rows.usable_tokens,
            output_len=max(len(part.ids) for part in resume) // prompt.itemsize if resume else 0,
        )
        if not self.rows.caching:
            namespace = f"\0{rid}"  # a prefix of its own: shared among its choices, with nobody else
        if self.queue.tenants.lifts(terms.tenant):
            self._charges.bring_up_to_date()
        now = self._clock()
        prompt_len, seed = len(prompt), params.seed or 0
        for place, part in enumerate(resume or FROM_THE_BEGINNING[: params.n]):
            tokens = np.concatenate([prompt, np.frombuffer(part.ids, np.int32)]) if part.ids else prompt
            self.queue.push(
                Request(
                    rid=rid + place,
                    tokens=tokens,
                    prompt_len=prompt_len,
                    params=params,
                    seed=wrap_int64(seed + part.choice),
                    limit=limit,
                    detok=detok,
                    namespace=namespace,
                    arrival=self._next_arrival,
                    terms=terms,
                    shown=part.shown,
                    queued_ns=now,
                )
            )
            self._next_arrival += 1

    def knows(self, rid: int) -> bool:
        """Whether it waits or runs."""
        return rid in self.queue or rid in self.slots.slot_of or rid in self.queue.withheld

    def rids(self) -> set[int]:
        """Of all that waits or runs."""
        return {request.rid for request in self.queue}.union(self.slots.slot_of, self.queue.withheld)

    def abort(self, rid: int) -> None:
        """End `rid` wherever it is; unknown rids (ended already, or not here yet) are ignored."""
        request = self.queue.remove(rid)
        slot = self.slots.slot_of.get(rid)
        if request is not None and slot is None:
            self.queue.tenants.leave(request.account)
        if slot is not None:
            if self.slots.opened[slot]:
                self._closed.append((slot, int(self.slots.gen[slot])))
            self._departures.end(slot)
        if request is not None or slot is not None:
            self.counters.aborted += 1

    def stop(self, slot: int, gen: int) -> None:
        """End the row that holds `slot` in generation `gen` (its text hit a stop string); stale hits are ignored."""
        if 0 <= slot < self.slots.num_slots and self.slots.gen[slot] == gen and self.slots.state[slot] != State.FREE:
            self._departures.end(slot)
            self.counters.finished += 1

    def release_session(self, tenant: str, session: str) -> None:
        """Keep its prefix no longer, unless a request of it that runs still ends; unknown ones are ignored."""
        self.rows.sessions.release(tenant, session)

    # ---------------------------------------------------------------------------------------------------- one step

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_steps(self) -> int:
        """Planned so far."""
        return self._next_step - 1

    def set_aside(self) -> bool:
        """Have all that runs or waits wait until `queue.release`; whether no step in flight holds a row any more."""
        for slot in self._running.active.tolist():
            self._departures.set_aside(slot)
        self.queue.withhold()
        return not self.num_running and self.rows.pool.completed_epoch == self.num_steps

    def new_tokens(self, rid: int) -> int | None:
        """How many it has had here, as far as the host knows; None if it neither waits nor runs."""
        slot = self.slots.slot_of.get(rid)
        if slot is None:
            return 0 if rid in self.queue else None
        self._running.store()
        request = self.slots.request[slot]
        assert request is not None
        return int(self.slots.known[slot]) - len(request.tokens)

    @property
    def rows_to_fill(self) -> int:
        """How many of the requests that wait may be about to start; none while the first of them finds no room."""
        return self._admission.rows_to_fill

    @property
    def has_work(self) -> bool:
        """Whether a later `plan()` may hold rows once the steps and copies in flight are done."""
        return bool(self._running.num_active or len(self.queue))

    def plan(self) -> StepPlan | None:
        """Decide the next step and account for it as if it had run; None when no row can run now."""
        admission = self._admission
        choosing = admission.is_due(self._next_step)
        if choosing:
            if len(self.queue.tenants) > 1:
                self._charges.bring_up_to_date()
            admission.make_room(self._next_step)
        draft = self._decode.begin()
        budget = self._budget - draft.num_decode_rows
        if choosing or self._running.prefill:
            prompts = self._prefill.left(self._running.prefill) + (admission.startable_tokens if choosing else 0)
            room = self._batches.room(budget, rows=draft.num_decode_rows, prompts=prompts)
            if choosing and (room or not budget):
                admission.fill(room, draft)
            else:
                self._prefill.go_on(room, draft)
        if not draft:
            return None
        plan = self._builder.build(draft, self._next_step)
        self._next_step += 1
        self._running.advance(plan.step, draft.decode, draft.prefilled(self.slots) if draft.prefill else [])
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Take in the results of the oldest step in flight; rows that left meanwhile are dropped by generation."""
        self.rows.pool.complete(plan.step)
        self.step_time.ended(plan, result)
        return self._results.take(plan, result)

    @property
    def copying(self) -> bool:
        """Whether copies are in flight, or wait for `take_transfers`: an engine without work had better look again
        soon, for what is not stored yet is lost when its pages are wanted."""
        return self.rows.tier is not None and self.rows.tier.busy

    def take_transfers(self) -> Transfers | None:
        """Copies to start now, after each plan and before the next; None if there are none."""
        tier = self.rows.tier
        return None if tier is None else tier.take(self._next_step - 1, self._running.decoding)

    def transferred(self, ticket: int) -> None:
        """All copies up to `ticket` are done: rows that waited for them go on."""
        tier = self.rows.tier
        if tier is None or ticket <= tier.done_ticket:
            return
        tier.done(ticket)
        if loaded := self._running.loaded(ticket):
            self._charges.bring_up_to_date()
            for slot in loaded:
                self._admission.loaded(slot)

    def take_closed(self) -> StepOutput | None:
        """Rows that were aborted since the last call, for the detokenizer to forget; None if there are none."""
        if not self._closed:
            return None
        output = aborted_rows(self._next_step - 1, self._closed)
        self._closed.clear()
        return output

    def _recompute_ns(self, tokens: int, context: int) -> float:
        """What it takes to compute so many tokens behind so many others."""
        return self.step_time.prefill_ns(tokens, context) or recompute_ns(tokens, context)

    def audit(self) -> None:
        """Look whether the pages are where they should be. To be called when no step and no copy is in flight and none
        can start. Takes a moment, once a second at most, and not again before another step unless requests wait.

        A breach is logged and counted, and the cache starts over. With rows on its pages it cannot: then it raises
        AssertionError, for the process to be replaced.
        """
        now = self._clock()
        if now < self._next_audit_ns or (self._next_step == self._audited_step and not self.has_work):
            return
        self._next_audit_ns, self._audited_step = now + AUDIT_NS, self._next_step
        if self.num_running:
            self.check_integrity()
            return
        try:
            self.rows.check_at_rest()
        except IntegrityError as breach:
            logger.error("the KV cache's bookkeeping was wrong, all that was cached is forgotten: %s", breach)
            self.counters.cache_repairs += 1
            self.rows.start_over()

    # -------------------------------------------------------------------------------------------------- observation

    def rid_of(self, slot: int, gen: int) -> int | None:
        """Whose row it is; None if it has ended."""
        request = self.slots.request[slot]
        return request.rid if request is not None and self.slots.gen[slot] == gen else None

    def gauges(self) -> dict[str, int]:
        """Current counts and running totals. When nothing runs, free_pages + cached_pages + pinned_pages = total_pages,
        but that a page which two tenants have pinned counts for both."""
        rows = self.rows
        rows.sessions.expire()
        return {
            "running": self.num_running,
            "waiting": len(self.queue) + len(self.queue.withheld),
            "waiting_background": self.queue.backlog("background").requests,
            "waiting_for_pages": len(self.queue) if self._admission.lacks_pages else 0,
            "total_pages": rows.pool.num_pages - 1,
            "free_pages": rows.pool.num_free,
            "cached_pages": rows.tree.num_evictable,
            "pinned_pages": rows.sessions.num_pages,
            "sessions": len(rows.sessions),
            "steps": self.num_steps,
            **asdict(self.counters),
            **(NO_HOST_GAUGES if rows.tier is None else rows.tier.gauges()),
            "step_time_error_permille": round(1000 * self.step_time.error),
        }

    def check_integrity(self) -> None:
        """Recompute every invariant from zero; raises AssertionError (or the pool's own) on a breach."""
        slots = self.slots
        self.rows.check_integrity()
        self.queue.check_integrity()
        self._running.check_integrity()
        assert self.num_running <= self._max_num_seqs
        holders = [request for request in slots.request if request is not None]
        waiting = [*self.queue.withheld.values(), *self.queue]
        fresh = [request for request in waiting if request.slot < 0]
        self.queue.tenants.check_integrity(Counter(request.account for request in [*holders, *fresh]))
        assert all(request.preemptions <= MAX_PREEMPTIONS for request in holders)
        retracted = {request.slot for request in waiting if request.slot >= 0}
        assert retracted == set(np.flatnonzero(slots.state == State.RETRACTED).tolist())


def num_slots_for(max_num_seqs: int) -> int:
    """Rows of every array: those that run, and as many retracted ones, which keep their slot while they wait."""
    return 2 * max_num_seqs


def wrap_int64(value: int) -> int:
    """`value` modulo 2^64 as a signed 64-bit integer."""
    return (value + 2**63) % 2**64 - 2**63
