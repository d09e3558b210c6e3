"""The kernel behind `step_meta`, which see: it applies the plan to the state of the slots and lays out what the step's
other kernels read. It also notes each token's id beside the token's place in the KV cache, so that a row's page table
leads to its tokens.

Order matters: a token's page may have been written into the page table by this very plan, a row may start in it. No
barrier spans programs, so every program applies the whole plan, all writing the same values to the same places, and
after a barrier of its own sees them when it lays out its share of rows, tokens and samples. Where it is told to fetch
the plan, each does that too. The programs that list attention's work lay out all rows for themselves:

    program 0 | fetch | starts, lengths, page table | barrier | rows 0 .. 255,   tokens 0 .. 255,   samples 0 .. 255
    program 1 | fetch | starts, lengths, page table | barrier | rows 256 .. 511, tokens 256 .. 511, samples 256 .. 511
    program 2 | fetch | starts, lengths, page table | barrier | all rows | barrier | ranges of decode rows
    program 3 | fetch | starts, lengths, page table | barrier | all rows | barrier | tiles of prefill rows
"""

from __future__ import annotations

import triton
import triton.language as tl

from asyncengine.config import MAX_STOP_IDS, PAGE_SIZE
from gpu_runner.kernels.host_ring import copy_plan
from gpu_runner.kernels.upload_layout import USED_WORDS_WORD, count_word, offset_word
from gpu_runner.kernels.work_list_kernel import CUT_ARGUMENTS, list_work

_PAGE = tl.constexpr(PAGE_SIZE)
_STOP_IDS = tl.constexpr(MAX_STOP_IDS)
_USED = tl.constexpr(USED_WORDS_WORD)
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
_PAGE_SLOT = tl.constexpr(offset_word("page_slot"))
_PAGE_INDEX = tl.constexpr(offset_word("page_index"))
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


