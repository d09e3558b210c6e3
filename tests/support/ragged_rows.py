"""Rows of very different lengths in a paged cache, and steps over them: their plans, and what the reference takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from asyncengine.config import PAGE_SIZE
from gpu_runner.kernels.ops import BatchMeta
from gpu_runner.kernels.upload_layout import Int32, Upload
from gpu_runner.schedule.buckets import bucket_for, token_buckets

FEW_ROWS = 64
NOTHING: Int32 = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class RaggedStep:
    """The first `num_decode_rows` slots that decode, and the first slots that prefill, a chunk each."""

    bucket: int
    num_decode_rows: int
    chunks: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.num_decode_rows + sum(self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedRows:
    """Slots that decode, as many as a step has rows, and then slots that prefill; each has a context in the cache.

    max_tokens: of a step. odd_sizes: of steps that are the largest of other engines, below it. decode_contexts,
    prefill_contexts: tokens of the first slots of a kind. other_contexts: those of the other slots that decode are
    below it. vocab_size: ids are below it.
    """

    max_rows: int
    max_tokens: int
    odd_sizes: tuple[int, ...]
    vocab_size: int
    decode_contexts: tuple[int, ...]
    prefill_contexts: tuple[int, ...]
    other_contexts: int

    @property
    def num_slots(self) -> int:
        return self.max_rows + len(self.prefill_contexts)

    @property
    def contexts(self) -> Int32:
        """[num_slots] tokens."""
        contexts = np.random.default_rng(0).integers(0, self.other_contexts, self.num_slots).astype(np.int32)
        first = self.decode_contexts[: self.max_rows]
        contexts[: len(first)] = first
        contexts[self.max_rows :] = self.prefill_contexts
        return contexts

    @property
    def _most_chunks(self) -> int:
        return min(len(self.prefill_contexts), self.max_rows)

    @property
    def _pages(self) -> Int32:
        """[num_slots] pages that hold the context and the most that a step adds."""
        chunks = chunks_of(self.max_tokens, self._most_chunks)
        chunks += (0,) * (len(self.prefill_contexts) - len(chunks))
        return -(-(self.contexts + np.array((1,) * self.max_rows + chunks)) // PAGE_SIZE).astype(np.int32)

    @property
    def num_pages(self) -> int:
        """The dummy page 0 and one that nobody owns among them."""
        return int(self._pages.sum()) + 2

    def page_table(self) -> Int32:
        """[num_slots, pages_per_seq]; pages in no order."""
        pages = self._pages
        table = np.zeros((self.num_slots, int(pages.max())), np.int32)
        owned = np.arange(table.shape[1]) < pages[:, None]
        table[owned] = np.random.default_rng(1).permutation(self.num_pages - 1)[: int(pages.sum())] + 1
        return table

    def token_ids(self, count: int) -> Int32:
        return np.random.default_rng(2).integers(0, self.vocab_size, count).astype(np.int32)

    def max_rows_of(self, max_tokens: int) -> int:
        """Of an engine whose largest step is of so many tokens. Not many numbers, as each has kernels of its own."""
        return self.max_rows if max_tokens >= self.max_rows else min(FEW_ROWS, max_tokens)

    def steps(self) -> Iterator[RaggedStep]:
        """Of each bucket, and each odd size, one that decodes, if rows are as many, and one that prefills, of every
        second two beside rows that decode. Some steps fill their buckets, others leave as much padding as can be."""
        for max_tokens in (self.max_tokens, *self.odd_sizes):
            buckets, rows = token_buckets(max_tokens), self.max_rows_of(max_tokens)
            for index, (previous, bucket) in enumerate(pairwise((0, *buckets))):
                if max_tokens != self.max_tokens and bucket != max_tokens:
                    continue
                fewest, fills = previous + 1, index % 2 == 0
                if bucket <= bucket_for(buckets, rows):
                    yield RaggedStep(bucket, min(rows, fewest if fills else bucket), ())
                tokens = bucket if fills else fewest
                decode = min(tokens // 4, rows - self._most_chunks) if index % 4 < 2 else 0
                yield RaggedStep(bucket, decode, chunks_of(tokens - decode, self._most_chunks))


def chunks_of(tokens: int, most: int) -> tuple[int, ...]:
    """Half of them, half of what is left, and so on: at most so many chunks."""
    chunks: list[int] = []
    while tokens and len(chunks) < most:
        chunks.append(tokens if len(chunks) == most - 1 else tokens - tokens // 2)
        tokens -= chunks[-1]
    return tuple(chunks)


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """A step's tokens and where they lie, for the kernels and for the reference."""

    upload: Upload
    token_ids: Tensor  # [T] int64, without padding
    meta: BatchMeta


def batch_of(rows: RaggedRows, step: RaggedStep, table: Int32, ids: Int32, device: torch.device) -> RaggedBatch:
    """table: `page_table` of the rows. ids: of the slots' last tokens, then of those that prefill, as they come."""
    slot = np.array([*range(step.num_decode_rows), *range(rows.max_rows, rows.max_rows + len(step.chunks))], np.int32)
    length = np.array((1,) * step.num_decode_rows + step.chunks, np.int32)
    start = rows.contexts[slot]
    prefill_ids = ids[rows.num_slots :][: sum(step.chunks)]
    positions = np.concatenate([np.arange(first, first + count) for first, count in zip(start, length, strict=True)])
    kv_index = table[np.repeat(slot, length), positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    nothing = dict.fromkeys(Upload._fields, NOTHING)
    upload = Upload(
        **{
            **nothing,  # type: ignore[arg-type]
            "num_decode_rows": step.num_decode_rows,
            "row_slot": slot,
            "row_start": start,
            "row_len": length,
            "prefill_tokens": prefill_ids,
            "sample_row": np.arange(len(slot), dtype=np.int32),
            "sample_token": np.array(list(accumulate(length)), np.int32) - 1,
        }
    )
    meta = BatchMeta(
        num_decode_rows=step.num_decode_rows,
        row_start=start,
        row_len=length,
        row_slot=torch.from_numpy(slot).to(device, torch.int64),
        positions=torch.from_numpy(positions).to(device, torch.int64),
        kv_index=torch.from_numpy(kv_index).to(device, torch.int64),
        page_table=torch.from_numpy(table).to(device),
    )
    token_ids = np.concatenate([ids[slot[: step.num_decode_rows]], prefill_ids])
    return RaggedBatch(upload, torch.from_numpy(token_ids).to(device, torch.int64), meta)
