"""Attention kernels on a GPU: errors first, then time a layer for candidate tilings against the floor.

    python scripts/bench_kernels/attention.py [--smoke]

Times are medians over replays of a graph that runs one launch after the other over layers with caches of their own,
more than the L2 cache holds. --smoke: tiny shapes under Triton's interpreter, to see that the script runs.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import numpy as np
import torch
from bench_device import BYTES_PER_US, DEVICE, DTYPE, SMOKE
from graph_timer import median_us
from numpy.typing import ArrayLike
from torch import Tensor

from gpu_runner.kernels import reference
from gpu_runner.kernels.attention_decode import DecodeTiling, decode_attention
from gpu_runner.kernels.attention_prefill import PrefillTiling, prefill_attention
from gpu_runner.kernels.ops import BatchMeta
from gpu_runner.kernels.work_list import (
    LARGE_CUT,
    MULTIPROCESSORS,
    RangeCut,
    WorkList,
    allocate_work_list,
    build_work_list,
)

PAGE = 16
FLOPS_PER_US = 750e6
WORKING_SET_BYTES = 300e6


@dataclass(frozen=True)
class Shape:
    name: str
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def token_bytes(self) -> int:
        return 2 * self.kv_heads * self.head_dim * 2


QWEN = Shape("Qwen3-0.6B", 16, 8, 128)
LLAMA = Shape("Llama-3.1-8B", 32, 8, 128)
SMOLLM = Shape("SmolLM2-135M", 9, 3, 64)


@dataclass(frozen=True)
class Case:
    name: str
    decode_lens: list[int]
    chunks: list[tuple[int, int]]


@dataclass(frozen=True)
class DecodeChoice:
    tiling: DecodeTiling
    programs: int = LARGE_CUT.programs

    @property
    def label(self) -> str:
        tiling = self.tiling
        return (
            f"{tiling.block_tokens}/{tiling.num_warps}/{tiling.num_stages}/{tiling.prefetch_pages}"
            f"/{self.programs // MULTIPROCESSORS}"
        )


@dataclass(frozen=True)
class PrefillChoice:
    tiling: PrefillTiling
    tile_rows: int

    @property
    def label(self) -> str:
        tiling, programs = self.tiling, self.tiling.programs // MULTIPROCESSORS
        return f"{self.tile_rows}x{tiling.block_tokens}/{tiling.num_warps}/{tiling.num_stages}/{programs}"


class Step:
    """Device buffers of one step whose rows own random pages, with caches of enough layers."""

    def __init__(self, shape: Shape, case: Case, *, layers: int | None = None) -> None:
        generator = np.random.default_rng(0)
        starts = [length - 1 for length in case.decode_lens] + [start for start, _ in case.chunks]
        lengths = [1] * len(case.decode_lens) + [length for _, length in case.chunks]
        ends = np.array(starts) + np.array(lengths)
        pages = -(-ends // PAGE)
        order = generator.permutation(int(pages.sum())).astype(np.int32) + 1
        table = np.zeros((len(starts), int(pages.max()) + 1), np.int32)
        for row, first in enumerate(np.cumsum(pages) - pages):
            table[row, : pages[row]] = order[first : first + pages[row]]
        layer_bytes = int(pages.sum()) * PAGE * shape.token_bytes
        self.layers = layers or int(min(max(WORKING_SET_BYTES // layer_bytes, 3), 100))
        self.shape = shape
        self.num_tokens = sum(lengths)
        self.num_decode_rows = len(case.decode_lens)
        self.starts, self.lengths = np.array(starts, np.int32), np.array(lengths, np.int32)

        def ints(values: ArrayLike) -> Tensor:
            return torch.from_numpy(np.array(values, np.int32)).to(DEVICE)

        self.counts = ints([len(case.decode_lens), len(starts), self.num_tokens, 0])
        self.row_slot, self.row_start, self.row_len = ints(list(range(len(starts)))), ints(starts), ints(lengths)
        self.row_token = ints([sum(lengths[:row]) for row in range(len(starts))])
        positions = np.concatenate([np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)])
        pages_of_tokens = table[np.repeat(np.arange(len(starts)), lengths), positions // PAGE]
        self.positions, self.kv_index = ints(positions), ints(pages_of_tokens * PAGE + positions % PAGE)
        self.page_table = torch.from_numpy(table).to(DEVICE)
        size = (self.layers, 2, len(order) + 1, shape.kv_heads, PAGE, shape.head_dim)
        self.kv = torch.empty(size, dtype=DTYPE, device=DEVICE).normal_()
        self.q = torch.randn((self.num_tokens, shape.heads, shape.head_dim), device=DEVICE).to(DTYPE)
        self.out = torch.full_like(self.q, torch.nan)
        self.scale = shape.head_dim**-0.5

    def work(self, cut: RangeCut = LARGE_CUT, *, tile_rows: int = 128) -> WorkList:
        return allocate_work_list(
            max_rows=len(self.starts),
            max_tokens=self.num_tokens,
            num_heads=self.shape.heads,
            num_kv_heads=self.shape.kv_heads,
            head_dim=self.shape.head_dim,
            window=None,
            device=DEVICE,
            cut=cut,
            tile_rows=tile_rows,
        )

    def build(self, work: WorkList) -> None:
        build_work_list(
            work,
            counts=self.counts,
            row_slot=self.row_slot,
            row_start=self.row_start,
            row_len=self.row_len,
            row_token=self.row_token,
            page_table=self.page_table,
            prefill=True,
        )

    def decode(self, work: WorkList, layer: int, choice: DecodeChoice) -> None:
        decode_attention(
            self.q,
            self.kv[layer],
            self.out,
            work,
            counts=self.counts,
            page_table=self.page_table,
            scale=self.scale,
            tiling=choice.tiling,
        )

    def prefill(self, work: WorkList, layer: int, choice: PrefillChoice) -> None:
        prefill_attention(
            self.q,
            self.kv[layer],
            self.out,
            work,
            page_table=self.page_table,
            scale=self.scale,
            tiling=choice.tiling,
        )

    def exact(self) -> Tensor:
        return reference.paged_attention(
            self.q.float(),
            self.kv[0].float(),
            BatchMeta(
                num_decode_rows=self.num_decode_rows,
                row_start=self.starts,
                row_len=self.lengths,
                row_slot=self.row_slot.long(),
                positions=self.positions.long(),
                kv_index=self.kv_index.long(),
                page_table=self.page_table,
            ),
            scale=self.scale,
        )


def error(step: Step, decode: DecodeChoice, prefill: PrefillChoice) -> float:
    """Relative error of layer 0, all tokens; NaN if one was not written."""
    work = step.work(replace(LARGE_CUT, programs=decode.programs), tile_rows=prefill.tile_rows)
    step.build(work)
    step.out.fill_(torch.nan)
    step.decode(work, 0, decode)
    step.prefill(work, 0, prefill)
    exact = step.exact()
    return float((step.out.float() - exact).norm() / exact.norm())


def time_decode(step: Step, choice: DecodeChoice) -> float:
    work = step.work(replace(LARGE_CUT, programs=choice.programs))
    step.build(work)
    return median_us(lambda index: step.decode(work, index % step.layers, choice), max(step.layers, 20))


def time_prefill(step: Step, choice: PrefillChoice) -> float:
    work = step.work(tile_rows=choice.tile_rows)
    step.build(work)
    return median_us(lambda index: step.prefill(work, index % step.layers, choice), max(step.layers, 10))


def time_build(step: Step) -> float:
    work = step.work()
    return median_us(lambda _: step.build(work), 20)


def decode_table(shape: Shape, cases: list[Case], choices: list[DecodeChoice]) -> None:
    print(f"\ndecode, {shape.name}: us a layer; tile keys/warps/stages/prefetched pages/target programs an SM")
    print(
        f"{'rows x context':>16} {'floor':>7} " + " ".join(f"{choice.label:>14}" for choice in choices) + "  best TB/s"
    )
    for case in cases:
        step = Step(shape, case)
        moved = sum(case.decode_lens) * shape.token_bytes + 2 * step.q.nbytes
        times = [time_decode(step, choice) for choice in choices]
        rate = moved / max(min(times), 1e-9) / 1e6
        print(
            f"{case.name:>16} {moved / BYTES_PER_US:7.2f} " + " ".join(f"{us:14.2f}" for us in times) + f" {rate:10.2f}"
        )


def prefill_table(shape: Shape, cases: list[Case], choices: list[PrefillChoice]) -> None:
    print(f"\nprefill, {shape.name}: us a layer; query rows x keys/warps/stages/programs an SM")
    print(
        f"{'chunks @ start':>16} {'floor':>7} "
        + " ".join(f"{choice.label:>14}" for choice in choices)
        + "  best TFLOP/s"
    )
    for case in cases:
        step = Step(shape, case)
        pairs = sum(length * start + length * (length + 1) / 2 for start, length in case.chunks)
        flops = 4 * pairs * shape.heads * shape.head_dim
        times = [time_prefill(step, choice) for choice in choices]
        rate = flops / max(min(times), 1e-9) / 1e6
        print(
            f"{case.name:>16} {flops / FLOPS_PER_US:7.1f} " + " ".join(f"{us:14.1f}" for us in times) + f" {rate:10.0f}"
        )


def decode_case(rows: int, context: int) -> Case:
    return Case(f"{rows} x {context}", [context] * rows, [])


def ragged_case(rows: int, mean: int) -> Case:
    lens = np.random.default_rng(1).exponential(mean, rows).astype(int) + 1
    return Case(f"{rows} x ~{mean}", [*lens.tolist()[:-1], 8192], [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.parse_args()

    base = DecodeChoice(DecodeTiling(32, 1, 3, 4))
    tilings = [
        *(DecodeTiling(32, 1, 3, pages) for pages in (0, 4, 16)),
        DecodeTiling(32, 1, 4, 4),
        DecodeTiling(32, 2, 3, 4),
        DecodeTiling(32, 2, 4, 4),
        DecodeTiling(64, 2, 3, 4),
        DecodeTiling(64, 4, 3, 4),
        DecodeTiling(128, 4, 2, 8),
    ]
    decode_choices = [DecodeChoice(tiling) for tiling in tilings]
    targets = [replace(base, programs=count * MULTIPROCESSORS) for count in (2, 4, 6, 8, 16)]
    prefill_base = PrefillChoice(PrefillTiling(64, 8, 3, MULTIPROCESSORS), 128)
    prefill_choices = [
        prefill_base,
        PrefillChoice(PrefillTiling(64, 8, 2, 2 * MULTIPROCESSORS, 128), 128),
        PrefillChoice(PrefillTiling(64, 8, 2, MULTIPROCESSORS), 128),
        PrefillChoice(PrefillTiling(128, 8, 2, MULTIPROCESSORS), 128),
        PrefillChoice(PrefillTiling(64, 4, 3, 2 * MULTIPROCESSORS), 64),
        PrefillChoice(PrefillTiling(64, 4, 2, 2 * MULTIPROCESSORS), 64),
        PrefillChoice(PrefillTiling(128, 4, 2, MULTIPROCESSORS), 64),
    ]

    if SMOKE:
        shape = replace(SMOLLM, heads=3, kv_heads=1)
        case = Case("smoke", [40, 7, 300], [(20, 30), (0, 5)])
        print(f"error {error(Step(shape, case, layers=1), base, prefill_base):.1e}")
        decode_table(shape, [replace(case, chunks=[])], [*decode_choices[:2], *targets[:2]])
        prefill_table(shape, [replace(case, decode_lens=[])], prefill_choices[:2])
        return

    for shape in (QWEN, LLAMA, SMOLLM):
        lens = np.random.default_rng(2).integers(1, 3000, 33).tolist()
        case = Case("ragged", lens, [(700, 333), (0, 1), (0, 517), (16, 64)])
        step = Step(shape, case, layers=1)
        errors = [error(step, choice, prefill_base) for choice in (base, replace(base, programs=MULTIPROCESSORS))]
        print(f"{shape.name}: relative error " + ", ".join(f"{value:.1e}" for value in errors))

    grid = [(1, 256), (1, 1024), (1, 8192), (8, 256), (64, 256), (256, 256), (512, 256), (256, 1000)]
    cases = [*(decode_case(rows, context) for rows, context in grid), ragged_case(128, 300)]
    decode_table(QWEN, cases, decode_choices)
    decode_table(QWEN, [*cases[:6], cases[-1]], targets)
    decode_table(LLAMA, cases[:7:2], [decode_choices[index] for index in (1, 4, 5)])
    decode_table(SMOLLM, cases[:7:2], [decode_choices[index] for index in (1, 4)])

    chunks = [
        Case("2048", [], [(0, 2048)]),
        Case("8 x 256", [], [(0, 256)] * 8),
        Case("2048 @ 6000", [], [(6000, 2048)]),
        Case("20 x ~100", [], [(0, 60 + 4 * row) for row in range(20)]),
    ]
    prefill_table(QWEN, chunks, prefill_choices)
    prefill_table(LLAMA, chunks, prefill_choices[:3])

    mixed = Step(QWEN, Case("mixed", [256] * 256, [(0, 256)] * 7), layers=1)
    lone = Step(QWEN, decode_case(1, 256), layers=1)
    for name, step in (("1 row", lone), ("263 rows", mixed)):
        print(f"work list, {name}: {time_build(step):.2f} us")


if __name__ == "__main__":
    main()
