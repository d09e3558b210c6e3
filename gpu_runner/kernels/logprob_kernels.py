"""Log-probabilities of the model's own logits for the rows that ask, without sorting: the recipe is
`reference_adjust.top_logprobs`'.

    parts   parts x rows   largest logit, sum of exponentials and most likely ids of each part, before any adjustment
    merge   rows           all parts' to one; the chosen token's, once it is known

A part's most likely ids are a list of K lanes, into which a tile's best goes in place of the list's worst for as long
as it is better. Of a part's tiles the n-th holds a new one of the k best with probability k/n, so most pass after one
comparison.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_runner.kernels.logit_adjust import live_sample, logit_before
from gpu_runner.kernels.sample_noise import FLOAT32_MAX, NO_TOKEN, without_nan

_INFINITY = tl.constexpr(float("inf"))


@triton.jit(do_not_specialize=["parts"])  # one kernel serves all graphs
def parts_kernel(
    logits,
    counts,
    sample_row,
    row_slot,
    row_start,
    row_len,
    row_was_done,
    logprobs,
    part_largest,
    part_sum,
    part_x,
    part_id,
    row_stride,
    vocab,
    part_size,
    parts,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (part, row). Places of a list that no id takes are left with -inf."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    row = tl.program_id(1)
    live, _, slot, _ = live_sample(row, counts, sample_row, row_slot, row_start, row_len, row_was_done)
    wanted = tl.load(logprobs + slot, mask=live, other=-1)
    if wanted < 0:
        return
    row_logits = logits + row.to(tl.int64) * row_stride
    lane = tl.arange(0, K)
    list_x = tl.where(lane < wanted, -_INFINITY, _INFINITY)  # lanes beyond are never the worst
    list_id = NO_TOKEN - lane
    worst = tl.min(list_x, axis=0)
    largest = -FLOAT32_MAX
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(part * part_size, tl.minimum((part + 1) * part_size, vocab), BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = without_nan(tl.load(row_logits + ids, mask=ids < vocab, other=-_INFINITY))
        best = tl.max(x, axis=0)
        new_largest = tl.maximum(largest, best)
        total = total * tl.exp(largest - new_largest) + tl.exp(x - new_largest)
        largest = new_largest
        while best > worst:
            id = tl.min(tl.where(x == best, ids, NO_TOKEN), axis=0)
            leaves = list_x == worst
            leaves = leaves & (list_id == tl.max(tl.where(leaves, list_id, -1), axis=0))
            list_x = tl.where(leaves, best, list_x)
            list_id = tl.where(leaves, id, list_id)
            worst = tl.min(list_x, axis=0)
            x = tl.where(ids == id, -_INFINITY, x)
            best = tl.max(x, axis=0)
    place = row * parts + part
    tl.store(part_largest + place, largest)
    tl.store(part_sum + place, tl.sum(total, axis=0))
    tl.store(part_x + place * K + lane, tl.where(lane < wanted, list_x, -_INFINITY))
    tl.store(part_id + place * K + lane, list_id)


@triton.jit(do_not_specialize=["parts"])
def merge_kernel(
    logits,
    sampled,
    counts,
    sample_row,
    row_slot,
    row_start,
    row_len,
    row_was_done,
    logprobs,
    prompt_len,
    presence_penalty,
    frequency_penalty,
    repetition_penalty,
    num_bias,
    bias_ids,
    bias_values,
    page_table,
    page_tokens,
    part_largest,
    part_sum,
    part_x,
    part_id,
    out_chosen,
    out_count,
    out_ids,
    out_values,
    row_stride,
    vocab,
    parts,
    OUT_WIDTH: tl.constexpr,
    PAGES_PER_SEQ: tl.constexpr,
    BIAS_WIDTH: tl.constexpr,
    BIAS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program per row. Results go to the row's place in the step; rows that do not ask keep what was there."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    live, step_row, slot, length = live_sample(row, counts, sample_row, row_slot, row_start, row_len, row_was_done)
    wanted = tl.load(logprobs + slot, mask=live, other=-1)
    if wanted < 0:
        return
    part = tl.arange(0, PARTS)
    largest_of = tl.load(part_largest + row * parts + part, mask=part < parts, other=-FLOAT32_MAX)
    sum_of = tl.load(part_sum + row * parts + part, mask=part < parts, other=0.0)
    largest = tl.max(largest_of, axis=0)
    normaliser = largest + tl.log(tl.sum(sum_of * tl.exp(largest_of - largest), axis=0))

    token = tl.load(sampled + row)
    chosen = logit_before(
        tl.load(logits + row.to(tl.int64) * row_stride + token),
        token,
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
        PAGES_PER_SEQ,
        BIAS_WIDTH,
        BIAS_BLOCK,
        BLOCK,
    )
    chosen = without_nan(chosen)
    place = tl.arange(0, PARTS * K)
    x = tl.load(part_x + row * parts * K + place, mask=place < parts * K, other=-_INFINITY)
    ids = tl.load(part_id + row * parts * K + place, mask=place < parts * K, other=NO_TOKEN)
    count = 0
    best = tl.max(x, axis=0)
    while (count < wanted) & (best > -_INFINITY):
        id = tl.min(tl.where(x == best, ids, NO_TOKEN), axis=0)
        tl.store(out_ids + step_row * OUT_WIDTH + count, id)
        tl.store(out_values + step_row * OUT_WIDTH + count, best - normaliser)
        chosen = tl.where(id == token, best, chosen)  # without the rounding of an adjustment
        x = tl.where((x == best) & (ids == id), -_INFINITY, x)
        best = tl.max(x, axis=0)
        count += 1
    tl.store(out_count + step_row, count)
    tl.store(out_chosen + step_row, tl.where(chosen > -_INFINITY, chosen - normaliser, -_INFINITY))
