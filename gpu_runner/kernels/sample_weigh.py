"""Whether the filters keep the proposed id of each row, and the candidates of rows of small k; see `sample_filter`."""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_runner.kernels.sample_filter import (
    INFINITY,
    PROPOSED,
    REJECTED,
    SETTLED,
    SHORT,
    X_END,
    amount_of,
    filters_of,
    parts_of_open_rows,
    weight_wanted,
)
from gpu_runner.kernels.sample_noise import arrives_last, without_nan


@triton.jit
def _leave_open(row, open_rows, open_count):
    """To the next round."""
    tl.store(open_rows + tl.atomic_add(open_count, 1, sem="relaxed"), row)


@triton.jit
def _collect(
    row_logits, first, end, vocab, row, best, bound, per_heat, num_candidates, candidate_x, candidate_id,
    CAPACITY: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    for start in tl.range(first, end, BLOCK, num_stages=STAGES):
        ids = start + tl.arange(0, BLOCK)
        x = (best - without_nan(tl.load(row_logits + ids, mask=ids < vocab, other=-INFINITY))) * per_heat
        candidate = (x <= bound) & (x < X_END)
        found = tl.sum(candidate.to(tl.int32), axis=0)
        if found > 0:
            before = tl.atomic_add(num_candidates + row, found, sem="relaxed")
            place = before + tl.cumsum(candidate.to(tl.int32), axis=0) - 1
            stored = candidate & (place < CAPACITY)
            tl.store(candidate_x + row * CAPACITY + place, x, mask=stored)
            tl.store(candidate_id + row * CAPACITY + place, ids, mask=stored)


@triton.jit
def _weigh(
    row_logits, first, end, vocab, parts, row, k, p, x_max, best, bound, per_heat, arrived, row_state, row_token,
    row_total, row_before, open_rows, open_count, out,
    FIRST_ROUND: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    total = tl.zeros([BLOCK], tl.int64)
    likelier = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(first, end, BLOCK, num_stages=STAGES):
        ids = start + tl.arange(0, BLOCK)
        x = (best - without_nan(tl.load(row_logits + ids, mask=ids < vocab, other=-INFINITY))) * per_heat
        amount = amount_of(x, k > 0)
        if FIRST_ROUND:
            total += amount
        likelier += tl.where(x < bound, amount, 0)
    if FIRST_ROUND:
        tl.atomic_add(row_total + row, tl.sum(total, axis=0), sem="relaxed")
    tl.atomic_add(row_before + row, tl.sum(likelier, axis=0), sem="relaxed")
    if arrives_last(arrived + row, parts):
        all_of_row = tl.load(row_total + row, cache_modifier=".cg")
        before = tl.load(row_before + row, cache_modifier=".cg")
        tl.store(row_before + row, tl.zeros((), tl.int64))
        wanted = tl.where(k > 0, k.to(tl.int64), weight_wanted(all_of_row, p))
        kept = (before < wanted) & (bound <= x_max)
        tl.store(row_state + row, tl.where(kept, SETTLED, REJECTED))
        if kept:
            tl.store(out + row, tl.load(row_token + row))
        else:
            _leave_open(row, open_rows, open_count)


@triton.jit(do_not_specialize=["parts"])  # one kernel serves all graphs
def weigh_kernel(
    logits,
    counts,
    sample_row,
    row_slot,
    temperature,
    top_k,
    top_p,
    min_p,
    arrived,
    row_state,
    row_token,
    row_best,
    row_x,
    row_total,
    row_before,
    num_candidates,
    candidate_x,
    candidate_id,
    open_rows,
    open_count,
    out,
    row_stride,
    vocab,
    part_size,
    parts,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (part, row), of the first round, which finds the row's total as well, and the candidates."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    # Backwards: what was proposed from last is still in the cache.
    row = tl.num_programs(1) - 1 - tl.program_id(1)
    if row >= tl.load(counts + 3):
        return
    state = tl.load(row_state + row)
    if state == SETTLED:
        return
    slot = tl.load(row_slot + tl.load(sample_row + row))
    k, p, x_max, per_heat = filters_of(slot, temperature, top_k, top_p, min_p, vocab)
    row_logits = logits + row.to(tl.int64) * row_stride
    first = part * part_size
    end = tl.minimum(first + part_size, vocab)
    best = tl.load(row_best + row)
    bound = tl.load(row_x + row)
    if state == SHORT:
        _collect(
            row_logits, first, end, vocab, row, best, bound, per_heat, num_candidates, candidate_x, candidate_id,
            CAPACITY, BLOCK, STAGES,
        )  # fmt: skip
    elif state == PROPOSED:
        _weigh(
            row_logits, first, end, vocab, parts, row, k, p, x_max, best, bound, per_heat, arrived, row_state,
            row_token, row_total, row_before, open_rows, open_count, out, True, BLOCK, STAGES,
        )  # fmt: skip
    elif part == 0:
        _leave_open(row, open_rows, open_count)


@triton.jit(do_not_specialize=["max_rows", "round"])  # one kernel serves all graphs and rounds
def weigh_again_kernel(
    logits,
    sample_row,
    row_slot,
    temperature,
    top_k,
    top_p,
    min_p,
    arrived,
    row_state,
    row_token,
    row_best,
    row_x,
    row_total,
    row_before,
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
    """Programs share the rows that were open after round `round`, of which `propose_again_kernel` proposed again."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    parts, part_size, items = parts_of_open_rows(open_count + round, vocab, BLOCK)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = tl.load(open_rows + round * max_rows + item // parts)
        if tl.load(row_state + row) == PROPOSED:
            slot = tl.load(row_slot + tl.load(sample_row + row))
            k, p, x_max, per_heat = filters_of(slot, temperature, top_k, top_p, min_p, vocab)
            first = (item % parts) * part_size
            _weigh(
                logits + row.to(tl.int64) * row_stride, first, tl.minimum(first + part_size, vocab), vocab, parts, row,
                k, p, x_max, tl.load(row_best + row), tl.load(row_x + row), per_heat, arrived, row_state, row_token,
                row_total, row_before, open_rows + (round + 1) * max_rows, open_count + round + 1, out,
                False, BLOCK, STAGES,
            )  # fmt: skip
