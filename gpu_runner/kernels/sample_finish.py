"""The last kernel of filtered sampling; see `sample_filter`."""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_runner.kernels.sample_filter import (
    INFINITY,
    SETTLED,
    SHORT,
    X_END,
    amount_of,
    filters_of,
    weight_wanted,
)
from gpu_runner.kernels.sample_noise import (
    NO_TOKEN,
    gumbel,
    improve,
    noise_bits,
    noise_keys,
    noise_of_row,
    uniform,
    without_nan,
)

_LARGEST_KEY = tl.constexpr(0x7F800000)
"""The bits of +inf. Bits of floats that are not negative are in the order of the floats."""

_COUNT_AT = tl.constexpr(51)
_COUNTED = tl.constexpr(2**51)
"""1024 keys weigh less, of 2**40 at most each, and so many times 2**51 is still an int64."""
_WEIGHT_BITS = tl.constexpr(2**51 - 1)


@triton.jit
def _candidates(start, number, whole_row, row_logits, xs, ids, best, per_heat, BLOCK: tl.constexpr):
    """Ids, x and whether it is one, from index `start`, of candidates or else of all ids of the row."""
    index = start + tl.arange(0, BLOCK)
    inside = index < number
    logit = without_nan(tl.load(row_logits + index, mask=inside & whole_row, other=-INFINITY))
    kept_x = tl.load(xs + index, mask=inside & (whole_row == 0), other=0.0)
    kept_id = tl.load(ids + index, mask=inside & (whole_row == 0), other=0)
    x = tl.where(whole_row, (best - logit) * per_heat, kept_x)
    return tl.where(whole_row, index, kept_id), x, inside & (x < X_END)


@triton.jit
def _sum_up_to(key, number, whole_row, row_logits, xs, ids, best, per_heat, counts, BLOCK: tl.constexpr):
    """How many candidates have a key up to `key`, or what they weigh; int64."""
    total = tl.zeros((), tl.int64)
    for start in range(0, number, BLOCK):
        _, x, member = _candidates(start, number, whole_row, row_logits, xs, ids, best, per_heat, BLOCK)
        up_to = member & (x.to(tl.int32, bitcast=True) <= key)
        total += tl.sum(tl.where(up_to, amount_of(x, counts), 0), axis=0)
    return total


@triton.jit
def _key_that_reaches(
    wanted, largest, number, whole_row, row_logits, xs, ids, best, per_heat, counts, BLOCK: tl.constexpr
):
    """The smallest key up to which candidates are, or weigh, `wanted`, and `largest` if none is."""
    low = 0
    high = largest
    while low < high:
        middle = low + (high - low) // 2
        reached = _sum_up_to(middle, number, whole_row, row_logits, xs, ids, best, per_heat, counts, BLOCK) >= wanted
        high = tl.where(reached, middle, high)
        low = tl.where(reached, low, middle + 1)
    return low


@triton.jit
def _key_in_tile(wanted, largest, key, amount, COUNT_AT: tl.constexpr):
    """A key up to which are those that `_key_that_reaches` would find, of a tile's keys.

    amount: 0 beyond `largest`; else 1 (COUNT_AT = 0), or a weight and 2**COUNT_AT, so that one sum tells both what keys
    weigh and how many there are: of a single one left, which is where most searches end, the last bits do not matter.
    """
    low = 0
    high = largest
    up_to = tl.sum(amount, axis=0)
    below = up_to - up_to
    while (low < high) & ((up_to - below) >> COUNT_AT > 1):
        middle = low + (high - low) // 2
        there = tl.sum(tl.where(key <= middle, amount, 0), axis=0)
        reached = (there.to(tl.int64) & _WEIGHT_BITS) >= wanted
        high = tl.where(reached, middle, high)
        up_to = tl.where(reached, there, up_to)
        low = tl.where(reached, low, middle + 1)
        below = tl.where(reached, below, there)
    return high


@triton.jit
def _best_of_few(
    k,
    p,
    x_max,
    number,
    row_logits,
    xs,
    ids,
    heat,
    first_key,
    second_key,
    FEW: tl.constexpr,
):
    """The best score's id among those kept of at most FEW candidates."""
    index = tl.arange(0, FEW)
    inside = index < number
    x = tl.load(xs + index, mask=inside, other=INFINITY)
    id = tl.load(ids + index, mask=inside, other=0)
    key = x.to(tl.int32, bitcast=True)
    last_key = _key_in_tile(k, _LARGEST_KEY - 1, key, inside.to(tl.int32), 0)
    if p < 1.0:
        weight = tl.where(key <= last_key, amount_of(x, False), 0)
        wanted = weight_wanted(tl.sum(weight, axis=0), p)
        last_key = _key_in_tile(wanted, last_key, key, tl.where(key <= last_key, weight + _COUNTED, 0), _COUNT_AT)
    kept = (key <= last_key) & (x <= x_max)
    logit = without_nan(tl.load(row_logits + id, mask=kept, other=-INFINITY))
    score = tl.where(kept, logit + heat * gumbel(uniform(noise_bits(id, first_key, second_key))), -INFINITY)
    top = tl.max(score, axis=0)
    return tl.min(tl.where(kept & (score == top), id, NO_TOKEN), axis=0)


