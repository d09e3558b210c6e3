"""Choosing tokens of rows that a top-k, top-p or min-p restricts, exactly and without a threshold where one can do.

With x = -d of `reference_sampling`, which is 0 for the best id and grows as ids get less likely: the best score of all
ids is the row's token if the filters keep its id, and whether they do takes sums, not a threshold. Top-p keeps an id if
all that are likelier together weigh less than what it must reach; top-k, if they are fewer than k. So

    propose   parts x rows   the id with the best score, filters aside
    weigh     parts x rows   the weight, or the number, of the likelier ids, which settles the row or rejects the id

Rows whose id is rejected are listed, and the programs of the next round's launches share what is listed.

An id of the whole row is kept with probability p. A rejected one bounds those that may be kept, which lie before it:
the next round proposes the best of them. Of the rows, 1 - p need a second round and (1 - p)**2 / 2 or so a third.

Top-k mostly keeps few, so for small k that would take many rounds. Instead `propose` finds an x up to which at least k
ids lie and few more, `weigh` sets these apart, and `finish` searches them, for top-p as well. What then is open, also
`finish` does, a program for each row: ever more rounds, or a search of the whole row where more ids than have a place
lie up to that x, as when most logits are the same: slow, and as exact.

Weights are integers, so that sums depend on no order; the order of the candidates does not matter either. Rows without
a filter, greedy ones among them, are settled when the first proposal is made.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_runner.kernels import reference_sampling
from gpu_runner.kernels.sample_noise import GREEDY_BELOW, without_nan

X_END = tl.constexpr(28.0)
"""exp(-28) is below the smallest weight, 2**-40, and 28 above the widest range of the noise, 25.7: an id there weighs
nothing and cannot beat the best one."""
INFINITY = tl.constexpr(float("inf"))
SETTLED = tl.constexpr(0)
PROPOSED = tl.constexpr(1)
REJECTED = tl.constexpr(2)
SHORT = tl.constexpr(3)
"""States of a row: its token is known; an id is proposed; it is rejected; candidates are to be searched."""
NUM_GROUPS = 1024
"""Groups of a row's ids whose best ones bound top-k."""
SMALL_K = tl.constexpr(NUM_GROUPS * 3 // 4)
"""The largest k that groups bound well: as many of them are hit by half as many ids again."""
_WEIGHT_ONE = tl.constexpr(reference_sampling.WEIGHT_ONE)


@triton.jit
def amount_of(x, counts):
    """1 if `counts`, else the weight; int64."""
    return tl.where(counts, 1.0, tl.exp(-x) * _WEIGHT_ONE).to(tl.int64)


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
def parts_of_open_rows(count, vocab, BLOCK: tl.constexpr):
    """Parts of each row, ids of a part, and parts in all, which are no more than programs or than open rows."""
    rows = tl.load(count)
    tiles = tl.cdiv(vocab, BLOCK)
    tiles_per_part = tl.cdiv(tiles, tl.maximum(tl.num_programs(0) // tl.maximum(rows, 1), 1))
    parts = tl.cdiv(tiles, tiles_per_part)
    return parts, tiles_per_part * BLOCK, rows * parts


@triton.jit
def leave_proposal(token, row, row_logits, vocab, best, per_heat, k, p, x_max, row_state, row_token, row_x, out):
    """Of the best score among ids that may be kept; NO_TOKEN in a row without any finite logit, which gets id 0."""
    exists = (token >= 0) & (token < vocab)
    x = (best - without_nan(tl.load(row_logits + token, mask=exists, other=-INFINITY))) * per_heat
    known = tl.where(x > x_max, REJECTED, SETTLED)
    state = tl.where(exists, tl.where((k > 0) | (p < 1.0), PROPOSED, known), SETTLED)
    tl.store(row_state + row, state)
    tl.store(row_token + row, token)
    tl.store(row_x + row, x)
    if state == SETTLED:
        tl.store(out + row, tl.where(exists, token, 0))
