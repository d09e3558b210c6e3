"""Choosing tokens of rows that a top-k, top-p or min-p restricts, exactly, in three passes over the logits.

With x = -d of `reference_sampling`, which is 0 for the best id and grows as ids get less likely, both thresholds are
values of x. A histogram over x finds the narrow bin in which each one lies; what lies in those bins, the candidates,
is set apart and searched:

    best        parts x rows   largest logit of each part; clears the histogram
    histogram   parts x rows   number (top-k) and weight (top-p) of the ids of each bin
    thresholds  rows           in which bins the thresholds lie
    collect     parts x rows   the best score among ids surely kept; the candidates
    finish      rows           thresholds by bisection among the candidates; the best score of all

Ids with x >= X_END fall in no bin: their weight is 0 and they cannot beat the best id, whatever the noise. Weights are
integers, so that sums depend on no order; the order of the candidates does not matter either. Rows without a filter,
greedy ones among them, pass through `collect` as if all their ids were surely kept.

Where a bin holds more candidates than their buffer, as when most logits are the same, `finish` searches the whole row
instead: slow, and as exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_runner.kernels import reference_sampling
from gpu_runner.kernels.sample_argmax import STOP_IDS
from gpu_runner.kernels.sample_noise import (
    FLOAT32_MAX,
    GREEDY_BELOW,
    NO_TOKEN,
    ban_stop_ids,
    improve,
    noise_keys,
    noise_of_row,
    without_nan,
)

NUM_BINS = 2048
ROW_FACTS = 6
"""int64 words that `thresholds` leaves to `finish` for each row."""
BINS = tl.constexpr(NUM_BINS)
X_END = tl.constexpr(28.0)
"""exp(-28) is below the smallest weight, 2**-40, and 28 above the widest range of the noise, 25.7."""
FACTS = tl.constexpr(ROW_FACTS)
_BINS_PER_X = tl.constexpr(NUM_BINS / 28.0)
_WEIGHT_ONE = tl.constexpr(reference_sampling.WEIGHT_ONE)
_CLEAR = tl.constexpr(256)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def bin_of(x):
    """BINS where x is too large for one. Never falls as x grows."""
    return tl.minimum(x * _BINS_PER_X, BINS).to(tl.int32)


@triton.jit
def weight_of(x):
    return (tl.exp(-x) * _WEIGHT_ONE).to(tl.int64)


@triton.jit
def weight_wanted(weight, share):
    """The weight that top-p must reach, of int64 `weight`."""
    return tl.maximum(tl.ceil(weight.to(tl.float64) * share.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def filters_of(slot, temperature, top_k, top_p, min_p, vocab):
    """k (0 = off), p (>= 1 = off), the largest x that min-p keeps, and 1 / temperature (1 in greedy rows)."""
    heat = tl.load(temperature + slot)
    greedy = heat < GREEDY_BELOW
    k = tl.load(top_k + slot)
    k = tl.where(greedy | (k >= vocab), 0, tl.maximum(k, 0))
    p = tl.where(greedy, 1.0, tl.load(top_p + slot))
    least = tl.load(min_p + slot).to(tl.float64)
    off = greedy | (least <= 0.0)
    x_max = tl.where(off, INFINITY, -tl.log(tl.where(off, 1.0, least)).to(tl.float32))
    return k, p, x_max, tl.div_rn(1.0, tl.where(greedy, 1.0, heat))


@triton.jit
def best_logit(part_best, row, parts, PARTS: tl.constexpr):
    """The largest logit of a row; 0 in a row without any finite one."""
    part = tl.arange(0, PARTS)
    best = tl.max(tl.load(part_best + row * parts + part, mask=part < parts, other=-INFINITY), axis=0)
    return tl.where(best == -INFINITY, 0.0, best)


@triton.jit
def best_kernel(
    logits,
    counts,
    sample_row,
    row_slot,
    row_start,
    row_len,
    temperature,
    top_k,
    top_p,
    min_p,
    min_tokens_until,
    stop_ids,
    part_best,
    group_best,
    bin_count,
    bin_weight,
    num_candidates,
    row_stride,
    vocab,
    part_size,
    parts,
    GROUPS: tl.constexpr,
    BANS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (part, row). GROUPS: also leave the largest logit of each of `parts * BLOCK` groups of ids."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    row = tl.program_id(1)
    if row >= tl.load(counts + 3):
        return
    row_logits = logits + row.to(tl.int64) * row_stride
    first = part * part_size
    end = tl.minimum(first + part_size, vocab)
    step_row = tl.load(sample_row + row)
    slot = tl.load(row_slot + step_row)
    if BANS:
        position = tl.load(row_start + step_row) + tl.load(row_len + step_row)
        ban_stop_ids(row_logits, first, end, slot, position, min_tokens_until, stop_ids, STOP_IDS)
    k, p, x_max, _ = filters_of(slot, temperature, top_k, top_p, min_p, vocab)
    if (k > 0) | (p < 1.0) | (x_max < INFINITY):
        best = tl.full([BLOCK], -INFINITY, tl.float32)
        for start in tl.range(first, end, BLOCK, num_stages=STAGES):
            ids = start + tl.arange(0, BLOCK)
            best = tl.maximum(best, without_nan(tl.load(row_logits + ids, mask=ids < vocab, other=-INFINITY)))
        tl.store(part_best + row * parts + part, tl.max(best, axis=0))
        if GROUPS:
            tl.store(group_best + (row * parts + part) * BLOCK + tl.arange(0, BLOCK), best)
        for start in range(part * _CLEAR, BINS, parts * _CLEAR):
            bins = row * BINS + start + tl.arange(0, _CLEAR)
            tl.store(bin_count + bins, tl.zeros([_CLEAR], tl.int32))
            tl.store(bin_weight + bins, tl.zeros([_CLEAR], tl.int64))
        if part == 0:
            tl.store(num_candidates + row, 0)


@triton.jit
def _reach_of_k(group_best, row, best, per_heat, k, groups, GROUPS: tl.constexpr):
    """An x, a little above the smallest that is known to, up to which k ids lie: k groups have one there. X_END at
    most."""
    group = tl.arange(0, GROUPS)
    x = (best - tl.load(group_best + row * groups + group, mask=group < groups, other=-INFINITY)) * per_heat
    low = 0.0
    high = X_END
    for _ in range(9):
        middle = (low + high) * 0.5
        reached = tl.sum((x <= middle).to(tl.int32), axis=0) >= k
        high = tl.where(reached, middle, high)
        low = tl.where(reached, low, middle)
    return high


@triton.jit
def histogram_kernel(
    logits,
    counts,
    sample_row,
    row_slot,
    temperature,
    top_k,
    top_p,
    min_p,
    part_best,
    group_best,
    bin_count,
    bin_weight,
    row_stride,
    vocab,
    part_size,
    parts,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (part, row). GROUPS: how many groups `best` left of a row, to a power of two; 0 if none.

    Ids that the thresholds cannot reach stay out of the histogram, which spares most atomic additions: for top-k those
    behind `_reach_of_k`, for top-p those that even all together weigh less than what it may leave out. The weight of
    the latter goes to the last bin, in one addition, since the total counts.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    row = tl.program_id(1)
    if row >= tl.load(counts + 3):
        return
    slot = tl.load(row_slot + tl.load(sample_row + row))
    k, p, _, per_heat = filters_of(slot, temperature, top_k, top_p, min_p, vocab)
    if (k == 0) & (p >= 1.0):
        return
    row_logits = logits + row.to(tl.int64) * row_stride
    first = part * part_size
    best = best_logit(part_best, row, parts, PARTS)
    reach = X_END
    if k == 0:
        reach = tl.log(vocab.to(tl.float32)) - tl.log(1.0 - p) + 0.01
    elif GROUPS > 0:
        reach = _reach_of_k(group_best, row, best, per_heat, k, parts * BLOCK, GROUPS)
    behind = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(first, tl.minimum(first + part_size, vocab), BLOCK, num_stages=STAGES):
        ids = start + tl.arange(0, BLOCK)
        x = (best - without_nan(tl.load(row_logits + ids, mask=ids < vocab, other=-INFINITY))) * per_heat
        at = bin_of(x)
        counted = (at < BINS) & (x <= reach)
        if k > 0:
            tl.atomic_add(bin_count + row * BINS + at, 1, mask=counted, sem="relaxed")
        if p < 1.0:
            weight = weight_of(x)
            tl.atomic_add(bin_weight + row * BINS + at, weight, mask=counted, sem="relaxed")
            behind += tl.where(counted, 0, weight)
    if (k == 0) & (reach < X_END):
        tl.atomic_add(bin_weight + row * BINS + BINS - 1, tl.sum(behind, axis=0), sem="relaxed")


@triton.jit
def thresholds_kernel(
    counts,
    sample_row,
    row_slot,
    temperature,
    top_k,
    top_p,
    min_p,
    bin_count,
    bin_weight,
    row_facts,
    vocab,
    PDL: tl.constexpr,
):
    """Program per row. Facts: where top-k's threshold lies (BINS: nowhere), between which bins, both included, top-p's
    (at top-k's if top-p is off), how many ids of its bin top-k keeps, the weight before that bin and before top-p's.

    What top-p must reach depends on which candidates top-k keeps, so that it lies between two bins, mostly the same.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    if row >= tl.load(counts + 3):
        return
    slot = tl.load(row_slot + tl.load(sample_row + row))
    k, p, _, _ = filters_of(slot, temperature, top_k, top_p, min_p, vocab)
    bins = tl.arange(0, BINS)
    facts = row_facts + row * FACTS
    k_bin = BINS
    if k > 0:
        up_to = tl.cumsum(tl.load(bin_count + row * BINS + bins), axis=0)
        k_bin = tl.sum((up_to < k).to(tl.int32), axis=0)
        tl.store(facts + 3, (k - tl.max(tl.where(up_to < k, up_to, 0), axis=0)).to(tl.int64))
    p_first = k_bin
    p_last = k_bin
    if p < 1.0:
        weight = tl.load(bin_weight + row * BINS + bins)
        up_to_bin = tl.cumsum(weight, axis=0)
        before_k = tl.sum(tl.where(bins < k_bin, weight, 0), axis=0)
        all_of_k = tl.sum(tl.where(bins <= k_bin, weight, 0), axis=0)
        p_first = tl.minimum(tl.sum((up_to_bin < weight_wanted(before_k, p)).to(tl.int32), axis=0), k_bin)
        p_last = tl.minimum(tl.sum((up_to_bin < weight_wanted(all_of_k, p)).to(tl.int32), axis=0), k_bin)
        tl.store(facts + 4, before_k)
        tl.store(facts + 5, tl.sum(tl.where(bins < p_first, weight, 0), axis=0))
    tl.store(facts, k_bin.to(tl.int64))
    tl.store(facts + 1, p_first.to(tl.int64))
    tl.store(facts + 2, p_last.to(tl.int64))


@triton.jit
def collect_kernel(
    logits,
    counts,
    sample_row,
    row_slot,
    row_start,
    row_len,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    part_best,
    part_score,
    part_token,
    row_facts,
    num_candidates,
    candidate_x,
    candidate_id,
    row_stride,
    vocab,
    part_size,
    parts,
    CAPACITY: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (part, row)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    row = tl.program_id(1)
    if row >= tl.load(counts + 3):
        return
    step_row = tl.load(sample_row + row)
    slot = tl.load(row_slot + step_row)
    k, p, x_max, per_heat = filters_of(slot, temperature, top_k, top_p, min_p, vocab)
    heat, lag_scale, row_seed = noise_of_row(slot, temperature, seed)
    first_key, second_key = noise_keys(row_seed, tl.load(row_start + step_row) + tl.load(row_len + step_row))
    best = FLOAT32_MAX
    # Without thresholds it is as if all ids lay in bin -1, before those of the thresholds.
    binned = (k > 0) | (p < 1.0)
    k_bin = BINS
    p_first = 0
    p_last = -1
    if binned:
        k_bin = tl.load(row_facts + row * FACTS).to(tl.int32)
        p_first = tl.load(row_facts + row * FACTS + 1).to(tl.int32)
        p_last = tl.load(row_facts + row * FACTS + 2).to(tl.int32)
    if binned | (x_max < INFINITY):
        best = best_logit(part_best, row, parts, PARTS)
    row_logits = logits + row.to(tl.int64) * row_stride
    first = part * part_size
    score = -INFINITY
    token = NO_TOKEN
    for start in tl.range(first, tl.minimum(first + part_size, vocab), BLOCK, num_stages=STAGES):
        ids = start + tl.arange(0, BLOCK)
        logit = without_nan(tl.load(row_logits + ids, mask=ids < vocab, other=-INFINITY))
        x = (best - logit) * per_heat
        at = tl.where(binned, bin_of(x), -1)
        sure = (at < p_first) & (x <= x_max)
        candidate = (((at >= p_first) & (at <= p_last)) | (at == k_bin)) & (at < BINS) & (ids < vocab)
        # Both questions in one reduction: BLOCK is below 2**16.
        found = tl.sum(candidate.to(tl.int32) + sure.to(tl.int32) * 65536, axis=0)
        if found >= 65536:
            alive = tl.where(sure, logit, -INFINITY)
            score, token = improve(alive, ids, score, token, heat, lag_scale, first_key, second_key)
        in_tile = found & 65535
        if in_tile > 0:
            before = tl.atomic_add(num_candidates + row, in_tile, sem="relaxed")
            place = before + tl.cumsum(candidate.to(tl.int32), axis=0) - 1
            stored = candidate & (place < CAPACITY)
            tl.store(candidate_x + row * CAPACITY + place, x, mask=stored)
            tl.store(candidate_id + row * CAPACITY + place, ids, mask=stored)
    tl.store(part_score + row * parts + part, score)
    tl.store(part_token + row * parts + part, token)
