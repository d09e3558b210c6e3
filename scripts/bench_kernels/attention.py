"""Attention kernels on a GPU: errors first, then time a layer for candidate tilings against the floor.

    python scripts/bench_kernels/attention.py [--smoke]

Times are medians over replays of a graph that runs over layers with caches of their own, more than the L2 cache holds.
Decode: as in a model, the kernel that rotates and stores runs before each launch, and its own time, "rope", is taken
off. --smoke: tiny shapes under Triton's interpreter, to see that the script runs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    from support.triton_interpreter import use_interpreter

    use_interpreter()

from triton.compiler.errors import CompilationError  # noqa: E402 - after the interpreter was chosen
from triton.runtime.errors import TritonError  # noqa: E402

from gpu_runner.kernels import reference  # noqa: E402
from gpu_runner.kernels.attention_decode import DecodeTiling, decode_attention  # noqa: E402
from gpu_runner.kernels.attention_prefill import PrefillTiling, prefill_attention  # noqa: E402
from gpu_runner.kernels.norm_rope import qk_norm_rope_write  # noqa: E402
from gpu_runner.kernels.ops import BatchMeta  # noqa: E402
from gpu_runner.kernels.work_list import (  # noqa: E402
    TARGET_PROGRAMS,
    WAVE_PROGRAMS,
    WHOLE_KEYS,
    WorkList,
    allocate_work_list,
    build_work_list,
)

PAGE = 16
MULTIPROCESSORS = 132
BYTES_PER_US = 4.5e6
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
    """tiling: None = what the kernel chooses. target, wave: programs a multiprocessor that steps of many and of few
    rows are cut into. whole: keys of few rows that are not cut."""

    tiling: DecodeTiling | None = None
    target: int = TARGET_PROGRAMS // MULTIPROCESSORS
    wave: int = WAVE_PROGRAMS // MULTIPROCESSORS
    whole: int = WHOLE_KEYS
    pdl: bool = True

    @property
    def label(self) -> str:
        tiling = self.tiling
        label = "chosen"
        if tiling is not None:
            label = f"{tiling.first_tokens}/{tiling.block_tokens}/{tiling.num_warps}/{tiling.num_stages}"
        default = DecodeChoice()
        label += f" t{self.target}" if self.target != default.target else ""
        label += f" v{self.wave}" if self.wave != default.wave else ""
        label += f" w{self.whole}" if self.whole != default.whole else ""
        return label if self.pdl else label + " noPDL"


@dataclass(frozen=True)
class PrefillChoice:
    tiling: PrefillTiling
    tile_rows: int

    @property
    def label(self) -> str:
        tiling = self.tiling
        return f"{self.tile_rows}x{tiling.block_tokens}/{tiling.num_warps}/{tiling.num_stages}/{tiling.programs // 132}"


class Step:
    """Device buffers of one step whose rows own random pages, with caches of enough layers."""

    def __init__(self, shape: Shape, case: Case, *, dtype: torch.dtype, device: str, layers: int | None = None) -> None:
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

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.counts = ints([len(case.decode_lens), len(starts), self.num_tokens, 0])
        self.row_slot, self.row_start, self.row_len = ints(list(range(len(starts)))), ints(starts), ints(lengths)
        self.row_token = ints([sum(lengths[:row]) for row in range(len(starts))])
        self.page_table = torch.from_numpy(table).to(device)
        size = (self.layers, 2, len(order) + 1, shape.kv_heads, PAGE, shape.head_dim)
        self.kv = torch.empty(size, dtype=dtype, device=device).normal_()
        self.q = torch.randn((self.num_tokens, shape.heads, shape.head_dim), device=device).to(dtype)
        self.out = torch.full_like(self.q, torch.nan)
        self.scale = shape.head_dim**-0.5
        decode = torch.arange(self.num_decode_rows, device=device)
        last = self.row_start[: self.num_decode_rows]
        self.kv_index = self.page_table[decode, (last // PAGE).long()] * PAGE + last % PAGE
        self.inv_freq = torch.rand(shape.head_dim // 2, device=device)
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = torch.randn((self.num_decode_rows, width), device=device).to(dtype)

    def work(self, choice: DecodeChoice, *, tile_rows: int = 128) -> WorkList:
        return allocate_work_list(
            max_rows=len(self.starts),
            max_tokens=self.num_tokens,
            num_heads=self.shape.heads,
            num_kv_heads=self.shape.kv_heads,
            head_dim=self.shape.head_dim,
            window=None,
            device=self.q.device,
            target_programs=choice.target * MULTIPROCESSORS,
            wave_programs=choice.wave * MULTIPROCESSORS,
            whole_keys=choice.whole,
            tile_rows=tile_rows,
        )

    def rotate(self, layer: int, *, pdl: bool = True) -> None:
        """Of decode rows only: their queries, and keys and values into their pages."""
        qk_norm_rope_write(
            self.qkv,
            self.row_start[: self.num_decode_rows],
            self.kv_index,
            self.inv_freq,
            self.kv[layer],
            num_heads=self.shape.heads,
            q_norm=None,
            k_norm=None,
            eps=0.0,
            out=self.q[: self.num_decode_rows],
            pdl=pdl,
        )

    def build(self, work: WorkList, *, pdl: bool = True) -> None:
        build_work_list(
            work,
            counts=self.counts,
            row_slot=self.row_slot,
            row_start=self.row_start,
            row_len=self.row_len,
            row_token=self.row_token,
            page_table=self.page_table,
            prefill=True,
            pdl=pdl,
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
            pdl=choice.pdl,
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
        position = torch.from_numpy(
            np.concatenate([np.arange(s, s + n) for s, n in zip(self.starts, self.lengths, strict=True)])
        )
        return reference.paged_attention(
            self.q.float(),
            self.kv[0].float(),
            BatchMeta(
                num_decode_rows=self.num_decode_rows,
                row_start=self.starts,
                row_len=self.lengths,
                row_slot=self.row_slot.long(),
                positions=position.to(self.q.device),
                kv_index=position,  # not read
                page_table=self.page_table,
            ),
            scale=self.scale,
        )


def error(step: Step, decode: DecodeChoice, prefill: PrefillChoice) -> float:
    """Relative error of layer 0, all tokens; NaN if one was not written."""
    work = step.work(decode, tile_rows=prefill.tile_rows)
    step.build(work)
    step.out.fill_(torch.nan)
    step.rotate(0)
    step.decode(work, 0, decode)
    step.prefill(work, 0, prefill)
    exact = step.exact()
    return float((step.out.float() - exact).norm() / exact.norm())


def median_us(launch: Callable[[int], None], count: int, *, repeats: int = 9) -> float:
    """Time of one of `count` launches in a replayed graph; one plain round of them without a GPU. NaN, and a line that
    says why, if the kernel cannot be built."""
    try:
        launch(0)
    except (CompilationError, TritonError, RuntimeError) as failure:
        print(f"  not built: {' '.join(str(failure).split())[-300:]}")
        return math.nan
    if not ON_GPU:
        return 0.0
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            launch(index)
    times = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return statistics.median(times[2:])


def time_rotate(step: Step) -> float:
    return median_us(lambda index: step.rotate(index % step.layers), max(step.layers, 20))


def time_decode(step: Step, choice: DecodeChoice) -> float:
    """Of a rotation and a decode."""
    work = step.work(choice)
    step.build(work)

    def layer(index: int) -> None:
        step.rotate(index % step.layers, pdl=choice.pdl)
        step.decode(work, index % step.layers, choice)

    return median_us(layer, max(step.layers, 20))


def time_prefill(step: Step, choice: PrefillChoice) -> float:
    work = step.work(DecodeChoice(), tile_rows=choice.tile_rows)
    step.build(work)
    return median_us(lambda index: step.prefill(work, index % step.layers, choice), max(step.layers, 10))


def time_build(step: Step) -> float:
    work = step.work(DecodeChoice())
    return median_us(lambda _: step.build(work), 20)


def best(times: list[float], choices: Sequence[DecodeChoice | PrefillChoice]) -> str:
    built = [(us, choice.label) for us, choice in zip(times, choices, strict=True) if not math.isnan(us)]
    return min(built, default=(0.0, "none"))[1]


def decode_table(
    shape: Shape, bucket: str, cases: list[Case], choices: list[DecodeChoice], dtype: torch.dtype, device: str
) -> None:
    print(
        f"\ndecode, {shape.name}, {bucket}: us a layer; first/loop tile/warps/stages, t/v = target of many/few rows, "
        "w = whole keys"
    )
    print(
        f"{'rows x context':>14} {'floor':>6} {'rope':>6} "
        + " ".join(f"{choice.label:>{max(len(choice.label), 7)}}" for choice in choices)
        + "  best"
    )
    for case in cases:
        step = Step(shape, case, dtype=dtype, device=device)
        moved = sum(case.decode_lens) * shape.token_bytes + 2 * step.q.nbytes
        rotation = time_rotate(step)
        times = [time_decode(step, choice) - rotation for choice in choices]
        print(
            f"{case.name:>14} {moved / BYTES_PER_US:6.2f} {rotation:6.2f} "
            + " ".join(f"{us:{max(len(choice.label), 7)}.2f}" for us, choice in zip(times, choices, strict=True))
            + f"  {best(times, choices)}",
            flush=True,
        )


def prefill_table(
    shape: Shape, cases: list[Case], choices: list[PrefillChoice], dtype: torch.dtype, device: str
) -> None:
    print(f"\nprefill, {shape.name}: us a layer; query rows x keys/warps/stages/programs an SM")
    print(f"{'chunks @ start':>16} {'floor':>7} " + " ".join(f"{choice.label:>14}" for choice in choices) + "  best")
    for case in cases:
        step = Step(shape, case, dtype=dtype, device=device)
        pairs = sum(length * start + length * (length + 1) / 2 for start, length in case.chunks)
        flops = 4 * pairs * shape.heads * shape.head_dim
        times = [time_prefill(step, choice) for choice in choices]
        print(
            f"{case.name:>16} {flops / FLOPS_PER_US:7.1f} "
            + " ".join(f"{us:14.1f}" for us in times)
            + f"  {best(times, choices)}",
            flush=True,
        )


def decode_case(rows: int, context: int) -> Case:
    return Case(f"{rows} x {context}", [context] * rows, [])


def ragged_case(rows: int, mean: int) -> Case:
    lens = np.random.default_rng(1).exponential(mean, rows).astype(int) + 1
    return Case(f"{rows} x ~{mean}", [*lens.tolist()[:-1], 8192], [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    smoke = parser.parse_args().smoke
    device, dtype = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)

    chosen = DecodeChoice()
    many_rows = DecodeTiling(0, 32, 2, 3)
    few = [
        chosen,
        DecodeChoice(many_rows),
        DecodeChoice(DecodeTiling(256, 64, 16, 3)),
        DecodeChoice(DecodeTiling(128, 64, 4, 3)),
        DecodeChoice(DecodeTiling(128, 64, 8, 3)),
        DecodeChoice(DecodeTiling(256, 64, 8, 3), whole=0),
        DecodeChoice(DecodeTiling(128, 64, 4, 3), whole=0),
        DecodeChoice(DecodeTiling(128, 64, 8, 3), wave=2, whole=0),
        replace(chosen, pdl=False),
    ]
    middle = [
        chosen,
        DecodeChoice(many_rows),
        DecodeChoice(many_rows, target=2),
        DecodeChoice(DecodeTiling(64, 32, 2, 3), target=2),
        DecodeChoice(DecodeTiling(64, 64, 4, 2)),
        DecodeChoice(DecodeTiling(64, 64, 4, 2), target=2),
        DecodeChoice(DecodeTiling(128, 64, 4, 3)),
        DecodeChoice(DecodeTiling(128, 64, 8, 3)),
        DecodeChoice(DecodeTiling(256, 64, 8, 3), target=2),
    ]
    many = [chosen, DecodeChoice(DecodeTiling(64, 32, 2, 3)), DecodeChoice(DecodeTiling(128, 64, 8, 3))]
    small_few = [chosen, DecodeChoice(DecodeTiling(0, 64, 2, 3)), DecodeChoice(DecodeTiling(256, 64, 8, 3))]
    prefill = [PrefillChoice(PrefillTiling(64, 8, stages, MULTIPROCESSORS), 128) for stages in (3, 2)]

    if smoke:
        shape = replace(SMOLLM, heads=3, kv_heads=1)
        case = Case("smoke", [40, 7, 300], [(20, 30), (0, 5)])
        print(f"error {error(Step(shape, case, dtype=dtype, device=device, layers=1), chosen, prefill[0]):.1e}")
        decode_table(shape, "smoke", [replace(case, chunks=[])], [*few[:3], middle[3]], dtype, device)
        prefill_table(shape, [replace(case, decode_lens=[])], prefill, dtype, device)
        return

    began = time.monotonic()
    for shape in (QWEN, LLAMA, SMOLLM):
        for rows in (5, 33, 200):
            lens = np.random.default_rng(2).integers(1, 3000, rows).tolist()
            case = Case("ragged", lens, [(700, 333), (0, 1), (0, 517), (16, 64)])
            step = Step(shape, case, dtype=dtype, device=device, layers=1)
            errors = [error(step, choice, prefill[0]) for choice in (chosen, few[4], middle[4])]
            print(f"{shape.name}, {rows} rows: error " + ", ".join(f"{value:.1e}" for value in errors), flush=True)

    few_cases = [decode_case(*size) for size in ((1, 256), (1, 1024), (1, 8192), (8, 256), (8, 1024), (16, 256))]
    middle_cases = [*(decode_case(*size) for size in ((32, 256), (64, 256), (64, 1000))), ragged_case(128, 300)]
    many_cases = [decode_case(*size) for size in ((256, 256), (512, 256), (256, 1000))]
    decode_table(QWEN, "few rows", few_cases, few, dtype, device)
    decode_table(QWEN, "some rows", middle_cases, middle, dtype, device)
    decode_table(QWEN, "many rows", many_cases, many, dtype, device)
    decode_table(LLAMA, "few rows", few_cases[:4], few[:2], dtype, device)
    decode_table(LLAMA, "some rows", middle_cases[1:3], [middle[index] for index in (0, 1, 4)], dtype, device)
    decode_table(SMOLLM, "few rows", few_cases[:4], small_few, dtype, device)
    decode_table(SMOLLM, "some rows", middle_cases[1:2] + many_cases[:1], small_few[:2], dtype, device)

    chunks = [
        Case("2048", [], [(0, 2048)]),
        Case("8 x 256", [], [(0, 256)] * 8),
        Case("2048 @ 6000", [], [(6000, 2048)]),
        Case("20 x ~100", [], [(0, 60 + 4 * row) for row in range(20)]),
    ]
    prefill_table(LLAMA, chunks, prefill, dtype, device)
    prefill_table(QWEN, chunks[:2], prefill[:1], dtype, device)

    mixed = Step(QWEN, Case("mixed", [256] * 256, [(0, 256)] * 7), dtype=dtype, device=device, layers=1)
    lone = Step(QWEN, decode_case(1, 256), dtype=dtype, device=device, layers=1)
    for name, step in (("1 row", lone), ("263 rows", mixed)):
        print(f"work list, {name}: {time_build(step):.2f} us")
    print(f"took {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
