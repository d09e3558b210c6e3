"""What the sampling kernels compute of one token id: its logit without NaN, its noise, and whether the two can win.

The recipe is `reference_sampling`'s, step 6. Two logarithms for each id of a vocabulary would take longer than reading
the logits, so they are left out where the id cannot beat the best score so far: noise = -log(e) for an e >= v, so an id
with log(v) > (logit - best score) / temperature cannot, and a float's bits tell its logarithm well enough. Of a
program's tiles the n-th holds a new best with probability 1/n, so most of them skip the logarithms.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_runner.kernels import reference_sampling

GREEDY_BELOW = tl.constexpr(reference_sampling.GREEDY_BELOW)
FLOAT32_MAX = tl.constexpr(reference_sampling.FLOAT32_MAX)
GOLDEN = tl.constexpr(reference_sampling.GOLDEN)
NO_TOKEN = tl.constexpr(2**31 - 1)
"""The id of a best that there is not; larger than any, so that a smallest id is never this one."""
_INFINITY = tl.constexpr(float("inf"))
_LANES = tl.constexpr(256)
_LOG_UNIT = tl.constexpr(2.0**23)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def without_nan(logits):
    """float32, NaN as -inf and +inf as the largest number."""
    x = logits.to(tl.float32)
    return tl.minimum(tl.where(x == x, x, -_INFINITY), FLOAT32_MAX)


@triton.jit
def _mix(x, between):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D + between
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def noise_keys(seed, position):
    """k0 and k1 of a row, uint32. seed: int64, position: int32."""
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    index = position.to(tl.uint32)
    first = _mix(_mix(_mix(low + GOLDEN, 0) ^ high, 0) ^ index, 0)
    second = _mix(_mix(_mix(index + 0x85EBCA6B, 0) ^ high, 0) ^ low, 0)
    return first, second


@triton.jit
def noise_bits(ids, first_key, second_key):
    """h of each id, uint32."""
    return _mix(first_key + ids.to(tl.uint32) * GOLDEN, second_key)


@triton.jit
def uniform(bits):
    """v of each h: float32 above 0 and below 1."""
    return tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)


@triton.jit
def gumbel(v):
    """-log(-log1p(-v)). The rounding of 1 - v is made up for by the quotient (W. Kahan's log1p)."""
    rest = 1.0 - v
    lost = rest == 1.0
    log1p = tl.where(lost, -v, tl.log(rest) * tl.div_rn(-v, tl.where(lost, 1.0, rest - 1.0)))
    return -tl.log(-log1p)


@triton.jit
def noise_of_row(slot, temperature, seed):
    """What scales the noise: 0 for a greedy row, and how a logit's lag counts in powers of two."""
    heat = tl.load(temperature + slot)
    heat = tl.where(heat < GREEDY_BELOW, 0.0, heat)
    return heat, tl.div_rn(_LOG2_E, tl.maximum(heat, 1e-30)), tl.load(seed + slot)


@triton.jit
def improve(logits, ids, score, token, heat, lag_scale, first_key, second_key):
    """The best of a tile and of the lower ids before it. logits: float32, -inf where an id does not take part.

    score, token: the best so far, -inf and NO_TOKEN if none. heat, lag_scale: as `noise_of_row` gives them.
    """
    h = noise_bits(ids, first_key, second_key)
    # Of 2**32 * v, the bits as a number are its logarithm to base 2, in units of 2**-23, from 0.09 below to none above.
    log_v = (h.to(tl.float32) + 0.5).to(tl.int32, bitcast=True).to(tl.float32)
    # The margins are above what rounding does to the score and to this bound.
    bar = tl.maximum(score - tl.abs(score) * 1e-6, -FLOAT32_MAX)
    can_win = log_v <= (logits - bar) * (lag_scale * _LOG_UNIT) + (127 + 32 + 0.002) * _LOG_UNIT
    if tl.max(can_win.to(tl.int32), axis=0) > 0:
        scores = logits + heat * gumbel(uniform(h))
        top = tl.max(scores, axis=0)
        top_id = tl.min(tl.where(scores == top, ids, NO_TOKEN), axis=0)
        better = top > score
        token = tl.where(better, top_id, token)
        score = tl.where(better, top, score)
    return score, token


@triton.jit
def arrives_last(arrived, parts):
    """Whether the other `parts - 1` programs of the row have counted themselves, so that what they stored can be read,
    past this multiprocessor's own cache (".cg"). The count is 0 again then."""
    # All threads' stores happen before the count that tells others of them.
    tl.debug_barrier()
    last = tl.atomic_add(arrived, 1, sem="acq_rel") == parts - 1
    if last:
        tl.store(arrived, 0)
    return last


@triton.jit
def best_proposal(part_score, part_token, first, parts):
    """The best of what a row's programs found, the smallest id among equals; NO_TOKEN if none found any."""
    score = tl.full([_LANES], -_INFINITY, tl.float32)
    token = tl.full([_LANES], NO_TOKEN, tl.int32)
    for start in range(0, parts, _LANES):
        part = start + tl.arange(0, _LANES)
        other_score = tl.load(part_score + first + part, mask=part < parts, other=-_INFINITY, cache_modifier=".cg")
        other = tl.load(part_token + first + part, mask=part < parts, other=NO_TOKEN, cache_modifier=".cg")
        better = (other_score > score) | ((other_score == score) & (other < token))
        token = tl.where(better, other, token)
        score = tl.where(better, other_score, score)
    top = tl.max(score, axis=0)
    return tl.min(tl.where(score == top, token, NO_TOKEN), axis=0)


@triton.jit
def ban_stop_ids(row_logits, first, end, slot, position, min_tokens_until, stop_ids, WIDTH: tl.constexpr):
    """-inf to the row's stop ids from `first` to `end`, if it is too early for them; seen by the whole program."""
    if position < tl.load(min_tokens_until + slot):
        ids = tl.load(stop_ids + slot * WIDTH + tl.arange(0, WIDTH))
        tl.store(row_logits + ids, tl.full([WIDTH], -_INFINITY, tl.float32), mask=(ids >= first) & (ids < end))
        tl.debug_barrier()