@triton.jit
def _best_kept(
    last_key,
    x_max,
    number,
    whole_row,
    row_logits,
    xs,
    ids,
    best,
    per_heat,
    heat,
    first_key,
    second_key,
    BLOCK: tl.constexpr,
):
    score = -INFINITY
    token = NO_TOKEN
    for start in range(0, number, BLOCK):
        id, x, member = _candidates(start, number, whole_row, row_logits, xs, ids, best, per_heat, BLOCK)
        kept = member & (x.to(tl.int32, bitcast=True) <= last_key) & (x <= x_max)
        logit = without_nan(tl.load(row_logits + id, mask=kept, other=-INFINITY))
        scores = tl.where(kept, logit + heat * gumbel(uniform(noise_bits(id, first_key, second_key))), -INFINITY)
        top = tl.max(scores, axis=0)
        top_id = tl.min(tl.where(scores == top, id, NO_TOKEN), axis=0)
        better = (top > score) | ((top == score) & (top > -INFINITY) & (top_id < token))
        token = tl.where(better, top_id, token)
        score = tl.where(better, top, score)
    return token


@triton.jit
def _rounds(
    bound,
    wanted,
    x_max,
    row_logits,
    vocab,
    best,
    per_heat,
    counts,
    heat,
    lag_scale,
    first_key,
    second_key,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The best score's id among those kept, all of which lie before `bound`."""
    token = NO_TOKEN
    before = wanted
    while before >= wanted:
        score = -INFINITY
        token = NO_TOKEN
        for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
            ids = start + tl.arange(0, BLOCK)
            logit = without_nan(tl.load(row_logits + ids, mask=ids < vocab, other=-INFINITY))
            x = (best - logit) * per_heat
            alive = tl.where((x < bound) & (x <= x_max), logit, -INFINITY)
            score, token = improve(alive, ids, score, token, heat, lag_scale, first_key, second_key)
        # Never without a token: the best id lies before any bound.
        bound = (best - without_nan(tl.load(row_logits + token, mask=token < vocab, other=-INFINITY))) * per_heat
        likelier = tl.zeros([BLOCK], tl.int64)
        for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
            ids = start + tl.arange(0, BLOCK)
            x = (best - without_nan(tl.load(row_logits + ids, mask=ids < vocab, other=-INFINITY))) * per_heat
            likelier += tl.where(x < bound, amount_of(x, counts), 0)
        before = tl.sum(likelier, axis=0)
    return token


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
    row_state,
    row_best,
    row_x,
    row_total,
    num_candidates,
    candidate_x,
    candidate_id,
    out,
    row_stride,
    vocab,
    CAPACITY: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program per row that is not settled; up to FEW candidates at once, or BLOCK candidates or ids at a time."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    if row >= tl.load(counts + 3):
        return
    state = tl.load(row_state + row)
    if state == SETTLED:
        return
    step_row = tl.load(sample_row + row)
    slot = tl.load(row_slot + step_row)
    k, p, x_max, per_heat = filters_of(slot, temperature, top_k, top_p, min_p, vocab)
    heat, lag_scale, row_seed = noise_of_row(slot, temperature, seed)
    first_key, second_key = noise_keys(row_seed, tl.load(row_start + step_row) + tl.load(row_len + step_row))
    row_logits = logits + row.to(tl.int64) * row_stride
    best = tl.load(row_best + row)
    if state == SHORT:
        number = tl.load(num_candidates + row)
        whole_row = number > CAPACITY
        number = tl.where(whole_row, vocab, number)
        xs = candidate_x + row * CAPACITY
        ids = candidate_id + row * CAPACITY
        if (number <= FEW) & (whole_row == 0):
            token = _best_of_few(k, p, x_max, number, row_logits, xs, ids, heat, first_key, second_key, FEW)
        else:
            last_key = _key_that_reaches(
                k.to(tl.int64), _LARGEST_KEY, number, whole_row, row_logits, xs, ids, best, per_heat, True, BLOCK
            )
            if p < 1.0:
                total = _sum_up_to(last_key, number, whole_row, row_logits, xs, ids, best, per_heat, False, BLOCK)
                last_key = _key_that_reaches(
                    weight_wanted(total, p),
                    last_key,
                    number,
                    whole_row,
                    row_logits,
                    xs,
                    ids,
                    best,
                    per_heat,
                    False,
                    BLOCK,
                )
            token = _best_kept(
                last_key,
                x_max,
                number,
                whole_row,
                row_logits,
                xs,
                ids,
                best,
                per_heat,
                heat,
                first_key,
                second_key,
                BLOCK,
            )
    else:
        # Without a top-k or top-p any id that min-p keeps will do.
        wanted = tl.where(k > 0, k.to(tl.int64), weight_wanted(tl.load(row_total + row), p))
        wanted = tl.where((k > 0) | (p < 1.0), wanted, 2**62)
        token = _rounds(
            tl.load(row_x + row),
            wanted,
            x_max,
            row_logits,
            vocab,
            best,
            per_heat,
            k > 0,
            heat,
            lag_scale,
            first_key,
            second_key,
            BLOCK,
            STAGES,
        )
    tl.store(out + row, tl.where(token < vocab, token, 0))
