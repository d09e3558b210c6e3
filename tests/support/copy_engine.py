"""Copies of KV pages that happen as badly as they may, and a model whose pages tell which prefix they belong to."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from support.paged_model import POISON, PagedModel

from asyncengine.config import PAGE_SIZE
from gpu_runner.schedule.plan import Int32, StepPlan
from gpu_runner.schedule.transfers import Transfers

_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class PrefixModel(PagedModel):
    """Beside each token stands a hash of the sequence up to it, made of the one before as attention would: a page that
    has the right tokens, but was computed behind others, is found out."""

    def __init__(self, *, num_slots: int, num_pages: int, max_model_len: int, vocab_size: int) -> None:
        super().__init__(num_slots=num_slots, num_pages=num_pages, max_model_len=max_model_len, vocab_size=vocab_size)
        self.hashes = np.zeros((num_pages, PAGE_SIZE), np.uint64)
        self._powers = np.cumprod(np.full(max_model_len, _FACTOR))

    def _write(self, plan: StepPlan, row: int, tokens: np.ndarray, was_done: bool) -> None:
        super()._write(plan, row, tokens, was_done)
        if was_done:
            return
        slot, begin = plan.row_slot[row], int(plan.row_start[row])
        positions = np.arange(max(begin - 1, 0), begin + len(tokens))
        cells = self.page_table[slot, positions // PAGE_SIZE], positions % PAGE_SIZE
        before = self.hashes[cells][0] if begin else np.uint64(0)
        new = before + self._terms(tokens, begin)
        self.hashes[cells] = new if not begin else np.concatenate([[before], new])

    def _sample(self, plan: StepPlan, row: int) -> tuple[int, int]:
        slot = plan.row_slot[row]
        positions = np.arange(self.kv_len[slot])
        cells = self.page_table[slot, positions // PAGE_SIZE], positions % PAGE_SIZE
        assert np.array_equal(self.hashes[cells], self._terms(self.pages[cells], 0)), "a page is of another prefix"
        return super()._sample(plan, row)

    def _terms(self, tokens: np.ndarray, begin: int) -> np.ndarray:
        """What the tokens at positions `begin`, ... add to the hash, summed up."""
        summed: np.ndarray = np.cumsum((tokens + 1).astype(np.uint64) * self._powers[begin : begin + len(tokens)])
        return summed


class CopyEngine:
    """Host memory for a `PagedModel`, and copies that are done in order, but as late as `finish` says.

    What a copy is to fill holds poison from its start. When a page is read and written, at the start or at the end of
    its batch, is drawn by `rng`; either must do.
    """

    def __init__(self, model: PrefixModel, *, host_pages: int, rng: np.random.Generator) -> None:
        self.in_flight: deque[tuple[Transfers, np.ndarray, np.ndarray]] = deque()
        self.done_ticket = 0
        self._model = model
        self._pages = np.full((host_pages, PAGE_SIZE), POISON, np.int64)
        self._hashes = np.zeros((host_pages, PAGE_SIZE), np.uint64)
        self._rng = rng

    def start(self, batch: Transfers) -> None:
        self._check(batch)
        self._pages[batch.store_to] = POISON
        self._model.pages[batch.load_to] = POISON
        stores, loads = (self._rng.random(len(pages)) < 0.5 for pages in (batch.store_from, batch.load_from))
        self._copy(batch, stores, loads)
        self.in_flight.append((batch, ~stores, ~loads))

    def finish(self, count: int = 1) -> None:
        """Up to `count` more batches are done."""
        for _ in range(min(count, len(self.in_flight))):
            batch, stores, loads = self.in_flight.popleft()
            self._copy(batch, stores, loads)
            self.done_ticket = batch.ticket

    def _copy(self, batch: Transfers, stores: np.ndarray, loads: np.ndarray) -> None:
        for pages, copies in ((self._model.pages, self._pages), (self._model.hashes, self._hashes)):
            copies[batch.store_to[stores]] = pages[batch.store_from[stores]]
            pages[batch.load_to[loads]] = copies[batch.load_from[loads]]
        assert (self._pages[batch.store_to[stores]] != POISON).all(), "what is stored has been computed"
        assert (self._model.pages[batch.load_to[loads]] != POISON).all(), "what is loaded has been stored"

    def _check(self, batch: Transfers) -> None:
        """No page is in the batch twice, and none is filled that another batch in flight reads or fills."""
        assert batch.ticket == self.done_ticket + len(self.in_flight) + 1
        assert len(batch.store_from) == len(batch.store_to)
        assert len(batch.load_from) == len(batch.load_to)
        for ends in (("store_from", "load_to"), ("store_to", "load_from")):
            pages: Int32 = np.concatenate([getattr(batch, end) for end in ends])
            assert len(np.unique(pages)) == len(pages), f"a page is in the batch twice: {ends}"
        for other, _, _ in self.in_flight:  # two copies may read a page at once, but nobody else touches what is filled
            for filled, read in (("load_to", "store_from"), ("store_to", "load_from")):
                for one, two in ((batch, other), (other, batch)):
                    touched = np.concatenate([getattr(two, filled), getattr(two, read)])
                    assert not np.isin(getattr(one, filled), touched).any(), f"a page of {filled} is touched"
        assert not len(batch.store_from) or batch.store_from.min() > 0
        assert not len(batch.load_to) or batch.load_to.min() > 0
        for pages in (batch.store_to, batch.load_from):
            assert not len(pages) or 0 <= pages.min() <= pages.max() < len(self._pages)


class ExecutorCopies:
    """The copies of an executor for one of the cores that use it one after the other: each counts its batches from 1.
    A core sees a batch done as late as `finish` says, or later."""

    def __init__(self, executor: Any) -> None:
        self.done_ticket = 0
        self._executor = executor
        self._before = max(0, executor.transferred())
        self._started = 0

    def start(self, batch: Transfers) -> None:
        assert batch.ticket == self._started + 1
        self._started = batch.ticket
        self._executor.transfer(batch._replace(ticket=self._before + batch.ticket))

    def finish(self, count: int = 1) -> None:
        """Up to `count` more batches may be seen to be done."""
        done = self._executor.transferred() - self._before
        self.done_ticket = max(self.done_ticket, min(done, self.done_ticket + count))
