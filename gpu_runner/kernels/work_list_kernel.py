"""The kernel behind `work_list`, which see: program 0 lists ranges of decode rows, program 1 tiles of prefill rows.

`step_meta` lists in programs of its own launch, by the functions below.
"""

from __future__ import annotations

import triton
import triton.language as tl

RANKS = 4
"""Of ranges of decode rows, by length: to sort them wholly gains nothing more."""
_RANKS = tl.constexpr(RANKS)


CUT_ARGUMENTS = ("target", "step", "at_once", "start_keys", "kv_heads")
"""Of a list's cut, in every kernel that lists: not specialized, so that one serves all cuts."""


@triton.jit(do_not_specialize=CUT_ARGUMENTS)
def build_kernel(
    counts,
    row_slot,
    row_start,
    row_len,
    row_token,
    items,
    tiles,
    sort_keys,
    lengths,
    kv_capacity,
    target,
    step,
    at_once,
    start_keys,
    kv_heads,
    WINDOW: tl.constexpr,
    ALIGN: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    ITEM_WORDS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    FEW: tl.constexpr,
    SORT: tl.constexpr,
    OTHERS: tl.constexpr,
    LISTS: tl.constexpr,
    ALL_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    list_work(
        tl.program_id(0), tl.load(counts), tl.load(counts + 1), row_slot, row_start, row_len, row_token,
        items, tiles, sort_keys, lengths, kv_capacity, target, step, at_once, start_keys, kv_heads,
        WINDOW, ALIGN, MAX_SPLITS, TILE, ITEM_WORDS, TILE_WORDS, ROWS, FEW, SORT, OTHERS, LISTS, ALL_ROWS,
    )  # fmt: skip


@triton.jit
def list_work(
    part, num_decode_rows, num_rows, row_slot, row_start, row_len, row_token,
    items, tiles, sort_keys, lengths, kv_capacity, target, step, at_once, start_keys, kv_heads,
    WINDOW: tl.constexpr, ALIGN: tl.constexpr, MAX_SPLITS: tl.constexpr, TILE: tl.constexpr,
    ITEM_WORDS: tl.constexpr, TILE_WORDS: tl.constexpr, ROWS: tl.constexpr, FEW: tl.constexpr,
    SORT: tl.constexpr, OTHERS: tl.constexpr, LISTS: tl.constexpr, ALL_ROWS: tl.constexpr,
):  # fmt: skip
    """List number `part` of `LISTS`, by one program."""
    if part == 0:
        if ALL_ROWS == 0:
            _list_decode(
                num_decode_rows, row_slot, row_start, items, lengths, kv_capacity,
                target, step, at_once, start_keys, kv_heads,
                WINDOW, ALIGN, MAX_SPLITS, ITEM_WORDS, ROWS, FEW,
            )  # fmt: skip
    elif LISTS > 1:
        first_row = num_decode_rows
        if ALL_ROWS > 0:
            first_row = num_decode_rows * 0  # of the same type
        num_tiles = _cut_chunks(first_row, num_rows, row_start, row_len, sort_keys, WINDOW, TILE, ROWS)
        tl.debug_barrier()
        _list_tiles(
            num_tiles, row_slot, row_start, row_len, row_token, sort_keys, tiles, kv_capacity,
            TILE, TILE_WORDS, SORT, OTHERS, ALL_ROWS,
        )  # fmt: skip
        tl.store(lengths + 1, num_tiles)


@triton.jit
def _visible(row, exists, row_start, kv_capacity, WINDOW: tl.constexpr, ALIGN: tl.constexpr):
    """First key that a decode row sees, where its ranges begin (a multiple of ALIGN) and the key behind its last."""
    end = tl.minimum(tl.load(row_start + row, mask=exists, other=0) + 1, kv_capacity)
    first = tl.zeros_like(end)
    if WINDOW > 0:
        first = tl.maximum(end - WINDOW, 0)
    begin = first // ALIGN * ALIGN
    return first, tl.where(exists, begin, 0), tl.where(exists, end, 0)


@triton.jit
def _list_decode(
    num_rows, row_slot, row_start, items, lengths, kv_capacity, target, step, at_once, start_keys, kv_heads,
    WINDOW: tl.constexpr, ALIGN: tl.constexpr, MAX_SPLITS: tl.constexpr, ITEM_WORDS: tl.constexpr,
    ROWS: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, ROWS)
    keys = 0
    longest = 0
    for block in range(0, num_rows, ROWS):
        _, begin, end = _visible(block + place, block + place < num_rows, row_start, kv_capacity, WINDOW, ALIGN)
        keys += tl.sum(end - begin)
        longest = tl.maximum(longest, tl.max(end - begin))
    least = tl.maximum(tl.cdiv(keys, target), step)
    if FEW == 0:
        size = tl.cdiv(tl.maximum(least, tl.cdiv(longest, MAX_SPLITS)), step) * step
    else:
        size = _quickest(
            num_rows, row_start, kv_capacity, least, longest, at_once, start_keys, kv_heads,
            WINDOW, ALIGN, MAX_SPLITS, FEW,
        )  # fmt: skip

    rank = tl.arange(0, _RANKS)[None, :]
    counts = tl.zeros((1, _RANKS), tl.int32)
    for block in range(0, num_rows, ROWS):
        _, begin, end = _visible(block + place, block + place < num_rows, row_start, kv_capacity, WINDOW, ALIGN)
        _, splits, rank_of = _cut(begin, end, size, ALIGN)
        counts += tl.sum(tl.where(rank_of[:, None] == rank, splits[:, None], 0), axis=0, keep_dims=True)

    next_item = tl.cumsum(counts, 1) - counts  # of each rank
    num_partial = 0
    for block in range(0, num_rows, ROWS):
        row = block + place
        exists = row < num_rows
        slot = tl.load(row_slot + row, mask=exists, other=0)
        first, begin, end = _visible(row, exists, row_start, kv_capacity, WINDOW, ALIGN)
        even, splits, rank_of = _cut(begin, end, size, ALIGN)
        ranked = tl.where(rank_of[:, None] == rank, splits[:, None], 0)
        item = tl.sum(tl.where(rank_of[:, None] == rank, next_item + tl.cumsum(ranked, 0) - ranked, 0), axis=1)
        partial = tl.where(splits > 1, splits, 0)
        first_partial = num_partial + tl.cumsum(partial) - partial
        for split in range(tl.max(splits)):
            listed = split < splits
            word = items + (item + split) * ITEM_WORDS
            tl.store(word, row, mask=listed)
            tl.store(word + 1, slot, mask=listed)
            tl.store(word + 2, begin + split * even, mask=listed)
            tl.store(word + 3, tl.minimum(begin + (split + 1) * even, end), mask=listed)
            tl.store(word + 4, first_partial, mask=listed)
            tl.store(word + 5, tl.zeros_like(row) + split, mask=listed)
            tl.store(word + 6, splits, mask=listed)
            tl.store(word + 7, first, mask=listed)
        next_item += tl.sum(ranked, axis=0, keep_dims=True)
        num_partial += tl.sum(partial)
    tl.store(lengths, tl.sum(counts))


@triton.jit
def _quickest(
    num_rows, row_start, kv_capacity, least, longest, at_once, start_keys, kv_heads,
    WINDOW: tl.constexpr, ALIGN: tl.constexpr, MAX_SPLITS: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Of the sizes that cut the longest row into 1 to MAX_SPLITS ranges, none below `least`, the largest of those by
    which all programs have ended soonest: in rounds of as many as run at once, each as long as the longest range. They
    are multiples of ALIGN."""
    row = tl.arange(0, FEW)
    _, begin, end = _visible(row, row < num_rows, row_start, kv_capacity, WINDOW, ALIGN)
    size = tl.maximum(tl.cdiv(longest, tl.arange(0, MAX_SPLITS) + 1), least)
    size = tl.cdiv(size, ALIGN) * ALIGN
    even, splits, _ = _cut(begin[:, None], end[:, None], size[None, :], ALIGN)
    rounds = tl.cdiv(tl.sum(splits, axis=0) * kv_heads, at_once)
    time = rounds * (tl.max(even, axis=0) + start_keys)
    return tl.max(tl.where(time == tl.min(time, axis=0), size, 0), axis=0)


@triton.jit
def _cut(begin, end, size, ALIGN: tl.constexpr):
    """Length and number of a row's ranges, and their rank by length, that of the longest 0. size: a multiple of ALIGN,
    so that none is longer."""
    # The same number of ranges, or fewer, of equal size.
    even = tl.maximum(tl.cdiv(end - begin, tl.maximum(tl.cdiv(end - begin, size), 1)), 1)
    even = tl.cdiv(even, ALIGN) * ALIGN
    rank = tl.minimum((size - tl.minimum(even, end - begin)) * _RANKS // size, _RANKS - 1)
    return even, tl.cdiv(end - begin, even), rank


@triton.jit
def _cut_chunks(
    first_row, num_rows, row_start, row_len, sort_keys, WINDOW: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr
):
    """A sort key for each tile: keys it sees (24 bits), row (16), place in the row (24). Returns their number."""
    place = tl.arange(0, ROWS)
    num_tiles = 0
    for block in range(first_row, num_rows, ROWS):
        row = block + place
        exists = row < num_rows
        start = tl.load(row_start + row, mask=exists, other=0)
        length = tl.load(row_len + row, mask=exists, other=0)
        count = tl.cdiv(length, TILE)
        first_tile = num_tiles + tl.cumsum(count) - count
        for tile in range(tl.max(count)):
            seen = start + tl.minimum((tile + 1) * TILE, length)
            if WINDOW > 0:
                seen = tl.minimum(seen, WINDOW + TILE)
            key = (seen.to(tl.int64) << 40) | (row.to(tl.int64) << 24) | tile
            tl.store(sort_keys + first_tile + tile, key, mask=tile < count)
        num_tiles += tl.sum(count)
    return num_tiles


@triton.jit
def _list_tiles(
    num_tiles, row_slot, row_start, row_len, row_token, sort_keys, tiles, kv_capacity,
    TILE: tl.constexpr, TILE_WORDS: tl.constexpr, SORT: tl.constexpr, OTHERS: tl.constexpr, ALL_ROWS: tl.constexpr,
):  # fmt: skip
    """Write each tile to the place that the number of larger keys gives it; keys are distinct."""
    place = tl.arange(0, SORT)
    other_place = tl.arange(0, OTHERS)
    for block in range(0, num_tiles, SORT):
        exists = block + place < num_tiles
        key = tl.load(sort_keys + block + place, mask=exists, other=0)
        rank = tl.zeros((SORT,), tl.int32)
        for other in range(0, num_tiles, OTHERS):
            others = tl.load(sort_keys + other + other_place, mask=other + other_place < num_tiles, other=-1)
            rank += tl.sum((others[None, :] > key[:, None]).to(tl.int32), axis=1)
        row = ((key >> 24) & 0xFFFF).to(tl.int32)
        token = (key & 0xFFFFFF).to(tl.int32) * TILE
        word = tiles + rank * TILE_WORDS
        tl.store(word, tl.load(row_slot + row, mask=exists, other=0), mask=exists)
        tl.store(word + 1, tl.load(row_token + row, mask=exists, other=0) + token, mask=exists)
        tl.store(word + 2, _tile_start(row_start, row, exists, token, kv_capacity, ALL_ROWS), mask=exists)
        left = tl.load(row_len + row, mask=exists, other=0) - token
        tl.store(word + 3, tl.minimum(left, TILE), mask=exists)


@triton.jit
def _tile_start(row_start, row, exists, token, kv_capacity, ALL_ROWS: tl.constexpr):
    """Position of a tile's first query; of a decode row that has ended, one that its pages hold, as in `_visible`."""
    start = tl.load(row_start + row, mask=exists, other=0) + token
    if ALL_ROWS > 0:
        start = tl.minimum(start, kv_capacity - 1)
    return start
