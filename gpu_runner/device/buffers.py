"""How a step's host data reaches the device in one copy, and its results come back in one.

Every array of a plan is written, one behind the other, into one int32 buffer of the host; one copy takes the used part
to a buffer of the device, where the arrays are views again. Buffers are pinned on CUDA and allocated once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncengine.config import MAX_STOP_IDS, PAGE_SIZE
from gpu_runner.device.sampling_path import SamplingPath
from gpu_runner.device.stream import Mark
from gpu_runner.schedule.plan import Int32, StepPlan

ALIGNMENT_WORDS = 2
"""Sections start at even words, so that int64 views of the device buffer are aligned."""
NUM_SECTIONS = 17
DTYPES: dict[str, torch.dtype] = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


class Section(NamedTuple):
    """Where one array lies in an upload buffer."""

    first: int  # word
    words: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, buffer: Tensor) -> Tensor:
        """The array as a view of `buffer`, [words] int32."""
        return buffer[self.first : self.first + self.words].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A plan as a device step needs it: facts the host knows, and sections of the upload buffer.

    sample_row: the rows that sample, [N]. sample_token: the index of each one's last token among the step's T.
    page_cell: page_slot * pages_per_seq + page_index. The rest are the plan's and its `StartRows`' own.
    """

    words: int  # used part of the buffer
    path: SamplingPath
    num_decode_rows: int
    num_tokens: int
    row_start_host: Int32  # [R]
    row_len_host: Int32  # [R]
    row_slot: Section
    row_start: Section
    row_len: Section
    prefill_tokens: Section
    sample_row: Section
    sample_token: Section
    page_cell: Section
    page_id: Section
    start_slot: Section
    temperature: Section
    top_k: Section
    top_p: Section
    min_p: Section
    seed: Section
    limit: Section
    min_tokens_until: Section
    stop_ids: Section


@dataclass(frozen=True, slots=True)
class RingSlot:
    """The host buffers of one step in flight. They may be written once `mark`, recorded behind the step, was waited
    for."""

    upload: Tensor  # [upload_words] int32
    results: Tensor  # [2 * num_slots] int32; R tokens, then R finish values
    mark: Mark


def pages_for(tokens: int) -> int:
    """KV pages that hold `tokens`."""
    return -(-tokens // PAGE_SIZE)


def upload_words(*, num_slots: int, pages_per_seq: int, max_step_tokens: int) -> int:
    """Words that hold any plan: each slot at most one row and one start in it, each page-table cell at most once."""
    rows = num_slots * (3 + 2)
    starts = num_slots * (9 + MAX_STOP_IDS)
    pages = num_slots * pages_per_seq * 2
    return rows + starts + pages + max_step_tokens + NUM_SECTIONS * ALIGNMENT_WORDS


def pack(plan: StepPlan, path: SamplingPath, *, pages_per_seq: int, buffer: Int32) -> PackedStep:
    """Write `plan` into `buffer`, the array of a ring slot's upload tensor."""
    writer = _Writer(buffer)
    start = plan.start
    sample_row = np.flatnonzero(plan.row_samples).astype(np.int32)
    last_token = np.cumsum(plan.row_len, dtype=np.int32) - 1
    return PackedStep(
        path=path,
        num_decode_rows=plan.num_decode_rows,
        num_tokens=plan.num_tokens,
        row_start_host=plan.row_start,
        row_len_host=plan.row_len,
        row_slot=writer.add(plan.row_slot),
        row_start=writer.add(plan.row_start),
        row_len=writer.add(plan.row_len),
        prefill_tokens=writer.add(plan.prefill_tokens),
        sample_row=writer.add(sample_row),
        sample_token=writer.add(last_token[sample_row]),
        page_cell=writer.add(plan.page_slot * np.int32(pages_per_seq) + plan.page_index),
        page_id=writer.add(plan.page_id),
        start_slot=writer.add(start.slot),
        temperature=writer.add(start.temperature),
        top_k=writer.add(start.top_k),
        top_p=writer.add(start.top_p),
        min_p=writer.add(start.min_p),
        seed=writer.add(start.seed),
        limit=writer.add(start.limit),
        min_tokens_until=writer.add(start.min_tokens_until),
        stop_ids=writer.add(start.stop_ids),
        words=writer.used,  # once all is written
    )


class _Writer:
    def __init__(self, buffer: Int32) -> None:
        self._buffer = buffer
        self.used = 0

    def add(self, values: NDArray[Any]) -> Section:
        dtype = DTYPES[values.dtype.name]
        if not values.size:
            return Section(self.used, 0, dtype, values.shape)
        words = np.ascontiguousarray(values).view(np.int32).reshape(-1)
        first, self.used = self.used, self.used + len(words)
        self._buffer[first : self.used] = words
        self.used += -self.used % ALIGNMENT_WORDS
        return Section(first, len(words), dtype, values.shape)
