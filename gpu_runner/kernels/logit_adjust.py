"""Logit bias and penalties, in place, at the few ids that they touch; the recipe is `reference_adjust`'s.

How often a row's ids occur is counted in a table as large as the logits, which is all zeros between steps:

    bias and count   parts x rows   adds the biases; each token of the row's sequence counts itself in the table
    penalise         parts x rows   each token takes its id's word and leaves 0: the one that finds it not 0 adjusts

So the vocabulary is never walked through, an id that occurs often is adjusted once, and the table is clean again. Both
see the same sequence: the page table leads to the tokens whose keys and values the row attended to, the step's own
input tokens among them, so a shared prefix, a resumed row and a chunked prompt are nothing special.
"""

from __future__ import annotations

import triton
import triton.language as tl

from asyncengine.config import PAGE_SIZE

_PAGE = tl.constexpr(PAGE_SIZE)
_IN_PROMPT = tl.constexpr(1 << 30)
"""Beside the count of an id in the output."""


@triton.jit
def live_sample(row, counts, sample_row, row_slot, row_start, row_len, row_was_done):
    """Whether sample `row` is one and of a row that had not ended; its row in the step, slot and sequence length.

    Of an overshoot row nothing may be read: its length may lie behind its pages.
    """
    inside = row < tl.load(counts + 3)
    step_row = tl.load(sample_row + row, mask=inside, other=0)
    live = inside & (tl.load(row_was_done + step_row, mask=inside, other=1) == 0)
    slot = tl.load(row_slot + step_row, mask=live, other=0)
    length = tl.load(row_start + step_row, mask=live, other=0) + tl.load(row_len + step_row, mask=live, other=0)
    return live, step_row, slot, length


@triton.jit
def penalties_of(slot, presence_penalty, frequency_penalty, repetition_penalty):
    presence = tl.load(presence_penalty + slot)
    frequency = tl.load(frequency_penalty + slot)
    repetition = tl.load(repetition_penalty + slot)
    return presence, frequency, repetition, (presence != 0.0) | (frequency != 0.0) | (repetition != 1.0)


