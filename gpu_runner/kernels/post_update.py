"""The end of a step on the device: one kernel advances the slots' state by what was sampled and hands out the results.

A program takes some rows, and of each the sample whose row it is, so that a result has one writer and nothing is waited
for but the sampled tokens. Samples are listed by ascending row: in a step in which every row samples, as in all that
only decode, sample i is row i's; in others it is searched for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.config import MAX_STOP_IDS
from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.host_ring import HostRing
from gpu_runner.kernels.launch import launch_options, on_gpu
from gpu_runner.kernels.result_layout import COLUMNS, TIME_WORDS
from gpu_runner.kernels.step_meta import StepMeta
from gpu_runner.kernels.upload_layout import TURN_WORD

FINISH_STOP = 1
FINISH_LENGTH = 2
"""The values of `asyncengine.wire.base.Finish` that are decided here; 0 while a row runs."""
ROWS = 32
NUM_WARPS = 4
"""A thread takes four of the 32 x 16 stop ids, one 16-byte access."""


def post_update(sampled: Tensor, state: DeviceState, meta: StepMeta, results: Tensor) -> None:
    """Advance every row of the step that `meta` describes, and finish or continue those that sampled.

    sampled: [N] int32, token i is of row `meta.sample_row[i]`; N is the graph's bucket, at least the step's samples,
    and 0 where no row samples. results: [result_words(R)] int32, R at least the step's rows: the step's times, then
    tokens and finish values; -1 and 0 for rows that sample nothing, had ended before, or are none.

    Where a row had not ended before: `kv_len` grows by the row's tokens; if it samples, `last_token` becomes the token,
    and the row ends with STOP if that is one of its stop ids, else with LENGTH if it is the last that `limit` allows.
    Fixed in a graph: all addresses, N, R.

    All but `sampled` and the begin time is read before the wait (PDL): a kernel that triggers behind its own
    wait, and writes none of that, must stand right before this one (the sampler's last does, in a step).
    """
    capacity = (len(results) - TIME_WORDS) // COLUMNS
    _launch(sampled, state, meta, results, capacity, programs=triton.cdiv(capacity, ROWS))


def post_update_to_host(
    sampled: Tensor,
    state: DeviceState,
    meta: StepMeta,
    ring: HostRing,
    inputs: Tensor,
    *,
    num_slots: int,
) -> None:
    """`post_update` whose results, for the rows that there are, go to the buffer of the turn that the plan in `inputs`
    has; then the next turn begins. Once the graph has ended, the host may read them.

    ring.results: buffers of [result_words(num_slots)] int32, or longer.
    """
    programs = triton.cdiv(len(meta.row_slot), ROWS)
    _launch(sampled, state, meta, inputs, num_slots, programs=programs, ring=ring)


def _launch(
    sampled: Tensor,
    state: DeviceState,
    meta: StepMeta,
    memory: Tensor,
    capacity: int,
    *,
    programs: int,
    ring: HostRing | None = None,
) -> None:
    """memory: results, or with a ring the plan."""
    max_rows = len(meta.row_slot)
    _post_update_kernel[(programs,)](
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
        memory,
        None if ring is None else ring.uploads,
        None if ring is None else ring.results,
        None if ring is None else ring.next_upload,
        len(sampled),
        capacity,
        MAX_ROWS=max_rows,
        SEARCH_FROM=triton.next_power_of_2(max_rows),
        BLOCK=ROWS,
        TO_HOST=ring is not None,
        DEPTH=1 if ring is None else len(ring.results),
        CLOCK=on_gpu(memory),
        **launch_options(memory, NUM_WARPS),
    )


_STOP = tl.constexpr(FINISH_STOP)
_LENGTH = tl.constexpr(FINISH_LENGTH)
_STOP_IDS = tl.constexpr(MAX_STOP_IDS)
_TIME_WORDS = tl.constexpr(TIME_WORDS)
_TURN = tl.constexpr(TURN_WORD)


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
    memory,
    uploads,
    addresses,
    next_upload,
    max_samples,
    capacity,
    MAX_ROWS: tl.constexpr,
    SEARCH_FROM: tl.constexpr,
    BLOCK: tl.constexpr,
    TO_HOST: tl.constexpr,
    DEPTH: tl.constexpr,
    CLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < MAX_ROWS
    # What does not depend on one another is asked for before any of it is there.
    num_rows = tl.load(counts + 1)
    all_samples = tl.load(counts + 3)
    slot = tl.load(row_slot + row, mask=exists, other=0)
    end = tl.load(row_start + row, mask=exists, other=0) + tl.load(row_len + row, mask=exists, other=0)
    was_done = tl.load(row_was_done + row, mask=exists, other=1)
    if TO_HOST:
        turn = tl.load(memory + _TURN)
    num_samples = tl.minimum(all_samples, max_samples)
    runs = (row < num_rows) & exists & (was_done == 0)
    index = row
    samples = runs & (row < num_samples)
    if all_samples != num_rows:
        # The last sample of the row or of one before it.
        index = tl.zeros_like(row)
        step = SEARCH_FROM
        while step > 0:
            candidate = index + step
            inside = runs & (candidate < num_samples)
            index = tl.where(inside & (tl.load(sample_row + candidate, mask=inside, other=0) <= row), candidate, index)
            step = step // 2
        samples = runs & (index < num_samples)
        samples = samples & (tl.load(sample_row + index, mask=samples, other=-1) == row)
    most = tl.load(limit + slot, mask=samples, other=0)
    stop = stop_ids + slot[:, None] * _STOP_IDS + tl.arange(0, _STOP_IDS)[None, :]
    stops = tl.load(stop, mask=samples[:, None], other=-1)
    if TO_HOST:
        address = tl.load(addresses + turn)
        following = tl.load(uploads + (turn + 1) % DEPTH)
        target = tl.multiple_of(address.to(tl.pointer_type(tl.int32), bitcast=True), 16)
        is_result = (row < num_rows) & (address != 0)
    else:
        target = memory
        is_result = row < capacity

    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.load(sampled + index, mask=samples, other=-1)
    began = tl.load(begin_time)
    is_stop = tl.max((stops == token[:, None]).to(tl.int32), axis=1) > 0
    finish = tl.where(is_stop, _STOP, tl.where(end + 1 >= most, _LENGTH, 0))
    finish = tl.where(samples, finish, 0)
    tokens = target + _TIME_WORDS
    tl.store(tokens + row, token, mask=is_result)
    tl.store(tokens + capacity + row, finish, mask=is_result)
    tl.store(kv_len + slot, end, mask=runs)
    tl.store(last_token + slot, token, mask=samples)
    tl.store(done + slot, (finish != 0).to(tl.uint8), mask=samples)

    tl.debug_barrier()

    if tl.program_id(0) == 0:
        has_times = True
        if TO_HOST:
            has_times = address != 0
            tl.store(next_upload, following, mask=has_times)
        times = target.to(tl.pointer_type(tl.int64), bitcast=True)
        tl.store(times, began, mask=has_times)
        tl.store(times + 1, tl.extra.cuda.globaltimer() if CLOCK else 0, mask=has_times)
