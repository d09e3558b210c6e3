"""The head's product and the choice among its logits in one kernel, which keeps the logits in registers.

A program owns a tile of rows and goes through tiles of the vocabulary, to each of which it brings the best score and id
so far. The best of a row is one integer in memory, ordered by score and then from the largest id to the smallest, that
programs raise: its order decides, not theirs. A logit is the same sum, block of K after block of K, whatever the tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_runner.kernels.sample_noise import (
    FLOAT32_MAX,
    NO_TOKEN,
    arrives_last,
    bar_of,
    gumbel,
    noise_bits,
    noise_bound,
    noise_keys,
    noise_of_row,
    uniform,
)

NOTHING = tl.constexpr(-(2**63))
"""A best below that of any score."""


@triton.jit
def _order_key(score, token):
    """int64, ordered as scores and, of equal scores, from the largest id to the smallest. score: not NaN."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # -0 as +0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (token ^ NO_TOKEN).to(tl.int64)


@triton.jit
def _score_of(key):
    order = (key >> 32).to(tl.int32)
    score = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(key == NOTHING, float("-inf"), score)


@triton.jit
def _token_of(key):
    return (key & 0x7FFFFFFF).to(tl.int32) ^ NO_TOKEN


@triton.jit
def _largest(scores):
    """Of each row, NaN not among them; -inf where there is nothing else. scores: [ROWS, COLUMNS]."""
    top = tl.max(scores, axis=1)
    return tl.where(top == top, tl.minimum(top, FLOAT32_MAX), float("-inf"))


@triton.jit
def _first_with(scores, score, first_id):
    """Of each row the smallest id whose score is not below `score`."""
    ids = first_id + tl.arange(0, scores.shape[1])
    return tl.min(tl.where(scores >= score[:, None], ids[None, :], NO_TOKEN), axis=1)


@triton.jit
def _improve(logits, first_id, score, token, heat, first_key, second_key, WIDTH: tl.constexpr):
    """The best with noise of a tile and of `score`, `token`, in parts of WIDTH ids. logits: [ROWS, COLUMNS]; the rest:
    [ROWS].

    Of each row the id that can reach most is looked at, and then the next, while it can reach the best so far: the
    bound is a close one for winners, so there are few to look at, and none in most parts of all tiles but the first.
    """
    if logits.shape[1] > WIDTH:
        HALF: tl.constexpr = logits.shape[1] // 2
        left, right = tl.split(tl.permute(tl.reshape(logits, (logits.shape[0], 2, HALF)), (0, 2, 1)))
        score, token = _improve(left, first_id, score, token, heat, first_key, second_key, WIDTH)
        score, token = _improve(right, first_id + HALF, score, token, heat, first_key, second_key, WIDTH)
    else:
        ids = first_id + tl.arange(0, logits.shape[1])
        h = noise_bits(ids[None, :], first_key[:, None], second_key[:, None])
        reach = logits + heat[:, None] * noise_bound(h)
        most = _largest(reach)
        while tl.max((most >= bar_of(score)).to(tl.int32), axis=0) > 0:
            other = _first_with(reach, most, first_id)
            is_other = ids[None, :] == other[:, None]
            logit = _largest(tl.where(is_other, logits, float("-inf")))
            other_score = logit + heat * gumbel(uniform(noise_bits(other, first_key, second_key)))
            # An equal score counts too: `score` may be another program's, of a larger id.
            better = (other_score > score) | ((other_score == score) & (other < token))
            token = tl.where(better, other, token)
            score = tl.where(better, other_score, score)
            # A greedy row's first is its best.
            reach = tl.where(is_other | (heat == 0.0)[:, None], float("-inf"), reach)
            most = _largest(reach)
    return score, token


@triton.jit(do_not_specialize=["num_rows"])
def head_argmax_kernel(
    x,  # descriptor of [S, K] in blocks of [TOKENS, BLOCK_K]
    weight,  # descriptor of [V, K] in blocks of [IDS, BLOCK_K]
    counts,
    sample_row,
    row_slot,
    row_start,
    row_len,
    temperature,
    seed,
    best,  # [S] int64: NOTHING, before and after
    arrived,  # [token tiles] int32: zero, before and after
    out,  # [S] int32
    num_rows,  # S
    V: tl.constexpr,  # at least IDS
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    IDS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NOISE: tl.constexpr,
    NOISE_IDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """NOISE: scores are those of a row's temperature and seed, else the logits. A row without any finite logit, or
    beyond the step's samples, gets id 0.

    The grid is a multiple of the token tiles. Neighbours share their tiles of the vocabulary, so that memory is asked
    for them once.
    """
    TILES: tl.constexpr = (V + IDS - 1) // IDS
    token_tiles = tl.cdiv(num_rows, TOKENS)
    programs = tl.num_programs(0) // token_tiles
    token_tile = tl.program_id(0) % token_tiles
    token_start = token_tile * TOKENS
    row = token_start + tl.arange(0, TOKENS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    samples = tl.minimum(tl.load(counts + 3), num_rows)
    is_sample = row < samples
    if NOISE:
        step_row = tl.load(sample_row + row, mask=is_sample, other=0)
        slot = tl.load(row_slot + step_row, mask=is_sample, other=0)
        position = tl.load(row_start + step_row, mask=is_sample, other=0)
        position += tl.load(row_len + step_row, mask=is_sample, other=0)
        heat, _, row_seed = noise_of_row(slot, temperature, seed)
        first_key, second_key = noise_keys(row_seed, position)
    top = tl.full([TOKENS], float("-inf"), tl.float32)
    tiles = tl.where(token_start < samples, TILES, 0)
    for tile in tl.range(tl.program_id(0) // token_tiles, tiles, programs, flatten=True):
        # The last tile begins early enough to be whole: the best of ids is the same if some are looked at twice.
        first_id = tl.minimum(tile * IDS, V - IDS)
        sums = tl.zeros((TOKENS, IDS), dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K):
            sums = tl.dot(x.load([token_start, k]), weight.load([first_id, k]).T, sums, input_precision="ieee")
        if NOISE:
            others = tl.load(best + row, mask=is_sample, other=NOTHING, cache_modifier=".cg")
            score = tl.maximum(top, _score_of(others))
            token = tl.full([TOKENS], NO_TOKEN, tl.int32)
            score, token = _improve(sums, first_id, score, token, heat, first_key, second_key, NOISE_IDS)
            better = (token != NO_TOKEN) & (score > float("-inf"))
        else:
            score = _largest(sums)
            token = _first_with(sums, score, first_id)
            better = score > top
        tl.atomic_max(best + row, _order_key(score, token), mask=better & is_sample, sem="relaxed")
        top = tl.maximum(top, score)

    if arrives_last(arrived + token_tile, programs):
        is_row = row < num_rows
        key = tl.load(best + row, mask=is_row, other=NOTHING, cache_modifier=".cg")
        tl.store(best + row, tl.full([TOKENS], NOTHING, tl.int64), mask=is_row)
        tl.store(out + row, tl.where(key == NOTHING, 0, _token_of(key)), mask=is_row)