@triton.jit(do_not_specialize=["bucket", "programs", "ahead", *CUT_ARGUMENTS])  # one kernel serves many graphs
def step_meta_kernel(
    upload,
    next_upload,
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
    items,
    tiles,
    sort_keys,
    lengths,
    bucket,
    programs,
    ahead,
    capacity,
    target,
    step,
    at_once,
    start_keys,
    kv_heads,
    WINDOW: tl.constexpr,
    ALIGN: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    ITEM_WORDS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    FEW: tl.constexpr,
    SORT: tl.constexpr,
    OTHERS: tl.constexpr,
    LISTS: tl.constexpr,
    ALL_ROWS: tl.constexpr,
    FETCH: tl.constexpr,
    AHEAD_STEP: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    SEARCH_FROM: tl.constexpr,
    PAGES_PER_SEQ: tl.constexpr,
    KV_CAPACITY: tl.constexpr,
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
    if FETCH > 0:
        copy_plan(next_upload, upload, tl.arange(0, FETCH), ahead * AHEAD_STEP, capacity, FETCH, _USED)
        tl.debug_barrier()
    num_rows = tl.load(upload + _NUM_ROWS)
    num_decode_rows = tl.load(upload + _NUM_DECODE_ROWS)
    num_tokens = tl.load(upload + _NUM_TOKENS)
    num_samples = tl.load(upload + _NUM_SAMPLES)
    num_starts = tl.load(upload + _NUM_STARTS)
    num_page_writes = tl.load(upload + _NUM_PAGE_WRITES)
    slots = upload + tl.load(upload + _ROW_SLOT)
    starts = upload + tl.load(upload + _ROW_START)
    row_lengths = upload + tl.load(upload + _ROW_LEN)
    prefill_tokens = upload + tl.load(upload + _PREFILL_TOKENS)
    sample_rows = upload + tl.load(upload + _SAMPLE_ROW)
    sample_tokens = upload + tl.load(upload + _SAMPLE_TOKEN)
    page_slots = upload + tl.load(upload + _PAGE_SLOT)
    page_indices = upload + tl.load(upload + _PAGE_INDEX)
    pages = upload + tl.load(upload + _PAGE_ID)
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
        length = tl.load(row_lengths + row, mask=mask, other=0)
        slot = tl.load(slots + row, mask=mask, other=0)
        tl.store(kv_len + slot, tl.load(starts + row, mask=mask, other=0), mask=mask)
        tl.store(row_token + row, before + tl.cumsum(length, 0) - length, mask=mask)
        before += tl.sum(length, 0)

    for first in range(0, num_page_writes, BLOCK_SIZE):
        write = first + lane
        mask = write < num_page_writes
        slot = tl.load(page_slots + write, mask=mask, other=0)
        index = tl.load(page_indices + write, mask=mask, other=0)
        page = tl.load(pages + write, mask=mask, other=0)
        tl.store(page_table + slot * PAGES_PER_SEQ + index, page, mask=mask)

    tl.debug_barrier()

    if tl.program_id(0) < programs:
        # Loads come before stores, which wait for what they store, and hold up what comes behind them.
        own = tl.program_id(0) * BLOCK_SIZE + lane
        is_sample = own < num_samples
        row_of_sample = tl.load(sample_rows + own, mask=is_sample, other=-1)
        token_of_sample = tl.load(sample_tokens + own, mask=is_sample, other=0)
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
        known = tl.load(prefill_tokens + own - num_decode_rows, mask=mask & ~decodes, other=0)
        position = tl.load(kv_len + slot, mask=mask, other=0) + own - row_begin
        sampled = tl.load(last_token + slot, mask=mask & decodes, other=0)
        ended = tl.load(done + slot, mask=mask, other=0) != 0
        # An overshoot row's position may lie behind its pages; whatever page is found there is not used.
        page_index = tl.minimum(position // _PAGE, PAGES_PER_SEQ - 1)
        page = tl.load(page_table + slot.to(tl.int64) * PAGES_PER_SEQ + page_index, mask=mask, other=0)

        _lay_out_rows(
            own, num_rows, num_decode_rows, num_tokens, slots, row_lengths, kv_len, done,
            row_slot, row_start, row_len, row_was_done, row_token, MAX_ROWS,
        )  # fmt: skip
        tl.store(sample_row + own, row_of_sample, mask=own < MAX_ROWS)
        tl.store(sample_token + own, token_of_sample, mask=own < MAX_ROWS)
        if tl.program_id(0) == 0:
            tl.store(counts, num_decode_rows)
            tl.store(counts + 1, num_rows)
            tl.store(counts + 2, num_tokens)
            tl.store(counts + 3, num_samples)
        token = tl.where(decodes, sampled, known)
        place = tl.where(ended, 0, page) * _PAGE + position % _PAGE
        inside = own < bucket
        tl.store(token_ids + own, token, mask=inside)
        tl.store(positions + own, tl.where(mask, position, 0), mask=inside)
        tl.store(kv_index + own, tl.where(mask, place, 0), mask=inside)
        tl.store(page_tokens + place, token, mask=mask)

        # Only later kernels read the biases, so that each program need write but its share.
        num_bias_writes = tl.load(upload + _NUM_BIAS_WRITES)
        for first in range(tl.program_id(0) * BLOCK_SIZE, num_bias_writes, programs * BLOCK_SIZE):
            write = first + lane
            mask = write < num_bias_writes
            cell = tl.load(upload + tl.load(upload + _BIAS_CELL) + write, mask=mask, other=0)
            id = tl.load(upload + tl.load(upload + _BIAS_ID) + write, mask=mask, other=0)
            value = tl.load(upload + tl.load(upload + _BIAS_VALUE) + write, mask=mask, other=0)
            tl.store(bias_ids + cell, id, mask=mask)
            tl.store(bias_values + cell, value, mask=mask)
    elif LISTS > 0:
        for first in range(0, num_rows, BLOCK_SIZE):
            _lay_out_rows(
                first + lane, num_rows, num_decode_rows, num_tokens, slots, row_lengths, kv_len, done,
                row_slot, row_start, row_len, row_was_done, row_token, MAX_ROWS,
            )  # fmt: skip
        tl.debug_barrier()
        list_work(
            tl.program_id(0) - programs, num_decode_rows, num_rows, row_slot, row_start, row_len, row_token,
            items, tiles, sort_keys, lengths, KV_CAPACITY, target, step, at_once, start_keys, kv_heads,
            WINDOW, ALIGN, MAX_SPLITS, TILE, ITEM_WORDS, TILE_WORDS, ROWS, FEW, SORT, OTHERS, LISTS, ALL_ROWS,
        )  # fmt: skip


@triton.jit
def _lay_out_rows(
    own, num_rows, num_decode_rows, num_tokens, slots, row_lengths, kv_len, done,
    row_slot, row_start, row_len, row_was_done, row_token, MAX_ROWS: tl.constexpr,
):  # fmt: skip
    """Rows `own`, but for where a prefill row's tokens begin."""
    mask = own < num_rows
    slot = tl.load(slots + own, mask=mask, other=0)
    length = tl.load(row_lengths + own, mask=mask, other=0)
    start = tl.load(kv_len + slot, mask=mask, other=0)
    was_done = tl.load(done + slot, mask=mask, other=0)
    inside = own < MAX_ROWS
    tl.store(row_slot + own, slot, mask=inside)
    tl.store(row_len + own, length, mask=inside)
    tl.store(row_start + own, start, mask=inside)
    tl.store(row_was_done + own, was_done.to(tl.int32), mask=inside)
    is_prefill = mask & (own >= num_decode_rows)
    tl.store(row_token + own, tl.where(own < num_decode_rows, own, num_tokens), mask=inside & ~is_prefill)


@triton.jit
def _copy_words(upload, offset_word: tl.constexpr, field, index, slot, mask, WIDTH: tl.constexpr):
    """field[slot] = section[index], of WIDTH words each, bit for bit."""
    word = tl.arange(0, WIDTH)[None, :]
    source = upload + tl.load(upload + offset_word) + index[:, None] * WIDTH + word
    tl.store(field + slot[:, None] * WIDTH + word, tl.load(source, mask=mask[:, None], other=0), mask=mask[:, None])
