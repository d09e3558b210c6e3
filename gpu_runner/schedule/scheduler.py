"""Iteration-level continuous batching: what runs in the next step, and what the last one meant.

Two steps are in flight, so `plan()` for step N+1 runs before step N has been read:

    host    plan N | launch N | collect N-1, commit N-1 | plan N+1 | launch N+1 | collect N, commit N | ...
    device  [------- step N-1 -------][------- step N -------][------- step N+1 -------]

    - A decode row's input is a token only the device knows; the host knows all counts, so it can place pages.
    - A row that ends by its token limit is known to end when its last step is planned, and is in no further one.
    - A row that ends by a token id is discovered at commit N-1, when step N already holds it (an overshoot row). The
      device drops it by its `done` flag, the host by the slot's generation; its pages become free with step N.
    - Pages written by a planned step may be shared at once: a layer writes the K/V of all its rows before any row
      attends, and steps run in order. So the second of two equal prompts finds the first one's pages in the same plan.

All per-step work is numpy over rows. Python loops touch only rows that start, end, prefill or are retracted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncengine.config import MAX_STOP_IDS, PAGE_SIZE, SchedulingPolicy
from asyncengine.errors import InvalidRequestError
from asyncengine.sampling import SamplingParams
from asyncengine.wire.messages import Finish, Open
from gpu_runner.schedule.buckets import bucket_for, token_buckets
from gpu_runner.schedule.plan import Int32, StartRows, StepPlan, StepResult, UInt8
from gpu_runner.schedule.queues import Request, WaitingQueue
from gpu_runner.schedule.rows import Rows
from gpu_runner.schedule.slots import State

_NO_SLOTS: Int32 = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """News for the detokenizers: rows with a new token or an end. tokens: -1 where a row ends without a new one."""

    step: int
    slots: Int32
    gens: Int32
    tokens: Int32
    finish: UInt8
    opens: tuple[Open, ...]

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    preemptions: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefix_hit_tokens: int = 0
    finished: int = 0
    aborted: int = 0


class _PlanDraft:
    """What a plan under construction has gathered for rows that start or prefill."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.prefill: list[tuple[int, int]] = []  # (slot, chunk length)
        self.page_slot: list[Int32] = []
        self.page_index: list[Int32] = []
        self.page_id: list[Int32] = []

    def write_pages(self, slots: Int32, indices: Int32, pages: Int32) -> None:
        self.page_slot.append(slots)
        self.page_index.append(indices)
        self.page_id.append(pages)


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
    ) -> None:
        self.rows = Rows(
            num_slots=num_slots_for(max_num_seqs),
            max_model_len=max_model_len,
            num_pages=num_pages,
            caching=enable_prefix_caching,
        )
        self.slots = self.rows.slots
        self.queue = WaitingQueue(policy)
        self.counters = Counters()
        self._policy = policy
        self._max_num_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        self._buckets = token_buckets(max_num_batched_tokens)
        self._eos_ids = eos_ids
        self._decode: Int32 = _NO_SLOTS  # slots that decode, in order of admission
        self._prefill: list[int] = []  # slots that prefill, in order of admission
        self._num_draining = 0
        self._slot_of: dict[int, int] = {}  # rid -> slot of every request that holds one
        self._closed: list[tuple[int, int]] = []  # (slot, gen) aborted since the last output
        self._blocked: Request | None = None  # the queue's head, if the last plan had no room for it
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
    ) -> None:
        """Queue a request and its `params.n` choices, which get rids `rid`, `rid + 1`, ...

        Raises InvalidRequestError when it can never run: longer than the context, or than the whole KV cache.
        """
        limit = self._limit(len(prompt), params, max_tokens)
        if not self.rows.caching:
            namespace = f"\0{rid}"  # a prefix of its own: shared among its choices, with nobody else
        for choice in range(params.n):
            self.queue.push(
                Request(
                    rid=rid + choice,
                    group=rid,
                    prompt=prompt,
                    params=params,
                    seed=wrap_int64((params.seed or 0) + choice),
                    limit=limit,
                    detok=detok,
                    namespace=namespace,
                    arrival=self._next_arrival,
                )
            )
            self._next_arrival += 1

    def _limit(self, prompt_len: int, params: SamplingParams, max_tokens: int) -> int:
        context, usable = self.slots.max_model_len, self.rows.usable_tokens
        if prompt_len >= context:
            raise InvalidRequestError(
                f"the prompt has {prompt_len} tokens; with at least one token of output the context holds {context}",
                code="context_length_exceeded",
                param="prompt",
            )
        limit = prompt_len + max_tokens
        if params.max_tokens is None:
            limit = min(limit, context, max(usable + 1, prompt_len + 1))
        if limit > context:
            raise InvalidRequestError(
                f"prompt ({prompt_len} tokens) and max_tokens ({max_tokens}) together exceed the context of {context}",
                code="context_length_exceeded",
                param="max_tokens",
            )
        if limit - 1 > usable:  # the last token is never computed, so it needs no room
            raise InvalidRequestError(
                f"prompt ({prompt_len} tokens) and max_tokens ({limit - prompt_len}) together need {limit - 1} tokens "
                f"of KV cache, which holds {usable}",
                code="kv_cache_exceeded",
                param="max_tokens",
            )
        return limit

    def abort(self, rid: int) -> None:
        """End `rid` wherever it is; unknown rids (ended already, or not here yet) are ignored."""
        request = self.queue.remove(rid)
        slot = self._slot_of.get(rid)
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

    # ---------------------------------------------------------------------------------------------------- one step

    @property
    def num_running(self) -> int:
        return len(self._decode) + len(self._prefill) + self._num_draining

    @property
    def has_work(self) -> bool:
        """Whether a later `plan()` may hold rows once the steps in flight are committed."""
        return bool(len(self._decode) or self._prefill or len(self.queue))

    def plan(self) -> StepPlan | None:
        """Decide the next step and account for it as if it had run; None when no row can run now."""
        step = self._next_step
        draft = _PlanDraft()
        if self._policy == "priority":
            self._preempt_for_blocked()
        decode = self._plan_decode(draft)
        budget = self._budget - len(decode)
        budget = self._continue_prefill(budget, draft)
        self._admit(budget, draft)
        if not len(decode) and not draft.prefill:
            return None
        self._next_step += 1
        return self._build(step, decode, draft)

    def commit(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Take in the results of the oldest step in flight; rows that left meanwhile are dropped by generation."""
        slots = self.slots
        self.rows.pool.complete(plan.step)
        valid = plan.row_samples & (result.tokens >= 0) & (slots.gen[plan.row_slot] == plan.row_gen)
        rows = plan.row_slot[valid]
        gens = plan.row_gen[valid]
        tokens = result.tokens[valid]
        finish = result.finish[valid]
        slots.tokens[rows, slots.known[rows]] = tokens
        slots.known[rows] += 1
        opens = tuple(self._open(int(slot)) for slot in rows[~slots.opened[rows]])
        for slot in rows[finish != Finish.NONE]:
            self._end(int(slot))
            self.counters.finished += 1
        return StepOutput(plan.step, rows, gens, tokens, finish, opens)

    def take_closed(self) -> StepOutput | None:
        """Rows that were aborted since the last call, for the detokenizer to forget; None if there are none."""
        if not self._closed:
            return None
        pairs = np.array(self._closed, np.int32)
        self._closed.clear()
        count = len(pairs)
        return StepOutput(
            self._next_step - 1,
            np.ascontiguousarray(pairs[:, 0]),
            np.ascontiguousarray(pairs[:, 1]),
            np.full(count, -1, np.int32),
            np.full(count, Finish.ABORT, np.uint8),
            (),
        )

    # ------------------------------------------------------------------------------------------------------ decode

    def _plan_decode(self, draft: _PlanDraft) -> Int32:
        """Every decoding row gets its token, and a page where it needs one; if none is left, the newest make room."""
        slots = self.slots
        needs_page = slots.computed[self._decode] == slots.num_pages[self._decode] * PAGE_SIZE
        missing = self.rows.missing_pages(int(np.count_nonzero(needs_page)))
        if missing:
            self._retract_for(missing)
            needs_page = slots.computed[self._decode] == slots.num_pages[self._decode] * PAGE_SIZE
            missing = self.rows.missing_pages(int(np.count_nonzero(needs_page)))
        decode = self._decode
        if missing:
            # Pages of the retracted come back when the step that reads them is done: the newest rows skip this step.
            stalled = np.zeros(len(decode), np.bool_)
            stalled[np.flatnonzero(needs_page)[-missing:]] = True
            decode, needs_page = decode[~stalled], needs_page[~stalled]
        if needs_page.any():
            growing = decode[needs_page]
            draft.write_pages(growing, *self.rows.grow(growing))
        self.counters.decode_tokens += len(decode)
        return decode

    def _retract_for(self, missing: int) -> None:
        """Retract the newest (with policy priority: the least important) rows until their pages cover `missing`."""
        while missing > 0 and len(self._decode) + len(self._prefill) > 1:
            victim = self._least_deserving()
            growing = self.slots.computed[victim] == self.slots.num_pages[victim] * PAGE_SIZE
            missing -= int(self.slots.num_pages[victim]) + int(growing)
            self._retract(victim)

    def _least_deserving(self) -> int:
        rows = np.concatenate([self._decode, np.array(self._prefill, np.int32)])
        order = [self.slots.admitted[rows]]
        if self._policy == "priority":
            order.append(self.slots.priority[rows])
        return int(rows[np.lexsort(order)[-1]])

    def _retract(self, slot: int) -> None:
        """Take the row's pages, keeping what it computed in the prefix tree, and put it at the head of the queue."""
        self._leave(slot)
        self.queue.push(self.rows.retract(slot))
        self.counters.preemptions += 1

    # ----------------------------------------------------------------------------------------------------- prefill

    def _continue_prefill(self, budget: int, draft: _PlanDraft) -> int:
        for slot in self._prefill:
            if budget == 0:
                break
            budget -= self._place_chunk(slot, budget, draft)
        return budget

    def _place_chunk(self, slot: int, budget: int, draft: _PlanDraft) -> int:
        """Compute the row's next tokens in this step and make their full pages shareable at once."""
        slots = self.slots
        length = min(int(slots.known[slot] - slots.computed[slot]), budget)
        draft.prefill.append((slot, length))
        slots.computed[slot] += length
        self.counters.prefill_tokens += length
        self.rows.share(slot)
        return length

    def _admit(self, budget: int, draft: _PlanDraft) -> None:
        """Start waiting requests, in the policy's order, while tokens, rows and pages allow."""
        self._blocked = None
        while budget > 0:
            request = self.queue.head()
            if request is None:
                return
            if not self._start(request, draft):
                self._blocked = request
                return
            budget -= self._place_chunk(request.slot, budget, draft)

    def _start(self, request: Request, draft: _PlanDraft) -> bool:
        """Make the queue's head a prefilling row; False when it has to wait."""
        if self.num_running >= self._max_num_seqs:
            return False
        # One page to grow for every running row, so that what is admitted now is not retracted in the next steps.
        pages = self.rows.start(request, watermark=self.num_running)
        if pages is None:
            return False
        self.queue.pop()
        slot = request.slot
        self._slot_of[request.rid] = slot
        self._prefill.append(slot)
        self.counters.prefix_hit_tokens += int(self.slots.computed[slot])
        draft.started.append(slot)
        draft.write_pages(np.full(len(pages), slot, np.int32), np.arange(len(pages), dtype=np.int32), pages)
        return True

    def _preempt_for_blocked(self) -> None:
        """With policy priority, a request that found no room takes the place of a running row that matters less."""
        if self._blocked is None or self._blocked.rid not in self.queue or not (len(self._decode) or self._prefill):
            return
        victim = self._least_deserving()
        if self.slots.priority[victim] > self._blocked.params.priority:
            self._retract(victim)

    # --------------------------------------------------------------------------------------------------- plan built

    def _build(self, step: int, decode: Int32, draft: _PlanDraft) -> StepPlan:
        slots = self.slots
        decode_start = slots.computed[decode]
        slots.computed[decode] += 1
        chunk_slots = np.array([slot for slot, _ in draft.prefill], np.int32)
        chunk_lens = np.array([length for _, length in draft.prefill], np.int32)
        chunk_ends = slots.computed[chunk_slots]
        chunk_starts = chunk_ends - chunk_lens
        row_slot = np.concatenate([decode, chunk_slots])
        samples = np.ones(len(row_slot), np.bool_)
        samples[len(decode) :] = chunk_ends == slots.known[chunk_slots]
        slots.last_step[row_slot] = step
        num_tokens = len(decode) + int(chunk_lens.sum())
        plan = StepPlan(
            step=step,
            bucket=bucket_for(self._buckets, num_tokens),
            num_decode_rows=len(decode),
            row_slot=row_slot,
            row_gen=slots.gen[row_slot],
            row_start=np.concatenate([decode_start, chunk_starts]),
            row_len=np.concatenate([np.ones(len(decode), np.int32), chunk_lens]),
            row_samples=samples,
            prefill_tokens=_concatenate(
                [
                    slots.tokens[slot, start:end]
                    for slot, start, end in zip(chunk_slots, chunk_starts, chunk_ends, strict=True)
                ]
            ),
            page_slot=_concatenate(draft.page_slot),
            page_index=_concatenate(draft.page_index),
            page_id=_concatenate(draft.page_id),
            start=self._start_rows(draft.started),
        )
        self._advance(row_slot[samples])
        return plan

    def _advance(self, sampling: Int32) -> None:
        """Rows that sample in the planned step decode from the next one on, or drain if this token is their last."""
        slots = self.slots
        last = slots.computed[sampling] + 1 >= slots.limit[sampling]
        slots.state[sampling] = np.where(last, State.DRAINING, State.DECODE)
        self._num_draining += int(np.count_nonzero(last))
        first = [slot for slot in self._prefill if slots.state[slot] != State.PREFILL]
        if first:
            self._prefill = [slot for slot in self._prefill if slots.state[slot] == State.PREFILL]
            self._decode = np.concatenate([self._decode, np.array(first, np.int32)])
        if first or last.any():
            self._decode = self._decode[slots.state[self._decode] == State.DECODE]

    def _start_rows(self, started: list[int]) -> StartRows:
        slots = self.slots
        slot = np.array(started, np.int32)
        requests = [request for request in (slots.request[s] for s in started) if request is not None]
        params = [request.params for request in requests]
        stop_ids = np.full((len(started), MAX_STOP_IDS), -1, np.int32)
        for row, p in enumerate(params):
            ids = dict.fromkeys(p.stop_token_ids + (() if p.ignore_eos else self._eos_ids))
            stop_ids[row, : len(ids)] = list(ids)
        return StartRows(
            slot=slot,
            temperature=np.array([p.temperature for p in params], np.float32),
            top_k=np.array([p.top_k for p in params], np.int32),
            top_p=np.array([p.top_p for p in params], np.float32),
            min_p=np.array([p.min_p for p in params], np.float32),
            seed=np.array([request.seed for request in requests], np.int64),
            limit=slots.limit[slot],
            min_tokens_until=slots.prompt_len[slot] + np.array([p.min_tokens for p in params], np.int32),
            stop_ids=stop_ids,
        )

    # -------------------------------------------------------------------------------------------------- row changes

    def _open(self, slot: int) -> Open:
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
        )

    def _end(self, slot: int) -> None:
        request = self.slots.request[slot]
        assert request is not None
        self.queue.remove(request.rid)  # where a retracted row waits
        self._leave(slot)
        self.rows.end(slot)
        del self._slot_of[request.rid]

    def _leave(self, slot: int) -> None:
        """Take the row off the list of its state."""
        state = self.slots.state[slot]
        if state == State.DECODE:
            self._decode = self._decode[self._decode != slot]
        elif state == State.PREFILL:
            self._prefill.remove(slot)
        elif state == State.DRAINING:
            self._num_draining -= 1

    # -------------------------------------------------------------------------------------------------- observation

    def gauges(self) -> dict[str, int]:
        """Current counts and running totals. free_pages + cached_pages = total_pages when nothing runs."""
        counters, rows = self.counters, self.rows
        return {
            "running": self.num_running,
            "waiting": len(self.queue),
            "total_pages": rows.pool.num_pages - 1,
            "free_pages": rows.pool.num_free,
            "cached_pages": rows.tree.num_evictable,
            "steps": self._next_step - 1,
            "preemptions": counters.preemptions,
            "prefill_tokens": counters.prefill_tokens,
            "decode_tokens": counters.decode_tokens,
            "prefix_hit_tokens": counters.prefix_hit_tokens,
            "finished": counters.finished,
            "aborted": counters.aborted,
        }

    def check_integrity(self) -> None:
        """Recompute every invariant from zero; raises AssertionError (or the pool's own) on a breach."""
        slots = self.slots
        self.rows.check_integrity()
        self.queue.check_integrity()
        by_state = {state: set(np.flatnonzero(slots.state == state).tolist()) for state in State}
        assert set(self._decode.tolist()) == by_state[State.DECODE]
        assert len(self._decode) == len(by_state[State.DECODE])
        assert sorted(self._prefill) == sorted(by_state[State.PREFILL])
        assert self._num_draining == len(by_state[State.DRAINING])
        assert self.num_running <= self._max_num_seqs
        assert set(self._slot_of.values()) == set(range(slots.num_slots)) - by_state[State.FREE]
        retracted = {request.slot for request in self.queue if request.slot >= 0}
        assert retracted == by_state[State.RETRACTED]


def num_slots_for(max_num_seqs: int) -> int:
    """Rows of every array: those that run, and as many retracted ones, which keep their slot while they wait."""
    return 2 * max_num_seqs


def wrap_int64(value: int) -> int:
    """`value` modulo 2^64 as a signed 64-bit integer."""
    return (value + 2**63) % 2**64 - 2**63


def _concatenate(parts: list[NDArray[np.int32]]) -> Int32:
    return np.concatenate(parts) if parts else _NO_SLOTS
