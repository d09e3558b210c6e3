"""A device that computes nothing but keeps a real paged cache: tests of the scheduler see every misplaced page.

The K/V of a token is its id, written where the page table says. The "model" reads a row's whole context back through
its page table and hashes it into the next token, so a page that was overwritten, freed too early, shared wrongly or not
written changes the output. Steps run when they are collected, as late as a device could run them.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from asyncengine.config import MAX_STOP_IDS, PAGE_SIZE
from asyncengine.wire.base import Finish
from gpu_runner.schedule.plan import StepPlan, StepResult, StepScores

POISON = -7


def next_token(context: np.ndarray, vocab_size: int) -> int:
    """The token that follows `context`: a polynomial hash of all of it."""
    state = 0x9E3779B9
    for token in context.tolist():
        state = (state * 1_000_003 + token + 12345) & 0xFFFFFFFF
        state ^= state >> 15
    return state % vocab_size


def expected_output(prompt: np.ndarray, *, limit: int, vocab_size: int, stop_ids: tuple[int, ...]) -> list[int]:
    """What a request must generate, whatever happened around it."""
    tokens = [int(token) for token in prompt]
    while len(tokens) < limit:
        tokens.append(next_token(np.array(tokens), vocab_size))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


class PagedModel:
    """Executes plans against a paged cache of token ids. `check`: raise when a live row reads an unwritten position."""

    def __init__(self, *, num_slots: int, num_pages: int, max_model_len: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.pages = np.full((num_pages, PAGE_SIZE), POISON, np.int64)
        self.page_table = np.zeros((num_slots, -(-max_model_len // PAGE_SIZE)), np.int32)
        self.kv_len = np.zeros(num_slots, np.int64)
        self.last_token = np.zeros(num_slots, np.int64)
        self.done = np.zeros(num_slots, np.bool_)
        self.limit = np.zeros(num_slots, np.int64)
        self.stop_ids = np.full((num_slots, MAX_STOP_IDS), -1, np.int64)
        self.in_flight: deque[StepPlan] = deque()
        self.computed_tokens = 0

    def launch(self, plan: StepPlan) -> None:
        self.in_flight.append(plan)

    def collect(self) -> StepResult:
        plan = self.in_flight.popleft()
        start = plan.start
        self.done[start.slot] = False
        self.limit[start.slot] = start.limit
        self.stop_ids[start.slot] = start.stop_ids
        self.page_table[plan.page_slot, plan.page_index] = plan.page_id
        rows = range(plan.num_rows)
        chunks = self._inputs(plan)
        was_done = [bool(self.done[slot]) for slot in plan.row_slot]
        for row in rows:  # all rows write before any row reads, as a layer does
            self._write(plan, row, chunks[row], was_done[row])
        tokens = np.full(plan.num_rows, -1, np.int32)
        finish = np.zeros(plan.num_rows, np.uint8)
        for row in rows:
            if plan.row_samples[row] and not was_done[row]:
                tokens[row], finish[row] = self._sample(plan, row)
        return StepResult(plan.step, tokens, finish, scores=self._scores(plan, chunks) if len(plan.scores) else None)

    def _inputs(self, plan: StepPlan) -> list[np.ndarray]:
        ends = np.cumsum(plan.row_len[plan.num_decode_rows :])
        prefill = np.split(plan.prefill_tokens, ends[:-1]) if len(ends) else []
        decode = [self.last_token[slot : slot + 1] for slot in plan.row_slot[: plan.num_decode_rows]]
        return decode + prefill

    def _scores(self, plan: StepPlan, chunks: list[np.ndarray]) -> StepScores:
        """A target's log-probability is minus the number of the token before it, its rank that one's position + 2, and
        the most likely token is that one, as often as is asked."""
        starts = [np.arange(start, start + len(chunk)) for start, chunk in zip(plan.row_start, chunks, strict=True)]
        index, _, wanted = plan.scores.T
        rows = np.repeat(np.arange(plan.num_rows), plan.row_len)
        assert np.array_equal(rows[index], plan.score_row), "a scored token is one of its row's"
        before = np.concatenate(chunks)[index]
        return StepScores(
            logprobs=-before.astype(np.float32),
            ranks=(np.concatenate(starts)[index] + 2).astype(np.int32),
            top_ends=np.cumsum(wanted, dtype=np.int32),
            top_ids=np.repeat(before, wanted).astype(np.int32),
            top_logprobs=np.repeat(-before, wanted).astype(np.float32),
        )

    def _write(self, plan: StepPlan, row: int, tokens: np.ndarray, was_done: bool) -> None:
        slot, begin = plan.row_slot[row], int(plan.row_start[row])
        assert len(tokens) == plan.row_len[row]
        self.computed_tokens += len(tokens)
        if was_done:
            return
        if row < plan.num_decode_rows:
            assert self.kv_len[slot] == begin, "the host's idea of a decode row's position is the device's"
        positions = np.arange(begin, begin + len(tokens))
        pages = self.page_table[slot, positions // PAGE_SIZE]
        assert (pages > 0).all(), "a live row has a page for every position it writes"
        self.pages[pages, positions % PAGE_SIZE] = tokens
        self.kv_len[slot] = begin + len(tokens)

    def _sample(self, plan: StepPlan, row: int) -> tuple[int, int]:
        slot = plan.row_slot[row]
        positions = np.arange(self.kv_len[slot])
        context = self.pages[self.page_table[slot, positions // PAGE_SIZE], positions % PAGE_SIZE]
        assert (context != POISON).all(), "a live row reads only what was written"
        token = next_token(context, self.vocab_size)
        self.last_token[slot] = token
        finish = Finish.NONE
        if token in self.stop_ids[slot]:
            finish = Finish.STOP
        elif self.kv_len[slot] + 1 >= self.limit[slot]:
            finish = Finish.LENGTH
        self.done[slot] = finish != Finish.NONE
        return token, int(finish)
