"""A plan under construction: what the scheduler has decided so far, and how that becomes a `StepPlan`."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from asyncengine.config import MAX_STOP_IDS
from gpu_runner.schedule.buckets import bucket_for
from gpu_runner.schedule.plan import NO_SCORE_ROWS, NO_SCORES, Int32, StartRows, StepPlan
from gpu_runner.schedule.running import DecodeRows
from gpu_runner.schedule.slots import Slots
from gpu_runner.schedule.step_room import StepRoom


class PlanDraft:
    """The decisions of one `Scheduler.plan()`. Arrays handed to it belong to the plan from then on."""

    __slots__ = ("decode", "decode_start", "num_decode_rows", "page_writes", "prefill", "room", "scores", "started")

    def __init__(self, decode: DecodeRows, decode_start: Int32) -> None:
        self.decode = decode
        self.decode_start = decode_start  # [R], positions of the decode rows' tokens
        self.num_decode_rows = len(decode.slot)
        self.started: list[int] = []
        self.prefill: list[tuple[int, int]] = []  # (slot, chunk length)
        self.room: StepRoom | None = None  # for chunks; None while none was placed
        self.scores: list[tuple[int, int, int]] = []  # (index in `prefill`, first position, how many), ascending
        self.page_writes: list[tuple[Int32, Int32, Int32]] = []  # slots, places in their page tables, page ids

    def __bool__(self) -> bool:
        return bool(self.num_decode_rows or self.prefill)

    def prefilled(self, slots: Slots) -> list[int]:
        """Slots whose chunk reaches the end of what they know, so that they sample."""
        return [slot for slot, _ in self.prefill if slots.computed[slot] == slots.known[slot]]

    @property
    def num_scores(self) -> int:
        return sum(count for _, _, count in self.scores)

    def write_pages(self, slots: Int32, indices: Int32, pages: Int32) -> None:
        """page_table[slots, indices] = pages"""
        self.page_writes.append((slots, indices, pages))


class PlanBuilder:
    """Makes plans of drafts. eos_ids: they end every row that does not ignore them."""

    def __init__(self, slots: Slots, *, buckets: tuple[int, ...], eos_ids: tuple[int, ...]) -> None:
        self._slots = slots
        self._buckets = buckets
        self._eos_ids = eos_ids
        # Steps without such rows share these: a steady decode step makes no empty arrays.
        self._no_starts = self._start_rows([])
        self._nothing: Int32 = np.empty(0, np.int32)

    def build(self, draft: PlanDraft, step: int) -> StepPlan:
        """Arrays of the plan are its own, or shared ones that nobody changes. `Slots.computed` already counts it."""
        slots, decode, num_decode_rows = self._slots, draft.decode, draft.num_decode_rows
        row_slot, row_gen, row_start = decode.slot, decode.gen, draft.decode_start
        row_len, row_samples, prefill_tokens = decode.length, decode.samples, self._nothing
        scores, score_row = NO_SCORES, NO_SCORE_ROWS
        if draft.prefill:
            chunk_slot, chunk_len = np.array(draft.prefill, np.int32).T
            chunk_end = slots.computed[chunk_slot]
            chunk_start = chunk_end - chunk_len
            slots.last_step[chunk_slot] = step
            row_slot = np.concatenate([row_slot, chunk_slot])
            row_gen = np.concatenate([row_gen, slots.gen[chunk_slot]])
            row_start = np.concatenate([row_start, chunk_start])
            row_len = np.concatenate([row_len, chunk_len])
            row_samples = np.concatenate([row_samples, chunk_end == slots.known[chunk_slot]])
            prefill_tokens = np.concatenate(
                [
                    slots.tokens[slot, start:end]
                    for slot, start, end in zip(chunk_slot, chunk_start, chunk_end, strict=True)
                ]
            )
            if draft.scores:
                first_token = num_decode_rows + np.cumsum(chunk_len) - chunk_len
                scores = self._scores(draft, first_token - chunk_start)
                score_row = np.repeat(
                    np.array([num_decode_rows + place for place, _, _ in draft.scores], np.int32),
                    [count for _, _, count in draft.scores],
                )
        page_slot, page_index, page_id = self._page_writes(draft.page_writes)
        return StepPlan(
            step,
            bucket_for(self._buckets, num_decode_rows + len(prefill_tokens)),
            num_decode_rows,
            row_slot,
            row_gen,
            row_start,
            row_len,
            row_samples,
            prefill_tokens,
            page_slot,
            page_index,
            page_id,
            self._start_rows(draft.started) if draft.started else self._no_starts,
            scores,
            score_row,
        )

    def _scores(self, draft: PlanDraft, token_of_position: Int32) -> Int32:
        """`StepPlan.scores`. token_of_position: of each prefill row, what is to be added to a position to make it an
        index among the step's tokens."""
        parts = []
        for place, first, count in draft.scores:
            slot, _ = draft.prefill[place]
            request = self._slots.request[slot]
            assert request is not None
            part = np.empty((count, 3), np.int32)
            part[:, 0] = np.arange(first, first + count) + token_of_position[place]
            part[:, 1] = request.prompt[first + 1 : first + count + 1]
            part[:, 2] = request.params.prompt_logprobs or 0
            parts.append(part)
        return np.concatenate(parts)

    def _start_rows(self, started: list[int]) -> StartRows:
        slots = self._slots
        slot = np.array(started, np.int32)
        requests = [request for request in (slots.request[s] for s in started) if request is not None]
        params = [request.params for request in requests]
        stop_ids = np.full((len(started), MAX_STOP_IDS), -1, np.int32)
        biases: list[tuple[int, float]] = []
        for row, p in enumerate(params):
            biases += p.logit_bias
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
            prompt_len=slots.prompt_len[slot],
            presence_penalty=np.array([p.presence_penalty for p in params], np.float32),
            frequency_penalty=np.array([p.frequency_penalty for p in params], np.float32),
            repetition_penalty=np.array([p.repetition_penalty for p in params], np.float32),
            logprobs=np.array([-1 if p.logprobs is None else p.logprobs for p in params], np.int32),
            constrained=slots.constrained[slot].astype(np.int32),
            num_bias=np.array([len(p.logit_bias) for p in params], np.int32),
            bias_ids=np.array([token for token, _ in biases], np.int32),
            bias_values=np.array([value for _, value in biases], np.float32),
        )

    def _page_writes(self, parts: list[tuple[Int32, Int32, Int32]]) -> Iterable[Int32]:
        """Slots, places in their page tables and page ids."""
        if len(parts) == 1:
            return parts[0]
        return map(np.concatenate, zip(*parts, strict=True)) if parts else (self._nothing,) * 3