@triton.jit
def tokens_at(position, length, slot, page_table, page_tokens, vocab, PAGES_PER_SEQ: tl.constexpr):
    """Token ids of a sequence, and which of them are below `length` and in the vocabulary."""
    mask = position < length
    page = tl.load(page_table + slot.to(tl.int64) * PAGES_PER_SEQ + position // _PAGE, mask=mask, other=0)
    token = tl.load(page_tokens + page.to(tl.int64) * _PAGE + position % _PAGE, mask=mask, other=-1)
    return token, mask & (token >= 0) & (token < vocab)


@triton.jit(do_not_specialize=["parts"])  # one kernel serves all graphs
def bias_and_count_kernel(
    logits,
    counts,
    sample_row,
    row_slot,
    row_start,
    row_len,
    row_was_done,
    prompt_len,
    presence_penalty,
    frequency_penalty,
    repetition_penalty,
    num_bias,
    bias_ids,
    bias_values,
    page_table,
    page_tokens,
    table,
    row_stride,
    vocab,
    parts,
    PAGES_PER_SEQ: tl.constexpr,
    BIAS_WIDTH: tl.constexpr,
    BIAS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (part, row)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    row = tl.program_id(1)
    live, _, slot, length = live_sample(row, counts, sample_row, row_slot, row_start, row_len, row_was_done)
    if not live:
        return
    biases = tl.load(num_bias + slot)
    if (part == 0) & (biases > 0):
        lane = tl.arange(0, BIAS_BLOCK)
        id = tl.load(bias_ids + slot * BIAS_WIDTH + lane, mask=lane < biases, other=-1)
        value = tl.load(bias_values + slot * BIAS_WIDTH + lane, mask=lane < biases, other=0.0)
        mask = (id >= 0) & (id < vocab)
        place = logits + row.to(tl.int64) * row_stride + id
        tl.store(place, tl.load(place, mask=mask, other=0.0) + value, mask=mask)
    _, _, repetition, penalised = penalties_of(slot, presence_penalty, frequency_penalty, repetition_penalty)
    if penalised:
        prompt = tl.load(prompt_len + slot)
        begin = tl.where(repetition == 1.0, prompt, 0)  # the other penalties are for the output
        for first in range(begin + part * BLOCK, length, parts * BLOCK):
            position = first + tl.arange(0, BLOCK)
            token, mask = tokens_at(position, length, slot, page_table, page_tokens, vocab, PAGES_PER_SEQ)
            word = table + row.to(tl.int64) * vocab + token
            one = tl.full([BLOCK], 1, tl.int32)
            tl.atomic_or(word, one * _IN_PROMPT, mask=mask & (position < prompt), sem="relaxed")
            tl.atomic_add(word, one, mask=mask & (position >= prompt), sem="relaxed")


@triton.jit(do_not_specialize=["parts"])  # one kernel serves all graphs
def penalise_kernel(
    logits,
    counts,
    sample_row,
    row_slot,
    row_start,
    row_len,
    row_was_done,
    prompt_len,
    presence_penalty,
    frequency_penalty,
    repetition_penalty,
    page_table,
    page_tokens,
    table,
    row_stride,
    vocab,
    parts,
    PAGES_PER_SEQ: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (part, row)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    row = tl.program_id(1)
    live, _, slot, length = live_sample(row, counts, sample_row, row_slot, row_start, row_len, row_was_done)
    if not live:
        return
    presence, frequency, repetition, penalised = penalties_of(
        slot, presence_penalty, frequency_penalty, repetition_penalty
    )
    if penalised:
        begin = tl.where(repetition == 1.0, tl.load(prompt_len + slot), 0)
        for first in range(begin + part * BLOCK, length, parts * BLOCK):
            position = first + tl.arange(0, BLOCK)
            token, mask = tokens_at(position, length, slot, page_table, page_tokens, vocab, PAGES_PER_SEQ)
            word = table + row.to(tl.int64) * vocab + token
            found = tl.atomic_xchg(word, tl.zeros([BLOCK], tl.int32), mask=mask, sem="relaxed")
            mask = mask & (found != 0)
            place = logits + row.to(tl.int64) * row_stride + token
            x = tl.load(place, mask=mask, other=0.0)
            x = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
            count = found & (_IN_PROMPT - 1)
            x = x - frequency * count.to(tl.float32)
            x = x - tl.where(count > 0, presence, 0.0)
            tl.store(place, x, mask=mask)


@triton.jit
def logit_before(
    x,
    id,
    slot,
    length,
    prompt_len,
    presence_penalty,
    frequency_penalty,
    repetition_penalty,
    num_bias,
    bias_ids,
    bias_values,
    page_table,
    page_tokens,
    vocab,
    PAGES_PER_SEQ: tl.constexpr,
    BIAS_WIDTH: tl.constexpr,
    BIAS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What the model gave for one id, of its adjusted logit `x`, to the rounding of the adjustment; float32."""
    presence, frequency, repetition, penalised = penalties_of(
        slot, presence_penalty, frequency_penalty, repetition_penalty
    )
    biases = tl.load(num_bias + slot)
    if penalised | (biases > 0):
        exact = x.to(tl.float64)
        if penalised:
            prompt = tl.load(prompt_len + slot)
            in_prompt = 0
            in_output = 0
            for first in range(tl.where(repetition == 1.0, prompt, 0), length, BLOCK):
                position = first + tl.arange(0, BLOCK)
                token, mask = tokens_at(position, length, slot, page_table, page_tokens, vocab, PAGES_PER_SEQ)
                same = mask & (token == id)
                in_prompt += tl.sum((same & (position < prompt)).to(tl.int32), axis=0)
                in_output += tl.sum((same & (position >= prompt)).to(tl.int32), axis=0)
            exact += frequency.to(tl.float64) * in_output
            exact += tl.where(in_output > 0, presence, 0.0)
            ratio = tl.where(in_prompt + in_output > 0, repetition, 1.0).to(tl.float64)
            exact = tl.where(exact > 0.0, exact * ratio, exact / ratio)
        lane = tl.arange(0, BIAS_BLOCK)
        biased = tl.load(bias_ids + slot * BIAS_WIDTH + lane, mask=lane < biases, other=-1) == id
        value = tl.load(bias_values + slot * BIAS_WIDTH + lane, mask=biased, other=0.0)
        x = (exact - tl.sum(value, axis=0)).to(tl.float32)
    return x
