"""How a step's host data reaches the device in one copy, and its results come back in one.

Every array of a plan is written, one behind the other, into one int32 buffer of the host (`kernels.upload_layout` says
where); one copy takes the used part to a buffer of the device. Buffers are pinned on CUDA and allocated once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncengine.config import PAGE_SIZE
from gpu_runner.device.sampling_path import SamplingPath
from gpu_runner.device.stream import Mark
from gpu_runner.kernels import upload_layout
from gpu_runner.kernels.upload_layout import Upload
from gpu_runner.schedule.plan import Int32, StepPlan


class PackedStep(NamedTuple):
    """What the host knows of a step in an upload buffer: enough to choose what is run, and how far to copy."""

    words: int  # used part of the buffer
    bucket: int
    path: SamplingPath
    num_decode_rows: int
    num_tokens: int
    num_samples: int
    row_start: Int32  # [R]
    row_len: Int32  # [R]

    @property
    def num_rows(self) -> int:
        return len(self.row_len)


class Prefixes:
    """Beginnings of a buffer as views that are made once.

    To slice a tensor costs the host more than to copy the words that a length rounded up to a power of two adds.
    """

    def __init__(self, buffer: Tensor) -> None:
        """buffer: [words]."""
        self._views = tuple(buffer[: 1 << bits] for bits in range((len(buffer) - 1).bit_length() + 1))

    def holding(self, words: int) -> Tensor:
        """At least the first `words` words; of buffers of one size, equally many."""
        return self._views[(words - 1).bit_length()]


@dataclass(frozen=True, slots=True)
class RingSlot:
    """The host buffers of one step in flight. They may be written once `mark`, recorded behind the step, was waited
    for."""

    upload: Prefixes  # of [upload_words] int32
    results: Tensor  # [2, num_slots] int32: tokens, finish values
    upload_array: Int32  # the memory of `upload`
    results_array: Int32  # the memory of `results`
    mark: Mark

    @classmethod
    def allocate(cls, *, upload_words: int, num_slots: int, pinned: bool, mark: Mark) -> RingSlot:
        upload = torch.empty(upload_words, dtype=torch.int32, pin_memory=pinned)
        results = torch.empty(2, num_slots, dtype=torch.int32, pin_memory=pinned)
        return cls(
            upload=Prefixes(upload),
            results=results,
            upload_array=upload.numpy(),
            results_array=results.numpy(),
            mark=mark,
        )


def pages_for(tokens: int) -> int:
    """KV pages that hold `tokens`."""
    return -(-tokens // PAGE_SIZE)


def pack(plan: StepPlan, path: SamplingPath, *, pages_per_seq: int, buffer: Int32) -> PackedStep:
    """Write `plan` into `buffer`, the array of a ring slot's upload tensor."""
    start = plan.start
    row: Int32 = np.arange(plan.num_rows, dtype=np.int32)
    only_decode = plan.num_decode_rows == len(row)
    last_token: Int32 = row if only_decode else np.cumsum(plan.row_len, dtype=np.int32) - 1
    sample_row, sample_token = row, last_token
    if not plan.row_samples.all():
        sample_row, sample_token = row[plan.row_samples], last_token[plan.row_samples]
    upload = Upload(
        num_decode_rows=plan.num_decode_rows,
        row_slot=plan.row_slot,
        row_start=plan.row_start,
        row_len=plan.row_len,
        prefill_tokens=plan.prefill_tokens,
        sample_row=sample_row,
        sample_token=sample_token,
        page_cell=plan.page_slot * np.int32(pages_per_seq) + plan.page_index,
        page_id=plan.page_id,
        start_slot=start.slot,
        temperature=start.temperature,
        top_k=start.top_k,
        top_p=start.top_p,
        min_p=start.min_p,
        seed=start.seed,
        limit=start.limit,
        min_tokens_until=start.min_tokens_until,
        stop_ids=start.stop_ids,
    )
    return PackedStep(
        words=upload_layout.pack(upload, buffer),
        bucket=plan.bucket,
        path=path,
        num_decode_rows=plan.num_decode_rows,
        num_tokens=plan.num_tokens,
        num_samples=len(sample_row),
        row_start=plan.row_start,
        row_len=plan.row_len,
    )
