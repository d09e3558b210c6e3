"""The start of a step on the device: one kernel applies the uploaded plan to the state of the slots and lays out what
the step's other kernels read. It is the first node of every forward graph. It also notes each token's id beside the
token's place in the KV cache, so that a row's page table leads to its tokens.

Order matters: a token's page may have been written into the page table by this very plan, a row may start in it. No
barrier spans programs, so every program applies the whole plan, all writing the same values to the same places, and
after a barrier of its own sees them when it lays out its share of rows, tokens and samples:

    program 0 | starts, lengths, page table | barrier | rows 0 .. 255,   tokens 0 .. 255,   samples 0 .. 255
    program 1 | starts, lengths, page table | barrier | rows 256 .. 511, tokens 256 .. 511, samples 256 .. 511
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.config import MAX_STOP_IDS, PAGE_SIZE
from gpu_runner.kernels.upload_layout import count_word, offset_word

BLOCK = 256
START_BLOCK = 64
"""Starting slots at a time: with stop ids they are 64 x 16 words, 4 a thread."""


class SlotState(Protocol):
    """Tensors by slot that steps leave to each other; see `gpu_runner.device.state.DeviceState`."""

    page_table: Tensor  # [num_slots, pages_per_seq] int32
    last_token: Tensor  # [num_slots] int32, as all without a remark
    kv_len: Tensor
    done: Tensor  # bool
    temperature: Tensor  # float32
    top_k: Tensor
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    seed: Tensor  # int64
    limit: Tensor
    min_tokens_until: Tensor
    stop_ids: Tensor  # [num_slots, MAX_STOP_IDS] int32
    prompt_len: Tensor
    presence_penalty: Tensor  # float32
    frequency_penalty: Tensor  # float32
    repetition_penalty: Tensor  # float32
    logprobs: Tensor
    constrained: Tensor
    num_bias: Tensor
    bias_ids: Tensor  # [num_slots, MAX_BIAS_IDS] int32
    bias_values: Tensor  # [num_slots, MAX_BIAS_IDS] float32


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
    sample_row: Tensor  # [R], the rows that sample
    sample_token: Tensor  # [R], each one's last token among the step's


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
    upload: Tensor, state: SlotState, meta: StepMeta, page_tokens: Tensor, *, num_tokens: int, pdl: bool = True
) -> None:
    """Apply the plan in `upload`, packed as `upload_layout` says, to `state`; fill `meta`.

    upload: [words] int32. page_tokens: [num_pages, PAGE_SIZE] int32, the token id at each place of the KV cache; the
    step's tokens are written there, those of overshoot rows into the dummy page. num_tokens: the graph's bucket, at
    least the plan's tokens and at most the buffers'; tokens from there on keep what they were. Rows and samples are all
    filled. Fixed in a graph: all addresses, `num_tokens`.
    `kv_len` of decode rows, `last_token` and what ends a row are `post_update`'s to change.
    """
    max_rows = len(meta.row_slot)
    pdl = pdl and upload.is_cuda
    _step_meta_kernel[(triton.cdiv(max(max_rows, num_tokens), BLOCK),)](
        upload,
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
        num_tokens,
        MAX_ROWS=max_rows,
        SEARCH_FROM=triton.next_power_of_2(max_rows),
        PAGES_PER_SEQ=state.page_table.shape[1],
        BLOCK_SIZE=BLOCK,
        STARTS=START_BLOCK,
        CLOCK=upload.is_cuda,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=BLOCK // 32,
    )


_PAGE = tl.constexpr(PAGE_SIZE)
_STOP_IDS = tl.constexpr(MAX_STOP_IDS)
_NUM_ROWS = tl.constexpr(count_word("num_rows"))
_NUM_DECODE_ROWS = tl.constexpr(count_word("num_decode_rows"))
_NUM_TOKENS = tl.constexpr(count_word("num_tokens"))
_NUM_SAMPLES = tl.constexpr(count_word("num_samples"))
_NUM_STARTS = tl.constexpr(count_word("num_starts"))
_NUM_PAGE_WRITES = tl.constexpr(count_word("num_page_writes"))
_ROW_SLOT = tl.constexpr(offset_word("row_slot"))
_ROW_START = tl.constexpr(offset_word("row_start"))
_ROW_LEN = tl.constexpr(offset_word("row_len"))
_PREFILL_TOKENS = tl.constexpr(offset_word("prefill_tokens"))
_SAMPLE_ROW = tl.constexpr(offset_word("sample_row"))
_SAMPLE_TOKEN = tl.constexpr(offset_word("sample_token"))
_NUM_BIAS_WRITES = tl.constexpr(count_word("num_bias_writes"))
_PAGE_CELL = tl.constexpr(offset_word("page_cell"))
_PAGE_ID = tl.constexpr(offset_word("page_id"))
_START_SLOT = tl.constexpr(offset_word("start_slot"))
_TEMPERATURE = tl.constexpr(offset_word("temperature"))
_TOP_K = tl.constexpr(offset_word("top_k"))
_TOP_P = tl.constexpr(offset_word("top_p"))
_MIN_P = tl.constexpr(offset_word("min_p"))
_SEED = tl.constexpr(offset_word("seed"))
_LIMIT = tl.constexpr(offset_word("limit"))
_MIN_TOKENS_UNTIL = tl.constexpr(offset_word("min_tokens_until"))
_STOP_ID_ROWS = tl.constexpr(offset_word("stop_ids"))
_PROMPT_LEN = tl.constexpr(offset_word("prompt_len"))
_PRESENCE = tl.constexpr(offset_word("presence_penalty"))
_FREQUENCY = tl.constexpr(offset_word("frequency_penalty"))
_REPETITION = tl.constexpr(offset_word("repetition_penalty"))
_LOGPROBS = tl.constexpr(offset_word("logprobs"))
_CONSTRAINED = tl.constexpr(offset_word("constrained"))
_NUM_BIAS = tl.constexpr(offset_word("num_bias"))
_BIAS_CELL = tl.constexpr(offset_word("bias_cell"))
_BIAS_ID = tl.constexpr(offset_word("bias_id"))
_BIAS_VALUE = tl.constexpr(offset_word("bias_value"))


@triton.jit(do_not_specialize=["bucket"])  # one kernel serves all graphs
def _step_meta_kernel(
    upload,
    page_table,
    last_token,
    kv_len,
    done,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    limit,
    min_tokens_until,
    stop_ids,
    prompt_len,
    presence_penalty,
    frequency_penalty,
    repetition_penalty,
    logprobs,
    constrained,
    num_bias,
    bias_ids,
    bias_values,
    page_tokens,
    begin_time,
    counts,
    row_slot,
    row_start,
    row_len,
    row_token,
    row_was_done,
    token_ids,
    positions,
    kv_index,
    sample_row,
    sample_token,
    bucket,
    MAX_ROWS: tl.constexpr,
    SEARCH_FROM: tl.constexpr,
    PAGES_PER_SEQ: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STARTS: tl.constexpr,
    CLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tl.program_id(0) == 0:
        tl.store(begin_time, tl.extra.cuda.globaltimer() if CLOCK else 0)
    num_rows = tl.load(upload + _NUM_ROWS)
    num_decode_rows = tl.load(upload + _NUM_DECODE_ROWS)
    num_tokens = tl.load(upload + _NUM_TOKENS)
    num_samples = tl.load(upload + _NUM_SAMPLES)
    num_starts = tl.load(upload + _NUM_STARTS)
    num_page_writes = tl.load(upload + _NUM_PAGE_WRITES)
    slots = upload + tl.load(upload + _ROW_SLOT)
    starts = upload + tl.load(upload + _ROW_START)
    lengths = upload + tl.load(upload + _ROW_LEN)
    lane = tl.arange(0, BLOCK_SIZE)

    for first in range(0, num_starts, STARTS):
        index = first + tl.arange(0, STARTS)
        mask = index < num_starts
        slot = tl.load(upload + tl.load(upload + _START_SLOT) + index, mask=mask, other=0)
        tl.store(done + slot, tl.zeros([STARTS], tl.uint8), mask=mask)
        _copy_words(upload, _TEMPERATURE, temperature, index, slot, mask, 1)
        _copy_words(upload, _TOP_K, top_k, index, slot, mask, 1)
        _copy_words(upload, _TOP_P, top_p, index, slot, mask, 1)
        _copy_words(upload, _MIN_P, min_p, index, slot, mask, 1)
        _copy_words(upload, _SEED, seed, index, slot, mask, 2)
        _copy_words(upload, _LIMIT, limit, index, slot, mask, 1)
        _copy_words(upload, _MIN_TOKENS_UNTIL, min_tokens_until, index, slot, mask, 1)
        _copy_words(upload, _STOP_ID_ROWS, stop_ids, index, slot, mask, _STOP_IDS)
        _copy_words(upload, _PROMPT_LEN, prompt_len, index, slot, mask, 1)
        _copy_words(upload, _PRESENCE, presence_penalty, index, slot, mask, 1)
        _copy_words(upload, _FREQUENCY, frequency_penalty, index, slot, mask, 1)
        _copy_words(upload, _REPETITION, repetition_penalty, index, slot, mask, 1)
        _copy_words(upload, _LOGPROBS, logprobs, index, slot, mask, 1)
        _copy_words(upload, _CONSTRAINED, constrained, index, slot, mask, 1)
        _copy_words(upload, _NUM_BIAS, num_bias, index, slot, mask, 1)

    # Of prefill rows the host knows the start, cached prefix included; a decode row's is what the device counted.
    before = num_decode_rows
    for first in range(num_decode_rows, num_rows, BLOCK_SIZE):
        row = first + lane
        mask = row < num_rows
        length = tl.load(lengths + row, mask=mask, other=0)
        slot = tl.load(slots + row, mask=mask, other=0)
        tl.store(kv_len + slot, tl.load(starts + row, mask=mask, other=0), mask=mask)
        tl.store(row_token + row, before + tl.cumsum(length, 0) - length, mask=mask)
        before += tl.sum(length, 0)

    for first in range(0, num_page_writes, BLOCK_SIZE):
        write = first + lane
        mask = write < num_page_writes
        cell = tl.load(upload + tl.load(upload + _PAGE_CELL) + write, mask=mask, other=0)
        page = tl.load(upload + tl.load(upload + _PAGE_ID) + write, mask=mask, other=0)
        tl.store(page_table + cell, page, mask=mask)

    tl.debug_barrier()

    own = tl.program_id(0) * BLOCK_SIZE + lane
    # Only later kernels read the biases, so that each program need write but its share.
    num_bias_writes = tl.load(upload + _NUM_BIAS_WRITES)
    for first in range(tl.program_id(0) * BLOCK_SIZE, num_bias_writes, tl.num_programs(0) * BLOCK_SIZE):
        write = first + lane
        mask = write < num_bias_writes
        cell = tl.load(upload + tl.load(upload + _BIAS_CELL) + write, mask=mask, other=0)
        id = tl.load(upload + tl.load(upload + _BIAS_ID) + write, mask=mask, other=0)
        value = tl.load(upload + tl.load(upload + _BIAS_VALUE) + write, mask=mask, other=0)
        tl.store(bias_ids + cell, id, mask=mask)
        tl.store(bias_values + cell, value, mask=mask)

    if tl.program_id(0) == 0:
        tl.store(counts, num_decode_rows)
        tl.store(counts + 1, num_rows)
        tl.store(counts + 2, num_tokens)
        tl.store(counts + 3, num_samples)

    mask = own < num_rows
    slot = tl.load(slots + own, mask=mask, other=0)
    tl.store(row_slot + own, slot, mask=own < MAX_ROWS)
    tl.store(row_start + own, tl.load(kv_len + slot, mask=mask, other=0), mask=own < MAX_ROWS)
    tl.store(row_len + own, tl.load(lengths + own, mask=mask, other=0), mask=own < MAX_ROWS)
    tl.store(row_was_done + own, tl.load(done + slot, mask=mask, other=0).to(tl.int32), mask=own < MAX_ROWS)
    token = tl.where(own < num_decode_rows, own, num_tokens)
    is_prefill = mask & (own >= num_decode_rows)
    tl.store(row_token + own, token, mask=(own < MAX_ROWS) & ~is_prefill)

    mask = own < num_samples
    first_row = upload + tl.load(upload + _SAMPLE_ROW)
    first_token = upload + tl.load(upload + _SAMPLE_TOKEN)
    tl.store(sample_row + own, tl.load(first_row + own, mask=mask, other=-1), mask=own < MAX_ROWS)
    tl.store(sample_token + own, tl.load(first_token + own, mask=mask, other=0), mask=own < MAX_ROWS)

    mask = own < num_tokens
    decodes = own < num_decode_rows
    row = tl.where(decodes, own, num_decode_rows)
    row_begin = own
    if num_rows > num_decode_rows:
        # The last prefill row that begins at the token or before it.
        step = SEARCH_FROM
        while step > 0:
            candidate = row + step
            inside = mask & ~decodes & (candidate < num_rows)
            begins = tl.load(row_token + candidate, mask=inside, other=0)
            row = tl.where(inside & (begins <= own), candidate, row)
            step = step // 2
        row_begin = tl.where(decodes, own, tl.load(row_token + row, mask=mask & ~decodes, other=0))
    slot = tl.load(slots + row, mask=mask, other=0)
    position = tl.load(kv_len + slot, mask=mask, other=0) + own - row_begin
    prompt = upload + tl.load(upload + _PREFILL_TOKENS) - num_decode_rows
    known = tl.load(prompt + own, mask=mask & ~decodes, other=0)
    token = tl.where(decodes, tl.load(last_token + slot, mask=mask & decodes, other=0), known)
    # An overshoot row's position may lie behind its pages; whatever page is found there is not used.
    page_index = tl.minimum(position // _PAGE, PAGES_PER_SEQ - 1)
    page = tl.load(page_table + slot.to(tl.int64) * PAGES_PER_SEQ + page_index, mask=mask, other=0)
    page = tl.where(tl.load(done + slot, mask=mask, other=0) != 0, 0, page)
    inside = own < bucket
    tl.store(token_ids + own, token, mask=inside)
    tl.store(positions + own, tl.where(mask, position, 0), mask=inside)
    place = page * _PAGE + position % _PAGE
    tl.store(kv_index + own, tl.where(mask, place, 0), mask=inside)
    tl.store(page_tokens + place, token, mask=mask)


@triton.jit
def _copy_words(upload, offset_word: tl.constexpr, field, index, slot, mask, WIDTH: tl.constexpr):
    """field[slot] = section[index], of WIDTH words each, bit for bit."""
    word = tl.arange(0, WIDTH)[None, :]
    source = upload + tl.load(upload + offset_word) + index[:, None] * WIDTH + word
    tl.store(field + slot[:, None] * WIDTH + word, tl.load(source, mask=mask[:, None], other=0), mask=mask[:, None])
