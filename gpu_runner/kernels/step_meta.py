"""The start of a step on the device: what the step's other kernels read is laid out, by the kernel of
`step_meta_kernel`, which is the first node of every graph that computes layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from asyncengine.config import PAGE_SIZE
from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.host_ring import WORDS_PER_TOKEN, HostRing
from gpu_runner.kernels.launch import launch_options, on_gpu
from gpu_runner.kernels.step_meta_kernel import step_meta_kernel
from gpu_runner.kernels.upload_layout import HEADER_WORDS
from gpu_runner.kernels.work_list import WorkList, list_shape

BLOCK = 256
START_BLOCK = 64
"""Starting slots at a time: with stop ids they are 64 x 16 words, 4 a thread."""
FETCH_BLOCK = 4096
AHEAD_STEP = 16
"""Words of a plan that a program asks the host's memory for at once, or fewer, as the graph's bucket says, in steps
that let it take four at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeta:
    """One step as its kernels see it: int32 buffers (but for a time) at fixed addresses, shared by all graphs. See
    `ops.BatchMeta`.

    Beyond the step's counts: rows have slot, start and length 0 and begin at token `num_tokens`; tokens are id 0 at
    position 0 and write to the dummy page; samples are of row -1 and token 0.
    """

    begin_time: Tensor  # [1] int64, the device's time when the step began in ns; 0 where it has no clock
    counts: Tensor  # [4]: num_decode_rows, num_rows, num_tokens, num_samples
    row_slot: Tensor  # [R]
    row_start: Tensor  # [R], position of the row's first token; what the device counted, for decode rows too
    row_len: Tensor  # [R]
    row_token: Tensor  # [R], the row's first token among the step's
    row_was_done: Tensor  # [R], 1 where the row had ended before this step: an overshoot row
    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    kv_index: Tensor  # [T], page * PAGE_SIZE + offset; in the dummy page 0 for overshoot rows
    sample_row: Tensor  # [R], the rows that sample, ascending
    sample_token: Tensor  # [R], each one's last token among the step's

    @property
    def samples(self) -> tuple[Tensor, ...]:
        """What leads a kernel from a sample to its row, slot and position."""
        return self.counts, self.sample_row, self.row_slot, self.row_start, self.row_len


def new_step_meta(*, max_rows: int, max_tokens: int, device: torch.device) -> StepMeta:
    """Zeroed buffers for steps of up to `max_rows` rows and `max_tokens` tokens."""

    def zeros(size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    return StepMeta(
        begin_time=torch.zeros(1, dtype=torch.int64, device=device),
        counts=zeros(4),
        row_slot=zeros(max_rows),
        row_start=zeros(max_rows),
        row_len=zeros(max_rows),
        row_token=zeros(max_rows),
        row_was_done=zeros(max_rows),
        token_ids=zeros(max_tokens),
        positions=zeros(max_tokens),
        kv_index=zeros(max_tokens),
        sample_row=zeros(max_rows),
        sample_token=zeros(max_rows),
    )


def step_meta(
    upload: Tensor,
    state: DeviceState,
    meta: StepMeta,
    page_tokens: Tensor,
    *,
    num_tokens: int,
    ring: HostRing | None = None,
    work: WorkList | None = None,
    prefill: bool = True,
) -> None:
    """Apply the plan in `upload`, packed as `upload_layout` says, to `state`; fill `meta`.

    upload: [words] int32. page_tokens: [num_pages, PAGE_SIZE] int32, the token id at each place of the KV cache; the
    step's tokens are written there, those of overshoot rows into the dummy page. num_tokens: the graph's bucket, at
    least the plan's tokens and at most the buffers'; tokens from there on keep what they were. Rows and samples are all
    filled. `kv_len` of decode rows, `last_token` and what ends a row are `post_update`'s to change.

    ring: the turn's plan is fetched into `upload` first, as `host_ring.fetch` does; every program does so for itself,
    which is for plans of some thousand words. work: filled too, as `build_work_list` does, for which see `prefill`.
    Fixed in a graph: all addresses, `num_tokens`, `prefill`, the list's cut.
    """
    max_rows = len(meta.row_slot)
    pages_per_seq = state.page_table.shape[1]
    programs = triton.cdiv(max(max_rows, num_tokens), BLOCK)
    lists = list_shape(work, prefill=prefill)
    usual = HEADER_WORDS + num_tokens * WORDS_PER_TOKEN + AHEAD_STEP
    ahead = min(usual, FETCH_BLOCK, len(upload)) // AHEAD_STEP
    step_meta_kernel[(programs + lists["LISTS"],)](
        upload,
        None if ring is None else ring.next_upload,
        state.page_table,
        state.last_token,
        state.kv_len,
        state.done.view(torch.uint8),
        state.temperature.view(torch.int32),
        state.top_k,
        state.top_p.view(torch.int32),
        state.min_p.view(torch.int32),
        state.seed.view(torch.int32),
        state.limit,
        state.min_tokens_until,
        state.stop_ids,
        state.prompt_len,
        state.presence_penalty.view(torch.int32),
        state.frequency_penalty.view(torch.int32),
        state.repetition_penalty.view(torch.int32),
        state.logprobs,
        state.constrained,
        state.num_bias,
        state.bias_ids,
        state.bias_values.view(torch.int32),
        page_tokens,
        meta.begin_time,
        meta.counts,
        meta.row_slot,
        meta.row_start,
        meta.row_len,
        meta.row_token,
        meta.row_was_done,
        meta.token_ids,
        meta.positions,
        meta.kv_index,
        meta.sample_row,
        meta.sample_token,
        None if work is None else work.items,
        None if work is None else work.tiles,
        None if work is None else work.sort_keys,
        None if work is None else work.lengths,
        num_tokens,
        programs,
        ahead,
        len(upload),
        **lists,
        FETCH=0 if ring is None else FETCH_BLOCK,
        AHEAD_STEP=AHEAD_STEP,
        MAX_ROWS=max_rows,
        SEARCH_FROM=triton.next_power_of_2(max_rows),
        PAGES_PER_SEQ=pages_per_seq,
        KV_CAPACITY=pages_per_seq * PAGE_SIZE,
        BLOCK_SIZE=BLOCK,
        STARTS=START_BLOCK,
        CLOCK=on_gpu(upload),
        **launch_options(upload, BLOCK // 32),
    )
