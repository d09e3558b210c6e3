"""Choosing tokens in one pass over the logits: greedy rows, and rows that no filter restricts.

Each row's vocabulary is cut into parts, each a program's, so that one row already fills the GPU; the last of a row's
programs takes the best of the parts. It is exact whatever the cut: the smallest id with the largest score.
"""

from __future__ import annotations

import triton
import triton.language as tl

from asyncengine.config import MAX_STOP_IDS
from gpu_runner.kernels.sample_noise import (
    NO_TOKEN,
    arrives_last,
    ban_stop_ids,
    best_proposal,
    improve,
    noise_keys,
    noise_of_row,
    without_nan,
)

STOP_IDS = tl.constexpr(MAX_STOP_IDS)


@triton.jit(do_not_specialize=["parts"])  # one kernel serves all graphs
def argmax_kernel(
    logits,
    counts,
    sample_row,
    row_slot,
    row_start,
    row_len,
    temperature,
    seed,
    min_tokens_until,
    stop_ids,
    part_score,
    part_token,
    arrived,
    out,
    row_stride,
    vocab,
    part_size,
    parts,
    NOISE: tl.constexpr,
    BANS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (part, row). NOISE: scores are those of the row's temperature and seed, else the logits.

    A row without any finite logit, or beyond the step's samples, gets id 0.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    row = tl.program_id(1)
    if row >= tl.load(counts + 3):
        if part == 0:
            tl.store(out + row, 0)
        return
    row_logits = logits + row.to(tl.int64) * row_stride
    first = part * part_size
    end = tl.minimum(first + part_size, vocab)
    if NOISE or BANS:
        step_row = tl.load(sample_row + row)
        slot = tl.load(row_slot + step_row)
        position = tl.load(row_start + step_row) + tl.load(row_len + step_row)
    if BANS:
        ban_stop_ids(row_logits, first, end, slot, position, min_tokens_until, stop_ids, STOP_IDS)
    if NOISE:
        heat, lag_scale, row_seed = noise_of_row(slot, temperature, seed)
        first_key, second_key = noise_keys(row_seed, position)
        score = float("-inf")
        token = NO_TOKEN
        for start in tl.range(first, end, BLOCK, num_stages=STAGES):
            ids = start + tl.arange(0, BLOCK)
            x = without_nan(tl.load(row_logits + ids, mask=ids < vocab, other=float("-inf")))
            score, token = improve(x, ids, score, token, heat, lag_scale, first_key, second_key)
    else:
        lane_score = tl.full([BLOCK], float("-inf"), tl.float32)
        lane_token = tl.full([BLOCK], NO_TOKEN, tl.int32)
        for start in tl.range(first, end, BLOCK, num_stages=STAGES):
            ids = start + tl.arange(0, BLOCK)
            x = without_nan(tl.load(row_logits + ids, mask=ids < vocab, other=float("-inf")))
            better = x > lane_score
            lane_token = tl.where(better, ids, lane_token)
            lane_score = tl.where(better, x, lane_score)
        score = tl.max(lane_score, axis=0)
        token = tl.min(tl.where(lane_score == score, lane_token, NO_TOKEN), axis=0)
    tl.store(part_score + row * parts + part, score)
    tl.store(part_token + row * parts + part, token)
    if arrives_last(arrived + row, parts):
        token = best_proposal(part_score, part_token, row * parts, parts)
        tl.store(out + row, tl.where(token < vocab, token, 0))
