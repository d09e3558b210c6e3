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

import time
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from asyncengine.config import PAGE_SIZE, SchedulingPolicy, ServiceClass
from asyncengine.sampling import MAX_N, SamplingParams
from asyncengine.terms import DEFAULT_TERMS, Terms
from asyncengine.wire.base import Finish
from asyncengine.wire.frames import Open, RowMarks
from asyncengine.wire.requests import Resume
from gpu_runner.schedule.buckets import token_buckets
from gpu_runner.schedule.counters import Counters
from gpu_runner.schedule.host_tier import NO_HOST_GAUGES, recompute_ns
from gpu_runner.schedule.limits import total_tokens
from gpu_runner.schedule.masked_rows import MaskedRows
from gpu_runner.schedule.plan import Int32, StepPlan, StepResult
from gpu_runner.schedule.plan_builder import PlanBuilder, PlanDraft
from gpu_runner.schedule.precedence import Precedence
from gpu_runner.schedule.prefill import Prefill
from gpu_runner.schedule.prefill_marks import PrefillMarks
from gpu_runner.schedule.prompt_scores import PromptScores
from gpu_runner.schedule.queues import WaitingQueue
from gpu_runner.schedule.request import MAX_PREEMPTIONS, Request
from gpu_runner.schedule.rows import Rows
from gpu_runner.schedule.running import DecodeRows, Running
from gpu_runner.schedule.slots import State
from gpu_runner.schedule.step_output import StepOutput, aborted_rows
from gpu_runner.schedule.step_room import StepRooms
from gpu_runner.schedule.step_time import StepTime
from gpu_runner.schedule.transfers import Transfers

