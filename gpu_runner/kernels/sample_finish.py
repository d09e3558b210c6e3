"""The last kernel of filtered sampling; see `sample_filter`."""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_runner.kernels.sample_filter import (
    BINS,
    FACTS,
    INFINITY,
    best_logit,
    bin_of,
    filters_of,
    weight_of,
    weight_wanted,
)
from gpu_runner.kernels.sample_noise import (
    NO_TOKEN,
    best_of_parts,
    gumbel,
    noise_bits,
    noise_keys,
    noise_of_row,
    uniform,
    without_nan,
)

_LARGEST_KEY = tl.constexpr(0x7F800000)
"""The bits of +inf. Bits of floats that are not negative are in the order of the floats."""


@triton.jit
def _candidates(
    start,
    number,
    whole_row,
    row_logits,
    candidate_x,
    candidate_id,
    best,
    per_heat,
    first_bin,
    last_bin,
    T: tl.constexpr,
):
    """Ids, keys and membership in the bins, from index `start`, of candidates or else of all ids of the row."""
    index = start + tl.arange(0, T)
    inside = index < number
    logit = without_nan(tl.load(row_logits + index, mask=inside & whole_row, other=-INFINITY))
    kept_x = tl.load(candidate_x + index, mask=inside & (whole_row == 0), other=0.0)
    kept_id = tl.load(candidate_id + index, mask=inside & (whole_row == 0), other=0)
    x = tl.where(whole_row, (best - logit) * per_heat, kept_x)
    at = bin_of(x)
    return tl.where(whole_row, index, kept_id), x, inside & (at >= first_bin) & (at <= last_bin) & (at < BINS)


@triton.jit
def _sum_up_to(
    key,
    number,
    whole_row,
    row_logits,
    xs,
    ids,
    best,
    per_heat,
    first_bin,
    last_bin,
    WEIGH: tl.constexpr,
    T: tl.constexpr,
):
    """How many candidates of the bins have a key up to `key`, or what they weigh; int64."""
    total = tl.zeros((), tl.int64)
    for start in range(0, number, T):
        _, x, member = _candidates(
            start, number, whole_row, row_logits, xs, ids, best, per_heat, first_bin, last_bin, T
        )
        amount = weight_of(x) if WEIGH else tl.full([T], 1, tl.int64)
        total += tl.sum(tl.where(member & (x.to(tl.int32, bitcast=True) <= key), amount, 0), axis=0)
    return total


@triton.jit
def _key_that_reaches(
    wanted,
    number,
    whole_row,
    row_logits,
    xs,
    ids,
    best,
    per_heat,
    first_bin,
    last_bin,
    WEIGH: tl.constexpr,
    T: tl.constexpr,
):
    """The smallest key of the bins' candidates up to which they are, or weigh, `wanted`; their largest if none is."""
    low = _LARGEST_KEY
    high = 0
    for start in range(0, number, T):
        _, x, member = _candidates(
            start, number, whole_row, row_logits, xs, ids, best, per_heat, first_bin, last_bin, T
        )
        key = x.to(tl.int32, bitcast=True)
        low = tl.minimum(low, tl.min(tl.where(member, key, _LARGEST_KEY), axis=0))
        high = tl.maximum(high, tl.max(tl.where(member, key, 0), axis=0))
    while low < high:
        middle = low + (high - low) // 2
        reached = (
            _sum_up_to(middle, number, whole_row, row_logits, xs, ids, best, per_heat, first_bin, last_bin, WEIGH, T)
            >= wanted
        )
        high = tl.where(reached, middle, high)
        low = tl.where(reached, low, middle + 1)
    return low


@triton.jit
def finish_kernel(
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
    out,
    row_stride,
    vocab,
    parts,
    CAPACITY: tl.constexpr,
    PARTS: tl.constexpr,
    T: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program per row; T candidates at a time. Rows beyond the step's samples, or without any finite logit, get 0."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    if row >= tl.load(counts + 3):
        tl.store(out + row, 0)
        return
    score, token = best_of_parts(part_score, part_token, row, parts, PARTS)
    step_row = tl.load(sample_row + row)
    slot = tl.load(row_slot + step_row)
    k, p, x_max, per_heat = filters_of(slot, temperature, top_k, top_p, min_p, vocab)
    if (k > 0) | (p < 1.0):
        facts = row_facts + row * FACTS
        k_bin = tl.load(facts).to(tl.int32)
        p_first = tl.load(facts + 1).to(tl.int32)
        p_last = tl.load(facts + 2).to(tl.int32)
        k_left = tl.load(facts + 3)
        number = tl.load(num_candidates + row)
        whole_row = number > CAPACITY
        number = tl.where(whole_row, vocab, number)
        best = best_logit(part_best, row, parts, PARTS)
        row_logits = logits + row.to(tl.int64) * row_stride
        xs = candidate_x + row * CAPACITY
        ids = candidate_id + row * CAPACITY

        last_key = _LARGEST_KEY
        if k_bin < BINS:
            last_key = _key_that_reaches(
                k_left, number, whole_row, row_logits, xs, ids, best, per_heat, k_bin, k_bin, False, T
            )
        if p < 1.0:
            total = tl.load(facts + 4)
            if k_bin < BINS:
                total += _sum_up_to(
                    last_key, number, whole_row, row_logits, xs, ids, best, per_heat, k_bin, k_bin, True, T
                )
            wanted = weight_wanted(total, p) - tl.load(facts + 5)
            key = _key_that_reaches(
                wanted, number, whole_row, row_logits, xs, ids, best, per_heat, p_first, p_last, True, T
            )
            last_key = tl.minimum(last_key, key)

        heat, _, row_seed = noise_of_row(slot, temperature, seed)
        first_key, second_key = noise_keys(row_seed, tl.load(row_start + step_row) + tl.load(row_len + step_row))
        for start in range(0, number, T):
            id, x, member = _candidates(start, number, whole_row, row_logits, xs, ids, best, per_heat, 0, BINS, T)
            kept = member & (x.to(tl.int32, bitcast=True) <= last_key) & (x <= x_max)
            logit = without_nan(tl.load(row_logits + id, mask=kept, other=-INFINITY))
            scores = tl.where(kept, logit + heat * gumbel(uniform(noise_bits(id, first_key, second_key))), -INFINITY)
            top = tl.max(scores, axis=0)
            top_id = tl.min(tl.where(scores == top, id, NO_TOKEN), axis=0)
            better = (top > score) | ((top == score) & (top > -INFINITY) & (top_id < token))
            token = tl.where(better, top_id, token)
            score = tl.where(better, top, score)
    tl.store(out + row, tl.where(token < vocab, token, 0))
