"""The end of a step on the device: one kernel advances the slots' state by what was sampled and packs the results.

Rows are split over programs, samples are not: each program looks at all samples and takes those of its own rows, so
that the result of a row has one writer and needs no barrier across programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.config import MAX_STOP_IDS
from gpu_runner.kernels.result_layout import COLUMNS, TIME_WORDS
from gpu_runner.kernels.step_meta import SlotState, StepMeta

FINISH_STOP = 1
FINISH_LENGTH = 2
"""The values of `asyncengine.wire.messages.Finish` that are decided here; 0 while a row runs."""
BLOCK = 256
SAMPLE_BLOCK = 128
"""Samples at a time: with stop ids they are 128 x 16 words, 8 a thread."""


def post_update(sampled: Tensor, state: SlotState, meta: StepMeta, results: Tensor, *, pdl: bool = True) -> None:
    """Advance every row of the step that `meta` describes, and finish or continue those that sampled.

    sampled: [N] int32, token i is of row `meta.sample_row[i]`; N is the graph's bucket, at least the step's samples,
    and 0 where no row samples. results: [result_words(R)] int32, R at least the step's rows: the step's times, then
    tokens and finish values; -1 and 0 for rows that sample nothing, had ended before, or are none.

    Where a row had not ended before: `kv_len` grows by the row's tokens; if it samples, `last_token` becomes the token,
    and the row ends with STOP if that is one of its stop ids, else with LENGTH if it is the last that `limit` allows.
    Fixed in a graph: all addresses, N, R.
    """
    capacity = (len(results) - TIME_WORDS) // COLUMNS
    pdl = pdl and results.is_cuda
    _post_update_kernel[(triton.cdiv(capacity, BLOCK),)](
        sampled,
        state.last_token,
        state.kv_len,
        state.done.view(torch.uint8),
        state.limit,
        state.stop_ids,
        meta.begin_time,
        meta.counts,
        meta.row_slot,
        meta.row_start,
        meta.row_len,
        meta.row_was_done,
        meta.sample_row,
        results[:TIME_WORDS].view(torch.int64),
        results[TIME_WORDS:],
        len(sampled),
        CAPACITY=capacity,
        BLOCK_SIZE=BLOCK,
        SAMPLES=SAMPLE_BLOCK,
        CLOCK=results.is_cuda,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=BLOCK // 32,
    )


_STOP = tl.constexpr(FINISH_STOP)
_LENGTH = tl.constexpr(FINISH_LENGTH)
_STOP_IDS = tl.constexpr(MAX_STOP_IDS)


@triton.jit(do_not_specialize=["max_samples"])  # one kernel serves all graphs
def _post_update_kernel(
    sampled,
    last_token,
    kv_len,
    done,
    limit,
    stop_ids,
    begin_time,
    counts,
    row_slot,
    row_start,
    row_len,
    row_was_done,
    sample_row,
    times,
    results,
    max_samples,
    CAPACITY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SAMPLES: tl.constexpr,
    CLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_rows = tl.load(counts + 1)
    num_samples = tl.minimum(tl.load(counts + 3), max_samples)
    first_row = tl.program_id(0) * BLOCK_SIZE
    own = first_row + tl.arange(0, BLOCK_SIZE)
    tl.store(results + own, tl.full([BLOCK_SIZE], -1, tl.int32), mask=own < CAPACITY)
    tl.store(results + CAPACITY + own, tl.zeros([BLOCK_SIZE], tl.int32), mask=own < CAPACITY)
    mask = own < num_rows
    runs = mask & (tl.load(row_was_done + own, mask=mask, other=1) == 0)
    end = tl.load(row_start + own, mask=runs, other=0) + tl.load(row_len + own, mask=runs, other=0)
    tl.store(kv_len + tl.load(row_slot + own, mask=runs, other=0), end, mask=runs)

    tl.debug_barrier()

    for first in range(0, num_samples, SAMPLES):
        index = first + tl.arange(0, SAMPLES)
        is_sample = index < num_samples
        row = tl.load(sample_row + index, mask=is_sample, other=-1)
        here = is_sample & (row >= first_row) & (row < first_row + BLOCK_SIZE)
        here = here & (tl.load(row_was_done + row, mask=here, other=1) == 0)
        token = tl.load(sampled + index, mask=here, other=0)
        slot = tl.load(row_slot + row, mask=here, other=0)
        index_of_token = tl.load(row_start + row, mask=here, other=0) + tl.load(row_len + row, mask=here, other=0)
        stop = stop_ids + slot[:, None] * _STOP_IDS + tl.arange(0, _STOP_IDS)[None, :]
        hits = tl.load(stop, mask=here[:, None], other=-1) == token[:, None]
        is_stop = tl.sum(hits.to(tl.int32), axis=1) > 0
        at_limit = index_of_token + 1 >= tl.load(limit + slot, mask=here, other=0)
        finish = tl.where(is_stop, _STOP, tl.where(at_limit, _LENGTH, 0))
        tl.store(results + row, token, mask=here)
        tl.store(results + CAPACITY + row, finish, mask=here)
        tl.store(last_token + slot, token, mask=here)
        tl.store(done + slot, (finish != 0).to(tl.uint8), mask=here)

    tl.debug_barrier()

    if tl.program_id(0) == 0:
        tl.store(times, tl.load(begin_time))
        tl.store(times + 1, tl.extra.cuda.globaltimer() if CLOCK else 0)