RUNS = int(Finish.NONE)  # numpy takes microseconds to compare with a member of an enumeration
STEPS_BETWEEN_LOOKS = 8
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
        a page takes from there to the device. clock: in ns; of sessions, and of requests that come, start, prefill and
        have their first token, never of a decoding step."""
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
        self._policy = policy
        self._clock = clock
        self._max_num_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        buckets = token_buckets(max_num_batched_tokens)
        self._builder = PlanBuilder(self.slots, buckets=buckets, eos_ids=eos_ids)
        self._running = Running(self.slots)
        self.masked_rows = MaskedRows(self.slots, self._running)
        self.prompt_scores = PromptScores(self.slots)
        self.step_time = StepTime(buckets)
        self._marks = PrefillMarks(self.slots.num_slots)
        self._prefill = Prefill(
            self.rows,
            self._running,
            self.masked_rows,
            rooms=StepRooms(self.step_time, buckets, self._running, gap_ns or {}),
            tenants=self.queue.tenants,
            marks=self._marks,
            counters=self.counters,
            max_scores=max_num_seqs,
            clock=clock,
        )
        self._precedence = Precedence(self.slots, self._running, self.queue.tenants, by_priority=policy == "priority")
        self._slot_of: dict[int, int] = {}  # rid -> slot of every request that holds one
        self._closed: list[tuple[int, int]] = []  # (slot, gen) aborted since the last output
        self._blocked: Request | None = None  # the queue's head, if the last plan had no room for it
        self._refused = 0  # pushes of the queue when it had been found that nobody gives way to `_blocked`; 0 = not yet
        self._room_after = 0  # the step with which the pages come back of rows that gave way to it
        self._next_step = 1
        self._next_arrival = 0

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
            self._charge_outputs()
        now = self._clock()
        prompt_len, seed = len(prompt), params.seed or 0
        for place, part in enumerate(resume or FROM_THE_BEGINNING[: params.n]):
            tokens = np.concatenate([prompt, np.frombuffer(part.ids, np.int32)]) if part.ids else prompt
            self.queue.push(
                Request(
                    rid=rid + place,
                    group=rid,
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
        return rid in self.queue or rid in self._slot_of

    def abort(self, rid: int) -> None:
        """End `rid` wherever it is; unknown rids (ended already, or not here yet) are ignored."""
        request = self.queue.remove(rid)
        slot = self._slot_of.get(rid)
        if request is not None and slot is None:
            self.queue.tenants.leave(request.account)
        if slot is not None:
            if self.slots.opened[slot]:
                self._closed.append((slot, int(self.slots.gen[slot])))
            self._end(slot)
        if request is not None or slot is not None:
            self.counters.aborted += 1

    def stop(self, slot: int, gen: int) -> None:
        """End the row that holds `slot` in generation `gen` (its text hit a stop string); stale hits are ignored."""
        if 0 <= slot < self.slots.num_slots and self.slots.gen[slot] == gen and self.slots.state[slot] != State.FREE:
            self._end(slot)
            self.counters.finished += 1

    def release_session(self, tenant: str, session: str) -> None:
        """Keep its prefix no longer, unless a request of it that runs still ends; unknown ones are ignored."""
        self.rows.sessions.release(tenant, session)

    # ---------------------------------------------------------------------------------------------------- one step

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def rows_to_fill(self) -> int:
        """How many of the requests that wait may be about to start; none while the first of them finds no room."""
        return 0 if self._blocked is not None else self._max_num_seqs - self.num_running

    @property
    def has_work(self) -> bool:
        """Whether a later `plan()` may hold rows once the steps and copies in flight are done."""
        return bool(self._running.num_active or len(self.queue))

    def plan(self) -> StepPlan | None:
        """Decide the next step and account for it as if it had run; None when no row can run now."""
        blocked = self._blocked
        choosing = bool(len(self.queue)) and not self._all_wait()
        if choosing and len(self.queue.tenants) > 1:
            self._charge_outputs()
        if choosing and blocked is not None:
            self._make_room(blocked)
        if choosing or not len(self.queue):
            self._blocked = None
        draft = self._plan_decode()
        budget = self._budget - len(draft.decode)
        if choosing:
            self._pass_prefill(budget)
        budget = self._prefill.go_on(budget, draft)
        if choosing:
            self._admit(budget, draft)
            if self._blocked is not blocked:
                self._refused = 0
        if not draft:
            return None
        plan = self._builder.build(draft, self._next_step)
        self._next_step += 1
        self._running.advance(plan.step, draft.decode, draft.prefilled(self.slots))
        return plan

    def _all_wait(self) -> bool:
        """No row is free, and nobody who waits takes one from others."""
        blocked = self._blocked
        full = self._running.num_active >= self._max_num_seqs
        return blocked is not None and full and self._is_refused and blocked.rid in self.queue

    @property
    def _is_refused(self) -> bool:
        """Nobody gives way to what is blocked. Until a request comes or a row ends, only what tenants are served can
        change that: every so many steps is often enough to look."""
        return self._refused == self.queue.pushes and self._next_step % STEPS_BETWEEN_LOOKS != 0

    def commit(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Take in the results of the oldest step in flight; rows that left meanwhile are dropped by generation."""
        slots = self.slots
        self.rows.pool.complete(plan.step)
        self.step_time.ended(plan, result)
        rows, gens, tokens, finish = plan.row_slot, plan.row_gen, result.tokens, result.finish
        if result.scores is not None:
            self.prompt_scores.add(plan, result.scores)
        logprobs = result.logprobs
        opens: tuple[Open, ...] = ()
        marks: tuple[RowMarks, ...] = ()
        if (unchanged := self._running.unchanged(rows)) is not None:
            unchanged.sampled(tokens)  # each row got one, and not its first
        else:
            self._running.store()
            index = rows.astype(np.intp)
            valid = plan.row_samples & (tokens >= 0) & (slots.gen[index] == gens)
            if not valid.all():
                if logprobs is not None:
                    logprobs = logprobs.of(valid)
                rows, gens, tokens, finish, index = rows[valid], gens[valid], tokens[valid], finish[valid], index[valid]
            known = slots.known[index]
            slots.token_cells[index * slots.max_model_len + known] = tokens
            slots.known[index] = known + 1
            marked = self._marks.waiting[index]
            if marked.any():
                now = self._clock()
                if self.rows.tier is not None:
                    self.rows.tier.decode(rows[marked])
                marks = self._marks.take(rows[marked], now)
                opens = tuple(self._open(int(slot), now) for slot in rows[marked & ~slots.opened[index]])
            constrained = slots.constrained[index]
            if constrained.any():
                continues = constrained & (finish == RUNS)
                self.masked_rows.sampled(rows[continues], gens[continues], tokens[continues])
        if finish.any():
            for slot in rows[finish != RUNS]:
                self._end(int(slot))
                self.counters.finished += 1
        return StepOutput(plan.step, rows, gens, tokens, finish, opens, logprobs, marks)

    @property
    def loading(self) -> int:
        """Rows that wait for copies from host memory: `transferred` lets them go on."""
        return len(self._running.loading)

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
        """All copies up to `ticket` are done."""
        tier = self.rows.tier
        if tier is None or ticket <= tier.done_ticket:
            return
        tier.done(ticket)
        if loaded := self._running.loaded(ticket):
            self._charge_outputs()
            for slot in loaded:
                request = self.slots.request[slot]
                assert request is not None
                self._join_prefill(slot, self._precedence.place(request))

    def take_closed(self) -> StepOutput | None:
        """Rows that were aborted since the last call, for the detokenizer to forget; None if there are none."""
        if not self._closed:
            return None
        output = aborted_rows(self._next_step - 1, self._closed)
        self._closed.clear()
        return output

    # ------------------------------------------------------------------------------------------------------ decode

    def _plan_decode(self) -> PlanDraft:
        """Every decoding row gets its token, and a page where it needs one; if none is left, the newest make room."""
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
            rows = DecodeRows(self.slots, rows.slot[runs])
            needs_page, _ = self._pages_needed(rows)
        draft = PlanDraft(rows, rows.start)
        if len(needs_page):
            draft.write_pages(rows.slot[needs_page], *self.rows.grow(rows.index[needs_page]))
        rows.advance()
        self.counters.decode_tokens += len(rows)
        return draft

    def _pages_needed(self, rows: DecodeRows) -> tuple[NDArray[np.intp], int]:
        """Which of the rows begin a page with their next token, and how many of those pages cannot be had now."""
        needs_page = ((rows.start & (PAGE_SIZE - 1)) == 0).nonzero()[0]  # a row's pages hold what is computed, no more
        return needs_page, self.rows.missing_pages(len(needs_page))

    def _retract_for(self, missing: int) -> None:
        """Retract the rows that deserve their pages least until these cover `missing`. What is pinned goes when none is
        left to be retracted."""
        self._running.store()
        while missing > 0:
            victim = self._precedence.least_deserving() if self._running.num_active > 1 else None
            if victim is None:
                break
            growing = self.slots.computed[victim] == self.slots.num_pages[victim] * PAGE_SIZE
            missing -= int(self.slots.num_pages[victim]) + int(growing)
            self._retract(victim)
        if missing > 0 and self.num_running == self._running.num_active:  # no row that drains gives any back
            first = self.slots.request[int(self._running.active[0])]
            assert first is not None
            self.rows.unpin_for(missing, first.terms.tenant)

    def _retract(self, slot: int) -> None:
        """Take the row's pages, keeping what it computed in the prefix tree, and put it at the head of its tenant's."""
        self._running.leave(slot)
        self._charge_rest(slot)
        self.queue.push(self.rows.retract(slot))
        self._marks.retracted(slot, self._clock())
        self.counters.preemptions += 1

    # --------------------------------------------------------------------------------------------------- admission

    def _admit(self, budget: int, draft: PlanDraft) -> None:
        """Start waiting requests, in the queue's order, while tokens, rows and pages allow."""
        while budget > 0:
            request = self.queue.head()
            if request is None:
                return
            if request is self._blocked or not self._start(request, len(self._running.prefill)):
                self._blocked = request
                request = self._filler(request)
                if request is None or not self._start(request, len(self._running.prefill)):
                    return
            if self.slots.state[request.slot] == State.PREFILL:
                budget = self._prefill.place(request.slot, budget, draft)

    def _filler(self, head: Request) -> Request | None:
        """A shorter request to use pages that are too few for `head`; none where rows make room for that instead."""
        if self._policy == "priority" or self._room_after > self.rows.pool.completed_epoch:
            return None
        if self.num_running >= self._max_num_seqs:
            return None
        filler = self.queue.filler(head)
        if filler is None or not self.rows.has_room(len(filler.prompt), watermark=self.num_running):
            return None
        return filler

    def _pass_prefill(self, budget: int) -> None:
        """Start waiting requests whose prompts go before the rest of ones that are under way, as far as `budget` tokens
        would reach."""
        prefill = self._running.prefill
        while prefill and (request := self.queue.head()) is not None:
            place = self._precedence.place(request)
            # One whose turn came by its age starts though it passes nobody: behind it are others that may.
            if not request.aged and (place == len(prefill) or self._prefill.left(prefill[:place]) >= budget):
                return
            if not self._start(request, place):
                self._blocked = request
                return

    def _join_prefill(self, slot: int, place: int) -> None:
        """A row prefills from now on, before those that are in this place of their order and behind."""
        prefill = self._running.prefill
        for behind in prefill[place:]:
            passed = self.slots.request[behind]
            assert passed is not None
            passed.overtaken += 1
        prefill.insert(place, slot)

    def _start(self, request: Request, place: int) -> bool:
        """Make a waiting request the prefilling row in this place of their order; False when it has to wait."""
        if self.num_running >= self._max_num_seqs:
            return False
        # One page to grow for every running row, so that what is admitted now is not retracted in the next steps.
        retracted, fresh = request.slot >= 0, request.fresh
        if not self.rows.start(request, watermark=self.num_running, alone=not self.num_running):
            return False
        self.queue.take(request, resumed=not fresh)
        slot = request.slot
        self._slot_of[request.rid] = slot
        if self.slots.state[slot] == State.LOADING:
            self._running.loading.append(slot)
        else:
            self._join_prefill(slot, place)
        self.counters.prefix_query_tokens += int(self.slots.known[slot])
        self.counters.prefix_hit_tokens += int(self.slots.computed[slot])
        if not request.started_ns:
            request.started_ns = self._clock()
        if request.params.structured is not None and not retracted:
            self.masked_rows.opened(slot, request.params.structured, request.resumed)
        return True

    def _make_room(self, blocked: Request) -> None:
        """A request that found no room takes the place of rows that it goes before."""
        if self._is_refused or blocked.rid not in self.queue:
            return
        # What is first only by its age takes no row from others, but must not keep one from the request that would.
        taker = self.queue.wanted() if blocked.aged else blocked
        assert taker is not None
        if not self._precedence.may_displace(taker):
            self._refused = self.queue.pushes
            return
        if self._room_after > self.rows.pool.completed_epoch:
            return
        if blocked.slot < 0 and not self.slots.num_free:
            return  # a retracted row would keep its slot: only one that ends makes room
        if blocked.slot >= 0 and self.slots.last_step[blocked.slot] > self.rows.pool.completed_epoch:
            return  # it waits for its own last step
        victim = self._precedence.displaced_by(taker)
        if victim is None:
            self._refused = self.queue.pushes
            return
        lacking = self.rows.lacking_pages(blocked, watermark=self.num_running)
        # Rows that drain are not counted: their places are free with the next commits.
        while victim is not None and (lacking > 0 or self._running.num_active >= self._max_num_seqs):
            lacking -= int(self.slots.num_pages[victim]) + 1  # and the one to grow
            self._retract(victim)
            self._room_after = max(self._room_after, int(self.slots.last_step[victim]))
            victim = self._precedence.displaced_by(taker)

    # -------------------------------------------------------------------------------------------------- row changes

    def _open(self, slot: int, now: int) -> Open:
        slots = self.slots
        request = slots.request[slot]
        assert request is not None
        slots.opened[slot] = True
        return Open(
            slot,
            int(slots.gen[slot]),
            request.rid,
            request.detok,
            int(slots.prompt_len[slot]),
            int(slots.cached_tokens[slot]),
            request.queued_ns,
            request.started_ns,
            now,
            self.prompt_scores.take(slot),
            request.resumed.tobytes(),
            request.shown,
            request.session_tokens,
            request.session_common,
        )

    def _end(self, slot: int) -> None:
        request = self.slots.request[slot]
        assert request is not None
        self.queue.remove(request.rid)  # where a retracted row waits
        self._running.leave(slot)
        self._charge_rest(slot)
        self.queue.tenants.leave(request.account)
        self.prompt_scores.forget(slot)
        self._marks.forget(slot)
        self.rows.end(slot)
        del self._slot_of[request.rid]

    def _recompute_ns(self, tokens: int, context: int) -> float:
        """What it takes to compute so many tokens behind so many others."""
        return self.step_time.prefill_ns(tokens, context) or recompute_ns(tokens, context)

    # ------------------------------------------------------------------------------------------------------ tenants

    def _charge_outputs(self) -> None:
        """Let tenants' accounts know of what the decoding rows got: where one tenant's work is compared with another's,
        and not in each step of a single one."""
        rows, charged = self._running.decode, self.slots.charged
        self.queue.tenants.charge_outputs(self.slots.account[rows.index], rows.start - charged[rows.index])
        charged[rows.index] = rows.start

    def _charge_rest(self, slot: int) -> None:
        """Of a row that ends or is retracted, and has left its list."""
        slots = self.slots
        tokens = int(slots.computed[slot] - slots.charged[slot])
        if tokens:
            slots.charged[slot] = slots.computed[slot]
            self.queue.tenants.charge_output(int(slots.account[slot]), tokens)

    # -------------------------------------------------------------------------------------------------- observation

    def rid_of(self, slot: int, gen: int) -> int | None:
        """Whose row it is; None if it has ended."""
        request = self.slots.request[slot]
        return request.rid if request is not None and self.slots.gen[slot] == gen else None

    def gauges(self) -> dict[str, int]:
        """Current counts and running totals. When nothing runs, free_pages + cached_pages + pinned_pages = total_pages,
        but that a page which two tenants have pinned counts for both."""
        counters, rows = self.counters, self.rows
        rows.sessions.expire()
        short_of_pages = self._blocked is not None and self.num_running < self._max_num_seqs
        return {
            "running": self.num_running,
            "waiting": len(self.queue),
            "waiting_for_pages": len(self.queue) if short_of_pages else 0,
            "total_pages": rows.pool.num_pages - 1,
            "free_pages": rows.pool.num_free,
            "cached_pages": rows.tree.num_evictable,
            "pinned_pages": rows.sessions.num_pages,
            "sessions": len(rows.sessions),
            "steps": self._next_step - 1,
            "preemptions": counters.preemptions,
            "prefill_tokens": counters.prefill_tokens,
            "decode_tokens": counters.decode_tokens,
            "prefix_query_tokens": counters.prefix_query_tokens,
            "prefix_hit_tokens": counters.prefix_hit_tokens,
            **(NO_HOST_GAUGES if rows.tier is None else rows.tier.gauges()),
            "finished": counters.finished,
            "aborted": counters.aborted,
            "step_time_error_permille": round(1000 * self.step_time.error),
        }

    def check_integrity(self) -> None:
        """Recompute every invariant from zero; raises AssertionError (or the pool's own) on a breach."""
        slots = self.slots
        self.rows.check_integrity()
        self.queue.check_integrity()
        self._running.check_integrity()
        assert self.num_running <= self._max_num_seqs
        assert set(self._slot_of.values()) == set(np.flatnonzero(slots.state != State.FREE).tolist())
        holders = [request for request in slots.request if request is not None]
        waiting = [request for request in self.queue if request.slot < 0]
        self.queue.tenants.check_integrity(Counter(request.account for request in [*holders, *waiting]))
        assert all(request.preemptions <= MAX_PREEMPTIONS for request in holders)
        retracted = {request.slot for request in self.queue if request.slot >= 0}
        assert retracted == set(np.flatnonzero(slots.state == State.RETRACTED).tolist())


def num_slots_for(max_num_seqs: int) -> int:
    """Rows of every array: those that run, and as many retracted ones, which keep their slot while they wait."""
    return 2 * max_num_seqs


def wrap_int64(value: int) -> int:
    """`value` modulo 2^64 as a signed 64-bit integer."""
    return (value + 2**63) % 2**64 - 2**63
