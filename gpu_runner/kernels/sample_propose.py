"""The id with the best score of each row, among those that are not known to be filtered out; see `sample_filter`."""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_runner.kernels.sample_argmax import STOP_IDS
from gpu_runner.kernels.sample_filter import (
    INFINITY,
    NUM_GROUPS,
    SETTLED,
    SHORT,
    SMALL_K,
    X_END,
    filters_of,
    leave_proposal,
    parts_of_open_rows,
)
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

_GROUPS = tl.constexpr(NUM_GROUPS)


@triton.jit
def _largest_of(values, first, number):
    """Of element i, i + _GROUPS, ... below `number`."""
    largest = tl.full([_GROUPS], -INFINITY, tl.float32)
    for start in range(0, number, 4 * _GROUPS):
        for quarter in tl.static_range(4):  # four loads on their way
            index = start + quarter * _GROUPS + tl.arange(0, _GROUPS)
            value = tl.load(values + first + index, mask=index < number, other=-INFINITY, cache_modifier=".cg")
            largest = tl.maximum(largest, value)
    return largest


@triton.jit
def _reach_of_k(x, k):
    """A number, a little above the smallest, up to which k of `x` lie; X_END at most."""
    low = 0.0
    high = X_END
    for _ in range(9):
        middle = (low + high) * 0.5
        reached = tl.sum((x <= middle).to(tl.int32), axis=0) >= k
        high = tl.where(reached, middle, high)
        low = tl.where(reached, low, middle)
    return high


@triton.jit(do_not_specialize=["parts"])  # one kernel serves all graphs
def propose_kernel(
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
    min_tokens_until,
    stop_ids,
    part_best,
    part_score,
    part_token,
    group_best,
    arrived,
    row_state,
    row_token,
    row_best,
    row_x,
    row_total,
    row_before,
    num_candidates,
    open_count,
    out,
    row_stride,
    vocab,
    part_size,
    parts,
    ROUNDS: tl.constexpr,
    BANS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (part, row). LANES: groups of a part. ROUNDS: of which open rows are counted.

    `row_x` of a row of small k says up to where candidates lie.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    row = tl.program_id(1)
    if (part == 0) & (row == 0):
        tl.store(open_count + tl.arange(0, ROUNDS), 0)
    if row >= tl.load(counts + 3):
        if part == 0:
            tl.store(row_state + row, SETTLED)
            tl.store(out + row, 0)
        return
    row_logits = logits + row.to(tl.int64) * row_stride
    first = part * part_size
    end = tl.minimum(first + part_size, vocab)
    step_row = tl.load(sample_row + row)
    slot = tl.load(row_slot + step_row)
    position = tl.load(row_start + step_row) + tl.load(row_len + step_row)
    if BANS:
        ban_stop_ids(row_logits, first, end, slot, position, min_tokens_until, stop_ids, STOP_IDS)
    k, p, x_max, per_heat = filters_of(slot, temperature, top_k, top_p, min_p, vocab)
    # Top-p after a top-k of any size needs the weight of what top-k keeps, which is `finish`'s to find.
    short = (k > 0) & ((k <= SMALL_K) | (p < 1.0))
    largest = tl.full([BLOCK], -INFINITY, tl.float32)
    place = row * parts + part
    if short:
        for start in tl.range(first, end, BLOCK, num_stages=STAGES):
            ids = start + tl.arange(0, BLOCK)
            x = without_nan(tl.load(row_logits + ids, mask=ids < vocab, other=-INFINITY))
            largest = tl.maximum(largest, x)
        groups = tl.max(tl.reshape(largest, [LANES, BLOCK // LANES], can_reorder=True), axis=1)
        tl.store(group_best + place * LANES + tl.arange(0, LANES), groups)
    else:
        heat, lag_scale, row_seed = noise_of_row(slot, temperature, seed)
        first_key, second_key = noise_keys(row_seed, position)
        score = -INFINITY
        token = NO_TOKEN
        for start in tl.range(first, end, BLOCK, num_stages=STAGES):
            ids = start + tl.arange(0, BLOCK)
            x = without_nan(tl.load(row_logits + ids, mask=ids < vocab, other=-INFINITY))
            largest = tl.maximum(largest, x)
            score, token = improve(x, ids, score, token, heat, lag_scale, first_key, second_key)
        tl.store(part_score + place, score)
        tl.store(part_token + place, token)
        tl.store(part_best + place, tl.max(largest, axis=0))
    if arrives_last(arrived + row, parts):
        tl.store(row_total + row, tl.zeros((), tl.int64))
        tl.store(row_before + row, tl.zeros((), tl.int64))
        tl.store(num_candidates + row, 0)
        if short:
            in_group = _largest_of(group_best, row * parts * LANES, parts * LANES)
            best = tl.max(in_group, axis=0)
            best = tl.where(best == -INFINITY, 0.0, best)
            tl.store(row_x + row, _reach_of_k((best - in_group) * per_heat, k))
            tl.store(row_state + row, SHORT)
        else:
            best = tl.max(_largest_of(part_best, row * parts, parts), axis=0)
            best = tl.where(best == -INFINITY, 0.0, best)
            token = best_proposal(part_score, part_token, row * parts, parts)
            leave_proposal(token, row, row_logits, vocab, best, per_heat, k, p, x_max, row_state, row_token, row_x, out)
        tl.store(row_best + row, best)


@triton.jit(do_not_specialize=["max_rows", "round"])  # one kernel serves all graphs and rounds
def propose_again_kernel(
    logits,
    sample_row,
    row_slot,
    row_start,
    row_len,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    part_score,
    part_token,
    arrived,
    row_state,
    row_token,
    row_best,
    row_x,
    open_rows,
    open_count,
    out,
    row_stride,
    vocab,
    max_rows,
    round,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs share the rows that are open after round `round`, of the ids before each one's rejected one."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    parts, part_size, items = parts_of_open_rows(open_count + round, vocab, BLOCK)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = tl.load(open_rows + round * max_rows + item // parts)
        row_logits = logits + row.to(tl.int64) * row_stride
        first = (item % parts) * part_size
        step_row = tl.load(sample_row + row)
        slot = tl.load(row_slot + step_row)
        k, p, x_max, per_heat = filters_of(slot, temperature, top_k, top_p, min_p, vocab)
        best = tl.load(row_best + row)
        bound = tl.load(row_x + row)
        heat, lag_scale, row_seed = noise_of_row(slot, temperature, seed)
        first_key, second_key = noise_keys(row_seed, tl.load(row_start + step_row) + tl.load(row_len + step_row))
        score = -INFINITY
        token = NO_TOKEN
        for start in tl.range(first, tl.minimum(first + part_size, vocab), BLOCK, num_stages=STAGES):
            ids = start + tl.arange(0, BLOCK)
            logit = without_nan(tl.load(row_logits + ids, mask=ids < vocab, other=-INFINITY))
            x = (best - logit) * per_heat
            alive = tl.where((x < bound) & (x <= x_max), logit, -INFINITY)
            score, token = improve(alive, ids, score, token, heat, lag_scale, first_key, second_key)
        tl.store(part_score + item, score)
        tl.store(part_token + item, token)
        if arrives_last(arrived + row, parts):
            token = best_proposal(part_score, part_token, item // parts * parts, parts)
            leave_proposal(token, row, row_logits, vocab, best, per_heat, k, p, x_max, row_state, row_token, row_x, out)
