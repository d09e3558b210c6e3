"""The list of an attention step's work, on the GPU or under the interpreter."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from gpu_runner.kernels.decode_way import DecodeWay, choose_decode
from gpu_runner.kernels.work_list import (
    FEW_ROWS,
    LARGE_CUT,
    MAX_SPLITS,
    RangeCut,
    WorkList,
    allocate_work_list,
    build_work_list,
)
from gpu_runner.kernels.work_list_kernel import RANKS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGES_PER_SEQ = 600
SPLIT_STEP = 64


def build(
    decode_lens: list[int],
    chunks: list[tuple[int, int]],
    *,
    max_rows: int,
    target_programs: int = 16,
    cut: RangeCut | None = None,
    window: int | None = None,
    tile_rows: int = 16,
    kv_heads: int = 2,
) -> WorkList:
    """For KV heads of 2 query heads each: `target_programs` / `kv_heads` items unless `cut` says more, `tile_rows` / 2
    tokens a tile."""
    lengths = [1] * len(decode_lens) + [length for _, length in chunks]
    num_rows, num_tokens = len(lengths), sum(lengths)
    work = allocate_work_list(
        max_rows=max_rows, max_tokens=max(max_rows, num_tokens), num_heads=2 * kv_heads, num_kv_heads=kv_heads,
        head_dim=16, window=window, device=DEVICE, tile_rows=tile_rows,
        cut=cut or RangeCut(target_programs, SPLIT_STEP),
    )  # fmt: skip
    work.items.fill_(-7)
    work.tiles.fill_(-7)
    work.lengths.fill_(-7)

    def column(rows: list[int]) -> Tensor:
        return torch.tensor(rows + [-7] * (max_rows - num_rows), dtype=torch.int32, device=DEVICE)

    build_work_list(
        work,
        counts=torch.tensor([len(decode_lens), num_rows, num_tokens, 0], dtype=torch.int32, device=DEVICE),
        row_slot=column([100 + row for row in range(num_rows)]),
        row_start=column([length - 1 for length in decode_lens] + [start for start, _ in chunks]),
        row_len=column(lengths),
        row_token=column([sum(lengths[:row]) for row in range(num_rows)]),
        page_table=torch.zeros((1, PAGES_PER_SEQ), dtype=torch.int32, device=DEVICE),
        prefill=True,
    )
    return work


def items_of(work: WorkList) -> list[list[int]]:
    count = int(work.lengths[0])
    assert bool((work.items[count:] == -7).all())
    return work.items[:count].tolist()


def tiles_of(work: WorkList) -> list[list[int]]:
    count = int(work.lengths[1])
    assert bool((work.tiles[count:] == -7).all())
    return work.tiles[:count].tolist()


def test_a_long_row_is_cut_into_equal_ranges_and_short_ones_are_left_whole() -> None:
    # 1100 keys in 8 items: 138, rounded up to 192; 1000 keys in 6 ranges are 167 each, again 192.
    items = items_of(build([1000, 90, 10], [], max_rows=3))
    assert items == [
        *[[0, 100, 192 * split, min(1000, 192 * (split + 1)), 0, split, 6, 0] for split in range(6)],
        [1, 101, 0, 90, 6, 0, 1, 0],
        [2, 102, 0, 10, 6, 0, 1, 0],
    ]


def test_longer_ranges_are_listed_first_and_equal_ones_by_row() -> None:
    # At most 128 keys each: ranks of 97 to 128, 65 to 96, 33 to 64, and fewer.
    items = items_of(build([10, 128, 70, 64, 300, 97, 1, 256], [], max_rows=8, target_programs=16))
    assert [(item[0], item[2], item[3], item[4]) for item in items] == [
        *[(1, 0, 128, 0), (4, 0, 128, 0), (4, 128, 256, 0), (4, 256, 300, 0), (5, 0, 97, 3)],
        *[(7, 0, 128, 3), (7, 128, 256, 3), (2, 0, 70, 0), (3, 0, 64, 0), (0, 0, 10, 0), (6, 0, 1, 3)],
    ]


def test_tiles_are_listed_by_falling_number_of_keys() -> None:
    tiles = tiles_of(build([7, 3], [(0, 17), (100, 9), (20, 3)], max_rows=5))
    assert tiles == [
        [103, 27, 108, 1],
        [103, 19, 100, 8],
        [104, 28, 20, 3],
        [102, 18, 16, 1],
        [102, 10, 8, 8],
        [102, 2, 0, 8],
    ]


def test_a_window_leaves_the_ranges_that_it_touches() -> None:
    items = items_of(build([1000, 90, 300], [], max_rows=3, window=100))
    assert items == [
        [0, 100, 896, 960, 0, 0, 2, 900],
        [0, 100, 960, 1000, 0, 1, 2, 900],
        [1, 101, 0, 64, 2, 0, 2, 0],
        [1, 101, 64, 90, 2, 1, 2, 0],
        [2, 102, 192, 256, 4, 0, 2, 200],
        [2, 102, 256, 300, 4, 1, 2, 200],
    ]


def test_a_row_behind_its_last_page_sees_what_its_pages_hold() -> None:
    assert items_of(build([16 * PAGES_PER_SEQ + 1], [], max_rows=1, target_programs=128)) == [
        [0, 100, split * 320, min((split + 1) * 320, 16 * PAGES_PER_SEQ), 0, split, 30, 0] for split in range(30)
    ]


@pytest.mark.parametrize("kv_heads", [1, 3, 8, 2048])
def test_the_buffers_of_the_largest_cut_hold_every_other(kv_heads: int) -> None:
    largest = allocate_work_list(
        max_rows=600, max_tokens=600, num_heads=kv_heads, num_kv_heads=kv_heads, head_dim=1, window=None,
        device=torch.device("meta"),
    )  # fmt: skip
    for tokens in range(1, 601):
        for prefill, fuses, long in product((False, True), repeat=3):
            cut = choose_decode(tokens, prefill=prefill, fuses=fuses, long=long).cut
            work = largest.recut(cut)
            assert cut.programs <= LARGE_CUT.programs
            assert work.items is largest.items
            assert work.decode_items(tokens) <= len(work.items)
            assert 2 * work.target_items <= len(work.partial_out) == len(work.arrived)
            assert work.cut == cut
            assert tokens <= FEW_ROWS or not cut.at_once


def cdiv(number: int, by: int) -> int:
    return -(-number // by)


AT_ONCE = RangeCut(264, split_step=512, at_once=33, start_keys=200)


@pytest.mark.parametrize(
    ("rows", "ranges"),
    # 2 heads x 6 rows x 5 ranges are two rounds of 33 programs, of 832 keys and a start each; 3 ranges are two, too, of
    # 1344 keys, and 2 are one of 2048.
    [(6, 5), (8, 2), (9, 3), (12, 4), (16, 1)],
)
def test_rows_of_one_length_are_cut_so_that_the_last_round_of_programs_ends_soonest(rows: int, ranges: int) -> None:
    items = items_of(build([4000] * rows, [], max_rows=40, cut=AT_ONCE))
    assert [item[5:7] for item in items] == [[split, ranges] for split in range(ranges)] * rows


@pytest.mark.parametrize("seed", range(12))
def test_ragged_rows_are_cut_so_that_the_last_round_of_programs_ends_soonest(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = int(torch.randint(1, FEW_ROWS + 1, (1,), generator=generator))
    lens = torch.randint(1, 9000, (rows,), generator=generator).tolist()

    def cut(size: int) -> tuple[int, int]:
        """Ranges, and the longest."""
        even = [64 * cdiv(cdiv(length, cdiv(length, size)), 64) for length in lens]
        return sum(map(cdiv, lens, even)), max(even)

    least = max(cdiv(sum(lens), 264 // 2), 512)
    sizes = {64 * cdiv(max(cdiv(max(lens), splits), least), 64) for splits in range(1, MAX_SPLITS + 1)}
    ends = {size: cdiv(2 * cut(size)[0], 33) * (cut(size)[1] + 200) for size in sizes}
    best = max(size for size in sizes if ends[size] == min(ends.values()))
    work = build(lens, [], max_rows=FEW_ROWS, cut=AT_ONCE)
    items = items_of(work)
    assert len(items) == cut(best)[0] <= work.decode_items(rows)
    assert max(item[3] - item[2] for item in items) <= cut(best)[1]
    assert sorted(item[0] for item in items if item[5] == 0) == list(range(rows))


def test_rows_whose_best_size_is_none_of_the_ranges_are_listed() -> None:
    cut = RangeCut(264, split_step=128, at_once=64, start_keys=100)
    # 3 ranges of 267, 4 of 200 and 5 of 160 become 320, 256 and 192 long; 4 in each row are one round, and end first.
    work = build([800, 800], [], max_rows=2, cut=cut, kv_heads=8)
    assert [item[:4] for item in items_of(work)] == [
        [row, 100 + row, first, min(first + 256, 800)] for row in range(2) for first in range(0, 800, 256)
    ]


def served_cuts() -> dict[RangeCut, int]:
    """With the most rows that they are for, of those that are cut with an eye to rounds."""
    sizes = product(range(1, FEW_ROWS + 1), (False, True), (False, True))
    ways = {choose_decode(tokens, prefill=False, fuses=fuses, long=long).cut: tokens for tokens, fuses, long in sizes}
    return {cut: tokens for cut, tokens in ways.items() if cut.at_once}


@pytest.mark.parametrize("kv_heads", [1, 8, 32, 64])
def test_every_key_is_listed_once_however_rows_are_cut(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(kv_heads)

    def random(most: int, size: int = 1) -> list[int]:
        return torch.randint(1, most + 1, (size,), generator=generator).tolist()

    for cut, most_rows in served_cuts().items():
        for longest in (300, 700, 1500, 9000):
            for equal in (False, True, True):
                rows = random(most_rows)[0]
                lens = random(longest) * rows if equal else random(longest, rows)
                work = build(lens, [], max_rows=most_rows, cut=cut, kv_heads=kv_heads)
                items = sorted(items_of(work))
                partial = [item[4] + item[5] for item in items if item[6] > 1]
                assert partial == list(range(len(partial)))
                assert len(partial) <= len(work.partial_out)
                covered = [0] * rows
                for row, _, first, end, *_ in items:
                    assert first == covered[row] < end
                    covered[row] = end
                assert covered == lens


SIZES = (1, 2, 4, 16, 32, 64, 80, 130)


@pytest.mark.parametrize(
    ("fuses", "at_once", "warps"),
    [(True, [1, 1, 1, 1, 2, 4, 0, 0], [8, 8, 8, 8, 4, None, None, None]), (False, [4] * 5 + [0] * 3, [None] * 8)],
)
def test_few_rows_attend_in_rounds(fuses: bool, at_once: list[int], warps: list[int | None]) -> None:
    ways = [choose_decode(tokens, prefill=False, fuses=fuses) for tokens in SIZES]
    assert [way.cut.at_once // 132 for way in ways] == at_once
    assert [way.fused_warps for way in ways] == warps
    assert choose_decode(1, prefill=True, fuses=fuses) == DecodeWay(LARGE_CUT)


def test_some_rows_with_long_contexts_take_the_kernels_of_many() -> None:
    fused, apart = ([choose_decode(tokens, prefill=False, fuses=fuses) for tokens in SIZES] for fuses in (True, False))
    long = [choose_decode(tokens, prefill=False, fuses=True, long=True) for tokens in SIZES[:5]]
    assert [way.long_bytes for way in fused[:4]] == [3_000_000, 3_000_000, 6_000_000, 40_000_000]
    assert [way.long_bytes for way in fused[4:]] == [65_000_000, None, None, None]
    assert [way.streams for way in fused] == [False] * 5 + [True, False, False]
    assert [(way.fused_warps, way.streams) for way in long] == [(4, False)] * 3 + [(None, True)] * 2
    assert [way.cut for way in long[3:]] == [way.cut for way in apart[3:5]]
    assert not any(way.long_bytes or way.streams for way in apart)


def test_an_empty_step_has_no_work() -> None:
    work = build([], [], max_rows=4)
    assert (items_of(work), tiles_of(work)) == ([], [])


@pytest.mark.parametrize(("max_rows", "longest"), [(1, 1), (1, 9000), (5, 80), (5, 9000), (40, 200), (300, 1000)])
def test_ragged_steps_keep_the_stated_bounds_and_cover_every_key_and_query_once(max_rows: int, longest: int) -> None:
    generator = torch.Generator().manual_seed(max_rows + longest)
    rows = torch.randint(1, longest + 1, (max_rows, 2), generator=generator).tolist()
    num_decode_rows = max_rows - max_rows // 3
    decode_lens = [length for length, _ in rows[:num_decode_rows]]
    chunks = [(start, min(length, 300)) for start, length in rows[num_decode_rows:]]
    work = build(decode_lens, chunks, max_rows=max_rows)

    items = items_of(work)
    assert len(items) <= work.decode_items(num_decode_rows)
    size = SPLIT_STEP * -(-max(sum(decode_lens) / work.target_items, max(decode_lens) / MAX_SPLITS) // SPLIT_STEP)
    lengths = [max(other[3] - other[2] for other in items if other[0] == item[0]) for item in items]
    assert all(later < earlier + max(size, SPLIT_STEP) / RANKS for earlier, later in pairwise(lengths))
    covered = dict.fromkeys(range(num_decode_rows), 0)
    partial = 0
    for row, slot, first, end, first_partial, split, splits, seen_from in sorted(items):
        assert (slot, first, seen_from) == (100 + row, covered[row], 0)
        assert first < end
        assert first % SPLIT_STEP == 0
        assert splits <= MAX_SPLITS
        covered[row] = end
        assert first_partial == partial
        if split == splits - 1:
            partial += splits if splits > 1 else 0
    assert list(covered.values()) == decode_lens
    assert partial <= len(work.partial_out)

    tiles = tiles_of(work)
    num_tokens = num_decode_rows + sum(length for _, length in chunks)
    assert len(tiles) <= work.prefill_tiles(num_tokens)
    keys = [position + count for _, _, position, count in tiles]
    assert keys == sorted(keys, reverse=True)
    queries = sorted((slot - 100, token, position, count) for slot, token, position, count in tiles)
    token = num_decode_rows
    for row, (start, length) in enumerate(chunks, num_decode_rows):
        own = [tile for tile in queries if tile[0] == row]
        assert own == [
            (row, token + done, start + done, min(work.tile_tokens, length - done))
            for done in range(0, length, work.tile_tokens)
        ]
        token += length
