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

_NUMBERS = np.dtype(
    [
        *(("temperature", np.float32), ("top_k", np.int32), ("top_p", np.float32), ("min_p", np.float32)),
        *(("seed", np.int64), ("min_tokens", np.int32)),
        *((f"{name}_penalty", np.float32) for name in ("presence", "frequency", "repetition")),
        *(("logprobs", np.int32), ("num_bias", np.int32)),
    ]
)
"""What starts tell of each row's parameters: one array of them all is made many times quicker than one of each."""

_NO_BIAS_VALUES = np.empty(0, np.float32)


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
        return [slot for slot, _ in self.prefill if slots.computed.item(slot) == slots.known.item(slot)]

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
        self._stop_ids = _padded(eos_ids)  # of rows that name none
        # Steps without such rows share these: a steady decode step makes no empty arrays.
        self._nothing: Int32 = np.empty(0, np.int32)
        self._no_starts = self._start_rows(self._nothing)

    def build(self, draft: PlanDraft, step: int) -> StepPlan:
        """Arrays of the plan are its own, or shared ones that nobody changes. `Slots.computed` already counts it."""
        slots, decode, num_decode_rows = self._slots, draft.decode, draft.num_decode_rows
        row_slot, row_gen, row_start = decode.slot, decode.gen, draft.decode_start
        row_len, row_samples, prefill_tokens = decode.length, decode.samples, self._nothing
        scores, score_row = NO_SCORES, NO_SCORE_ROWS
        if draft.prefill:
            chunk_slot, chunk_len = np.array(draft.prefill, np.int32).T
            index = chunk_slot.astype(np.intp)
            chunk_end = slots.computed[index]
            chunk_start = chunk_end - chunk_len
            slots.last_step[index] = step
            row_slot = np.concatenate((row_slot, chunk_slot))
            row_gen = np.concatenate((row_gen, slots.gen[index]))
            row_start = np.concatenate((row_start, chunk_start))
            row_len = np.concatenate((row_len, chunk_len))
            row_samples = np.concatenate((row_samples, chunk_end == slots.known[index]))
            ends = zip(draft.prefill, chunk_end.tolist(), strict=True)
            prefill_tokens = np.concatenate([slots.tokens[slot, end - length : end] for (slot, length), end in ends])
            if draft.scores:
                first_token = num_decode_rows + np.cumsum(chunk_len) - chunk_len
                scores = self._scores(draft, first_token - chunk_start)
                score_row = np.repeat(
                    np.array([num_decode_rows + place for place, _, _ in draft.scores], np.int32),
                    [count for _, _, count in draft.scores],
                )
        start = self._no_starts
        if draft.started:
            started = np.array(draft.started, np.int32)
            start = self._start_rows(started)
            draft.write_pages(*self._pages(started))
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
            start,
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

    def _start_rows(self, slot: Int32) -> StartRows:
        slots = self._slots
        requests = [request for request in map(slots.request.__getitem__, slot.tolist()) if request is not None]
        rows = [request.params for request in requests]
        numbers = np.array(
            [
                (
                    *(p.temperature, p.top_k, p.top_p, p.min_p, request.seed, p.min_tokens),
                    *(p.presence_penalty, p.frequency_penalty, p.repetition_penalty),
                    *(-1 if p.logprobs is None else p.logprobs, len(p.logit_bias)),
                )
                for request, p in zip(requests, rows, strict=True)
            ],
            _NUMBERS,
        )
        stop_ids = np.empty((len(rows), MAX_STOP_IDS), np.int32)
        stop_ids[:] = self._stop_ids
        biases: list[tuple[int, float]] = []
        for row, p in enumerate(rows):
            biases += p.logit_bias
            if p.stop_token_ids or p.ignore_eos:
                stop_ids[row] = _padded(p.stop_token_ids + (() if p.ignore_eos else self._eos_ids))
        prompt_len = slots.prompt_len[slot]
        return StartRows(
            slot=slot,
            temperature=numbers["temperature"],
            top_k=numbers["top_k"],
            top_p=numbers["top_p"],
            min_p=numbers["min_p"],
            seed=numbers["seed"],
            limit=slots.limit[slot],
            min_tokens_until=prompt_len + numbers["min_tokens"],
            stop_ids=stop_ids,
            prompt_len=prompt_len,
            presence_penalty=numbers["presence_penalty"],
            frequency_penalty=numbers["frequency_penalty"],
            repetition_penalty=numbers["repetition_penalty"],
            logprobs=numbers["logprobs"],
            constrained=slots.constrained[slot].astype(np.int32),
            num_bias=numbers["num_bias"],
            bias_ids=np.array([token for token, _ in biases], np.int32) if biases else self._nothing,
            bias_values=np.array([value for _, value in biases], np.float32) if biases else _NO_BIAS_VALUES,
        )

    def _pages(self, slot: Int32) -> tuple[Int32, Int32, Int32]:
        """All page-table entries of these rows, as `PlanDraft.write_pages` takes them."""
        slots = self._slots
        counts = slots.num_pages[slot]
        ends = counts.cumsum(dtype=np.int32)
        slot_of, begin_of = slot.repeat(counts), (ends - counts).repeat(counts)
        place = np.arange(len(slot_of), dtype=np.int32) - begin_of
        return slot_of, place, slots.page_cells[slot_of * np.intp(slots.pages_per_seq) + place]

    def _page_writes(self, parts: list[tuple[Int32, Int32, Int32]]) -> Iterable[Int32]:
        """Slots, places in their page tables and page ids."""
        if len(parts) == 1:
            return parts[0]
        return map(np.concatenate, zip(*parts, strict=True)) if parts else (self._nothing,) * 3


def _padded(stop_ids: tuple[int, ...]) -> Int32:
    """Each once: [MAX_STOP_IDS]."""
    padded: Int32 = np.full(MAX_STOP_IDS, -1, np.int32)
    ids = list(dict.fromkeys(stop_ids))
    padded[: len(ids)] = ids
    return padded
