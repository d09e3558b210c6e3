"""A decode step's attention between its linear layers: two kernels against the fused ones, by tiling.

    python scripts/bench_kernels/attention_layer.py [--smoke] [--rows few|many]

Each time is what a layer's attention adds to a graph of LAYERS times (qkv linear, attention, output linear), with
programmatic dependent launch and keys, values and weights of its own for each layer, over the same graph with the
linears alone. Errors come first. --smoke: tiny shapes under Triton's interpreter, to see that the script runs.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from attention import BYTES_PER_US, LLAMA, ON_GPU, PAGE, QWEN, SMOLLM, Case, Shape, Step, decode_case
from torch import Tensor

from gpu_runner.kernels import reference
from gpu_runner.kernels.attention_decode import DecodeTiling, decode_attention, rotating_decode_attention
from gpu_runner.kernels.attention_fused import FusedTiling, fused_decode_attention
from gpu_runner.kernels.cuda_ops import CudaOps
from gpu_runner.kernels.norm_rope import qk_norm_rope_write
from gpu_runner.kernels.ops import BatchMeta
from gpu_runner.kernels.reference import rope_cos_sin
from gpu_runner.kernels.work_list import WorkList, allocate_work_list

LAYERS = 28
MOST_WEIGHT_BYTES = 4e9
EPS = 1e-6
BASE = 1e6
COMPILERS = 16
FEW = ((1, 256), (1, 400), (1, 700), (8, 400), (32, 300), (1, 4096))
MANY = ((33, 256), (64, 256), (128, 256), (256, 256), (512, 256), (64, 2048), (16, 8192))
MANY_RAGGED = (64, 256, 512)


@dataclass(frozen=True)
class Choice:
    """tiling: None is the pair of kernels."""

    tiling: FusedTiling | DecodeTiling | None
    split_step: int = 512

    @property
    def label(self) -> str:
        tiling = self.tiling
        if isinstance(tiling, DecodeTiling):
            return f"{tiling.block_tokens}/{tiling.num_warps}/{tiling.num_stages}/{tiling.prefetch_pages}"
        ranges = "" if self.split_step == 512 else f" s{self.split_step}"
        return f"pair{ranges}" if tiling is None else f"{tiling.warp_keys}x{tiling.num_warps}{ranges}"


PAIR = Choice(None, split_step=64)


SHAPES = ((QWEN, 1024), (LLAMA, 4096))


class Layers:
    """The step with what a layer's attention takes and what stands around it."""

    def __init__(self, shape: Shape, hidden: int, case: Case, *, dtype: torch.dtype, device: str, layers: int) -> None:
        self.step = step = Step(shape, case, dtype=dtype, device=device, layers=layers)
        rows = step.num_tokens
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.device = torch.device(device)
        self.positions = torch.from_numpy(step.starts).to(device)
        page = step.page_table.cpu()[torch.arange(rows), torch.from_numpy(step.starts) // PAGE]
        self.kv_index = (page * PAGE + torch.from_numpy(step.starts) % PAGE).to(torch.int32).to(device)
        half = shape.head_dim // 2
        self.inv_freq = (BASE ** -(torch.arange(half, device=device) / half)).float()
        self.rotation = rope_cos_sin(torch.arange(int(step.starts.max()) + 1, device=device), self.inv_freq)
        sets = max(1, min(layers, int(MOST_WEIGHT_BYTES // (2 * (width + shape.heads * shape.head_dim) * hidden))))

        def weights(*size: int) -> Tensor:
            return torch.randn(size, dtype=dtype, device=device) / size[-1] ** 0.5

        self.qkv_weights = [weights(width, hidden) for _ in range(sets)]
        self.o_weights = [weights(hidden, shape.heads * shape.head_dim) for _ in range(sets)]
        self.norm = torch.ones(hidden, dtype=dtype, device=device)
        # Of the shapes here Llama's and SmolLM2's heads are not normed.
        norms = [1 + 0.1 * weights(shape.head_dim) if shape.normed else None for _ in range(2)]
        self.q_norm, self.k_norm = norms
        self.residual = weights(rows, hidden)
        self.qkv = weights(rows, width) * width**0.5
        shapes = [(width, hidden), (hidden, shape.heads * shape.head_dim)]
        self.ops = CudaOps.for_weights(shapes, max_tokens=rows, device=self.device)

    def work(self, choice: Choice) -> WorkList:
        step = self.step
        work = allocate_work_list(
            max_rows=len(step.starts), max_tokens=step.num_tokens, num_heads=step.shape.heads,
            num_kv_heads=step.shape.kv_heads, head_dim=step.shape.head_dim, window=None, device=self.device,
            split_step=choice.split_step,
        )  # fmt: skip
        step.build(work)
        return work

    def attend(self, qkv: Tensor, kv_layer: Tensor, work: WorkList, choice: Choice) -> Tensor:
        step = self.step
        shared: dict[str, Any] = {"counts": step.counts, "page_table": step.page_table, "scale": step.scale}
        norms: dict[str, Any] = {"q_norm": self.q_norm, "k_norm": self.k_norm, "eps": EPS}
        if choice.tiling is None:
            q = qk_norm_rope_write(
                qkv, self.positions, self.kv_index, self.inv_freq, kv_layer, num_heads=step.shape.heads, **norms
            )
            out = torch.empty_like(q)
            decode_attention(q, kv_layer, out, work, **shared)
            return out
        out = torch.empty_like(step.q)
        place: dict[str, Any] = {"positions": self.positions, "kv_index": self.kv_index, "rotation": self.rotation}
        if isinstance(choice.tiling, FusedTiling):
            fused_decode_attention(qkv, kv_layer, out, work, tiling=choice.tiling, **place, **norms, **shared)
        else:
            rotating_decode_attention(qkv, kv_layer, out, work, tiling=choice.tiling, **place, **norms, **shared)
        return out

    def layer(self, index: int, attend: Callable[[Tensor, Tensor], Tensor]) -> None:
        sets = len(self.qkv_weights)
        qkv = self.ops.norm_linear(self.residual, self.norm, EPS, self.qkv_weights[index % sets], None)
        out = attend(qkv, self.step.kv[index % self.step.layers])
        self.ops.linear_add(out.flatten(1), self.o_weights[index % sets], None, self.residual)

    def linears(self, index: int) -> None:
        self.layer(index, lambda qkv, kv_layer: self.step.q)

    def time(self, choice: Choice | None) -> float:
        """us a layer; None: with the linears alone."""
        work = self.work(choice or PAIR)

        def layers() -> None:
            for index in range(LAYERS):
                if choice is None:
                    self.linears(index)
                else:
                    self.layer(index, lambda qkv, kv_layer: self.attend(qkv, kv_layer, work, choice))

        return graph_us(layers) / LAYERS

    def error(self, choice: Choice) -> tuple[float, float, int]:
        """Relative differences from the references in float32, of the output and of what is in the pages; and how many
        values of the pages differ from what the pair writes."""
        step = self.step
        kv_layer, exact_kv = step.kv[0].clone(), step.kv[0].float()
        out = self.attend(self.qkv, kv_layer, self.work(choice), choice).float()
        q = reference.qk_norm_rope_write(
            self.qkv.float(), self.rotation[self.positions.long()], exact_kv, self.kv_index.long(),
            num_heads=step.shape.heads, eps=EPS,
            q_norm=None if self.q_norm is None else self.q_norm.float(),
            k_norm=None if self.k_norm is None else self.k_norm.float(),
        )  # fmt: skip
        meta = BatchMeta(
            num_decode_rows=step.num_decode_rows, row_start=step.starts, row_len=step.lengths,
            row_slot=step.row_slot.long(), positions=self.positions, kv_index=self.kv_index, page_table=step.page_table,
        )  # fmt: skip
        exact = reference.paged_attention(q, exact_kv, meta, scale=step.scale)
        pair_kv = step.kv[0].clone()
        self.attend(self.qkv, pair_kv, self.work(PAIR), PAIR)
        differing = int((kv_layer != pair_kv).sum())
        kv_error = float((kv_layer.float() - exact_kv).norm() / exact_kv.norm())
        return float((out - exact).norm() / exact.norm()), kv_error, differing


def graph_us(launch: Callable[[], None], repeats: int = 12) -> float:
    if not ON_GPU:
        return 0.0
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    times = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[3:])


def compile_in_parallel(rows: str) -> None:
    """The kernels of all choices and layers into Triton's cache, in processes of their own."""
    command = [sys.executable, __file__, "--rows", rows, "--compile"]
    children = [subprocess.Popen([*command, str(index)]) for index in range(COMPILERS)]
    for child in children:
        child.wait()


def compile_share(rows: str, share: int) -> None:
    jobs: list[tuple[Shape, int, int, Choice | None]] = []
    for shape, hidden in SHAPES:
        jobs += [(shape, hidden, count, None) for count in sorted({len(case.decode_lens) for case in cases(rows)})]
        jobs += [(shape, 64, 64, choice) for choice in choices(rows)]
    for shape, hidden, count, choice in jobs[share::COMPILERS]:
        layers = Layers(shape, hidden, decode_case(count, 20), dtype=torch.bfloat16, device="cuda", layers=1)
        if choice is None:
            layers.linears(0)
        else:
            layers.error(choice)


def choices(rows: str) -> list[Choice]:
    if rows == "few":
        tilings = [(32, 8), (16, 8), (32, 4), (16, 4), (32, 2), (16, 2)]
        steps = [Choice(FusedTiling(32, warps)) for warps in (8, 4)]
        return [
            replace(PAIR, split_step=256), *(Choice(FusedTiling(*tiling), split_step=256) for tiling in tilings),
            *steps, replace(PAIR, split_step=512), Choice(FusedTiling(32, 8), split_step=1024),
        ]  # fmt: skip
    pages = (4, 8, 16)
    return [
        replace(PAIR, split_step=512),
        *(Choice(DecodeTiling(32, 2, 3, prefetch_pages)) for prefetch_pages in pages),
    ]


def cases(rows: str) -> list[Case]:
    if rows == "few":
        return [decode_case(*size) for size in FEW]
    ragged = [np.random.default_rng(rows).integers(1, 513, rows).tolist() for rows in MANY_RAGGED]
    return [*(decode_case(*size) for size in MANY), *(Case(f"{len(lens)} ragged", lens, []) for lens in ragged)]


def print_errors(shape: Shape, choices: list[Choice], dtype: torch.dtype, device: str, case: Case) -> None:
    layers = Layers(shape, 64, case, dtype=dtype, device=device, layers=1)
    errors = [layers.error(choice) for choice in choices]
    worst = [max(error) for error in zip(*errors, strict=True)]
    print(
        f"{shape.name}: relative errors up to {worst[0]:.1e}, in the pages {worst[1]:.1e}; values written otherwise "
        "than by the pair: "
        + ", ".join(f"{choice.label} {error[2]}" for choice, error in zip(choices, errors, strict=True))
    )
    for choice, (out, pages, _) in zip(choices, errors, strict=True):
        if not (out < 1e-2 and pages < 1e-2):
            print(f"    WRONG: {choice.label} {out:.1e} {pages:.1e}")


def table(shape: Shape, hidden: int, choices: list[Choice], cases: list[Case], dtype: torch.dtype, device: str) -> None:
    print(f"\n{shape.name}: us of attention in a layer; floor of KV bytes; ranges of 512 tokens unless s")
    print("for few rows: keys of a warp x warps; for many: keys/warps/stages/pages asked into L2")
    names = [case.name.replace(" ", "") for case in cases]
    print(f"{'':>18} " + " ".join(f"{name:>9}" for name in names))
    columns = []
    for case in cases:
        layers = Layers(shape, hidden, case, dtype=dtype, device=device, layers=LAYERS if ON_GPU else 1)
        floor = sum(case.decode_lens) * shape.token_bytes / BYTES_PER_US
        alone = layers.time(None)
        columns.append([alone, floor, *(layers.time(choice) - alone for choice in choices)])
        del layers
        if ON_GPU:
            torch.cuda.empty_cache()
    labels = ["linears", "floor", *(choice.label for choice in choices)]
    for label, line in zip(labels, zip(*columns, strict=True), strict=True):
        print(f"{label:>18} " + " ".join(f"{us:9.2f}" for us in line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--rows", choices=("few", "many"), default="many")
    parser.add_argument("--compile", type=int, help="only compile this share")
    options = parser.parse_args()
    device, dtype = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
    if options.smoke:
        shape = replace(SMOLLM, heads=3, kv_heads=1)
        some = [PAIR, Choice(FusedTiling(16, 2)), Choice(DecodeTiling(16, 2, 2, 4))]
        print_errors(shape, some, dtype, device, Case("smoke", [40, 1, 300], []))
        table(shape, 48, some, [Case("smoke", [40, 1, 300], [])], dtype, device)
        return
    if options.compile is not None:
        compile_share(options.rows, options.compile)
        return
    start = time.monotonic()
    compile_in_parallel(options.rows)
    print(f"compiled in {time.monotonic() - start:.1f} s")
    ragged = Case("ragged", [1, 257, 3000, 17, 64, 65, 700, *range(1, 90)], [])
    for shape, _ in SHAPES:
        print_errors(shape, choices(options.rows), dtype, device, ragged)
    for shape, hidden in SHAPES:
        table(shape, hidden, choices(options.rows), cases(options.rows), dtype, device)
    print(f"done in {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
