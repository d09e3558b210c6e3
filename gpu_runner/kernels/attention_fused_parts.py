"""The parts of `attention_fused`, which see: tiles of keys and values in registers, and the softmax over one.

Operands of the tensor cores' products (`mma.m16n8k16`, warps have keys of their own) are where they must be when they
arrive. A lane has 16 bytes of each load, and of an operand pairs along the summed axis:

    queries x keys      summed over dimensions: lane % 4 has a run of dimensions, lane / 4 a key
    shares x values     summed over keys: lane % 4 has two keys of eight, lane / 4 a run of dimensions

So products have dimensions in an order other than memory's. Axes of what is loaded stand in the order by which the
compiler shares them out: the last is of one lane, or of the fastest ones, then the first of lanes, the second, and so
on to warps; the rest is in registers. Any other layout would be as right, but go through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_runner.kernels.attention_parts import nearest_own


@triton.jit
def pages_of(table, tile, seen_from, old_end, PAGE: tl.constexpr, WARPS: tl.constexpr, WARP_KEYS: tl.constexpr):
    """[WARPS, WARP_KEYS / PAGE] pages of a tile."""
    warp_start = tl.arange(0, WARPS) * WARP_KEYS
    position = tile + warp_start[:, None] + tl.arange(0, WARP_KEYS // PAGE)[None, :] * PAGE
    return tl.load(table + nearest_own(position, seen_from, tl.maximum(old_end, 1)) // PAGE)


@triton.jit
def load_keys(
    start, tile, page, seen_from, old_end,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, WARP_KEYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A tile's keys, [8, warps, PAGE / 8, pages, chunks, CHUNK]: one of eight keys for a lane, and a fourth of each
    chunk of dimensions."""
    warps: tl.constexpr = page.shape[0]
    pages: tl.constexpr = page.shape[1]
    lane_key = tl.arange(0, 8)[:, None, None] + (tl.arange(0, PAGE // 8) * 8)[None, None, :]
    in_page = (lane_key + (tl.arange(0, warps) * WARP_KEYS)[None, :, None])[:, :, :, None]
    position = tile + (tl.arange(0, pages) * PAGE)[None, None, None, :] + in_page
    place = nearest_own(position, seen_from, tl.maximum(old_end, 1)) & (PAGE - 1)
    line = (page.to(tl.int64) * (KV_HEADS * PAGE * HEAD_DIM))[None, :, None, :] + place * HEAD_DIM
    dim = (tl.arange(0, HEAD_DIM // CHUNK) * CHUNK)[:, None] + tl.arange(0, CHUNK)[None, :]
    return tl.load(start + line[:, :, :, :, None, None] + dim[None, None, None, None, :, :])


@triton.jit
def load_values(
    start, tile, page, seen_from, old_end,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, WARP_KEYS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """A tile's values, [4, 8, warps, 2, PAGE / 8, pages, far, RUN]: two of eight keys for a lane, and a RUN."""
    warps: tl.constexpr = page.shape[0]
    pages: tl.constexpr = page.shape[1]
    pair = (tl.arange(0, 4) * 2)[:, None, None, None] + tl.arange(0, 2)[None, None, :, None]
    in_page = pair + (tl.arange(0, PAGE // 8) * 8)[None, None, None, :]
    in_page = (in_page + (tl.arange(0, warps) * WARP_KEYS)[None, :, None, None])[:, :, :, :, None]
    position = tile + (tl.arange(0, pages) * PAGE)[None, None, None, None, :] + in_page
    place = nearest_own(position, seen_from, tl.maximum(old_end, 1)) & (PAGE - 1)
    line = (page.to(tl.int64) * (KV_HEADS * PAGE * HEAD_DIM))[None, :, None, None, :] + place * HEAD_DIM
    dim = (tl.arange(0, 8) * RUN)[:, None, None] + (tl.arange(0, HEAD_DIM // (8 * RUN)) * (8 * RUN))[None, :, None]
    dim = (dim + tl.arange(0, RUN)[None, None, :])[None, :, None, None, None, None, :, :]
    return tl.load(start + line[:, None, :, :, :, :, None, None] + dim)


@triton.jit
def query_operand(query, CHUNK: tl.constexpr):
    """[16, HEAD_DIM] of [8, HEAD_DIM]: twice, and with its dimensions in the order of keys' pairs in registers."""
    width: tl.constexpr = query.shape[1]
    query = tl.reshape(query, (8, width // CHUNK, 4, CHUNK // 8, 2))
    query = tl.reshape(tl.permute(query, (0, 1, 3, 2, 4)), (8, width))
    return tl.reshape(tl.broadcast_to(query[None, :, :], (2, 8, width)), (16, width))


@triton.jit
def attend_tile(query, key, value, tile, seen_from, old_end, scale_log2, largest, weight, total):
    """The softmax of each warp, largest and weight [warps, 8, 1] and total [warps, 8, HEAD_DIM], with one more tile.

    query: of `query_operand`. key, value: as loaded. Dimensions of `total` are in the order (far, RUN, 8) of values.
    """
    warps: tl.constexpr = key.shape[1]
    warp_keys: tl.constexpr = 8 * key.shape[2] * key.shape[3]
    width: tl.constexpr = query.shape[1]
    key = tl.reshape(key, (8, warps, key.shape[2], key.shape[3], key.shape[4], 4, key.shape[5] // 8, 2))
    key = tl.reshape(tl.permute(key, (4, 6, 5, 7, 3, 2, 1, 0)), (width, warps * warp_keys))
    score = tl.dot(query, key, input_precision="ieee")
    score = tl.permute(tl.reshape(score, (2, 8, warp_keys // 8, warps, 8)), (3, 1, 2, 4, 0))
    score, _ = tl.split(score)
    position = tile + tl.arange(0, warps)[:, None, None] * warp_keys + tl.arange(0, warp_keys)[None, None, :]
    seen = (position >= seen_from) & (position < old_end)
    score = tl.where(seen, tl.reshape(score, (warps, 8, warp_keys)) * scale_log2, float("-inf"))
    top = tl.maximum(largest, tl.max(score, axis=2, keep_dims=True))
    share = tl.exp2(score - top)
    shrink = tl.exp2(largest - top)
    weight = weight * shrink + tl.sum(share, axis=2, keep_dims=True)

    value = tl.reshape(tl.permute(value, (2, 5, 4, 0, 3, 6, 7, 1)), (warps, warp_keys, width))
    share = tl.broadcast_to(share.to(value.dtype)[:, None, :, :], (warps, 2, 8, warp_keys))
    total = total * shrink
    both = tl.reshape(tl.permute(tl.join(total, tl.zeros_like(total)), (0, 3, 1, 2)), (warps, 16, width))
    both = tl.dot(tl.reshape(share, (warps, 16, warp_keys)), value, both, input_precision="ieee")
    total, _ = tl.split(tl.permute(tl.reshape(both, (warps, 2, 8, width)), (0, 2, 3, 1)))
    return top, weight, total


@triton.jit
def both_weights(largest, weight, other_largest, other_weight):
    top = tl.maximum(largest, other_largest)
    return top, weight * tl.exp2(largest - top) + other_weight * tl.exp2(other_largest - top)
