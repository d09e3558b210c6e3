"""Check and time the end of a step: norm, head and choice by logits in memory, or with the choice fused into the head.

Each way is a graph of a few such ends, greedy and at temperature 1. Prints us of an end: floor (one read of the
weights, or their product, whichever is longer), by logits, and the configurations, the fastest first; in brackets, of
the fused ones' tokens, how many are not those of torch's logits, and how far below the best score the worst is.
`--models 0.6b,8b`, `--rows 64,512` or `--smoke` without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from bench_device import BYTES_PER_US, CANNOT_RUN, DEVICE, DTYPE, SMOKE
from bench_main import parser_of, run
from bench_models import FLOPS_PER_US, MODELS, random_normal
from graph_timer import median_us
from torch import Tensor

from gpu_runner.kernels import norm_rope, reference_sampling
from gpu_runner.kernels.cuda_ops import CudaOps
from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.head import HeadSampler
from gpu_runner.kernels.head_config import HeadConfig
from gpu_runner.kernels.sample import Sampler
from gpu_runner.kernels.step_meta import new_step_meta

EPS = 1e-6
ENDS = 2 if SMOKE else 6
MAX_ROWS = 512
MAX_GAP = 1e-4
"""Of a score below the best, that float32 sums of another order come to."""
SPREAD = 3.0
"""Deviation of the logits."""
_FEW = HeadConfig(tokens=64, ids=256, block_k=64, stages=4, num_warps=4)
_MANY = HeadConfig(tokens=128, ids=256, block_k=64, stages=4, num_warps=8)
FEW_TOKENS = (_FEW, replace(_FEW, ids=128, block_k=128))
MANY_TOKENS = (_MANY, replace(_MANY, ids=128), replace(_MANY, tokens=256, ids=128, noise_ids=32))
SMOKE_WAYS = (replace(_FEW, ids=32, noise_ids=16),)


def ways(rows: int) -> tuple[HeadConfig, ...]:
    if SMOKE:
        return SMOKE_WAYS
    return tuple(way for way in (FEW_TOKENS if rows <= 64 else MANY_TOKENS) if way.tokens <= max(64, rows))


def short(way: HeadConfig) -> str:
    return f"{way.tokens}x{way.ids}x{way.block_k}s{way.stages}w{way.num_warps}n{way.noise_ids}"


class Bench:
    """A head, and steps that sample all of their rows."""

    def __init__(self, name: str) -> None:
        self.model = MODELS[name]
        self.norm = torch.ones(self.model.hidden, dtype=DTYPE, device=DEVICE)
        self.weight = random_normal(self.model.vocab, self.model.hidden).mul_(SPREAD * self.model.hidden**-0.5)
        self.residual = random_normal(MAX_ROWS, self.model.hidden)
        self.ops = CudaOps()
        self.sampler = Sampler(max_rows=MAX_ROWS, vocab=self.model.vocab, device=DEVICE)
        self.head = HeadSampler(max_rows=MAX_ROWS, device=DEVICE)
        self.state = DeviceState(num_slots=MAX_ROWS, pages_per_seq=1, device=DEVICE)
        self.state.temperature.fill_(1.0)
        self.state.seed.copy_(torch.arange(MAX_ROWS) * 2**33 + 5)
        self.meta = new_step_meta(max_rows=MAX_ROWS, max_tokens=1, device=DEVICE)
        slots = torch.arange(MAX_ROWS, dtype=torch.int32, device=DEVICE)
        self.meta.sample_row.copy_(slots)
        self.meta.row_slot.copy_(slots)
        self.meta.row_start.copy_(100 + slots)
        self.meta.row_len.fill_(1)
        self.out = torch.zeros(MAX_ROWS, dtype=torch.int32, device=DEVICE)

    def hidden(self, rows: int) -> Tensor:
        return norm_rope.rms_norm(self.residual[:rows], self.norm, EPS)

    def by_logits(self, rows: int, *, noise: bool) -> Tensor:
        logits, out = self.ops.logits(self.hidden(rows), self.weight), self.out[:rows]
        if noise:
            self.sampler.sample(logits, self.state, self.meta, out, filtered=False, bans_stop_ids=False)
        else:
            self.sampler.greedy(logits, self.state, self.meta, out, bans_stop_ids=False)
        return out

    def fused(self, rows: int, way: HeadConfig, *, noise: bool) -> Tensor:
        out = self.out[:rows]
        self.head.choose(self.hidden(rows), self.weight, self.state, self.meta, out, noise=noise, config=way)
        return out

    def scores(self, rows: int, *, noise: bool) -> Tensor:
        hidden = self.hidden(rows)
        if SMOKE:
            scores = hidden @ self.weight.t()
        else:
            scores = torch.mm(hidden, self.weight.t(), out_dtype=torch.float32)
        if noise:
            seed, position = self.state.seed[:rows], self.meta.row_start[:rows] + 1
            for row in range(rows):
                one = slice(row, row + 1)
                scores[one] += reference_sampling.gumbel_noise(seed[one], position[one], self.model.vocab)
        return scores

    def us(self, end: Callable[[], object]) -> float:
        return median_us(lambda _: end(), ENDS)

    def compare(self, name: str, rows: int, *, noise: bool) -> None:
        self.meta.counts[3] = rows
        scores = self.scores(rows, noise=noise)
        best = scores.max(dim=1).values
        others, worst, times = 0, 0.0, []
        for way in ways(rows):
            self.out.fill_(-7)
            try:
                tokens = self.fused(rows, way, noise=noise).long()
            except CANNOT_RUN as problem:
                print(f"{name} {rows} {short(way)}: {str(problem)[:120]}", flush=True)
                continue
            if not ((tokens >= 0) & (tokens < self.model.vocab)).all():
                print(f"WRONG {name} {rows} {short(way)}: no ids", flush=True)
                continue
            gaps = best - scores.gather(1, tokens[:, None])[:, 0]
            others = max(others, int((tokens != scores.argmax(dim=1)).sum()))
            worst = max(worst, float(gaps.max()))
            if gaps.max() > MAX_GAP:
                print(f"WRONG {name} {rows} {short(way)}: {float(gaps.max()):.3g} below the best", flush=True)
            times.append((self.us(partial(self.fused, rows, way, noise=noise)), short(way)))
        del scores
        self.by_logits(rows, noise=noise)
        logits_us = self.us(partial(self.by_logits, rows, noise=noise))
        n, k = self.weight.shape
        floor = max(self.weight.nbytes / BYTES_PER_US, 2 * rows * n * k / FLOPS_PER_US)
        listed = ", ".join(f"{way} {us:.0f}" for us, way in sorted(times)[:4])
        print(
            f"{name:>5} {rows:3} {'noise ' if noise else 'greedy'} floor {floor:4.0f} logits {logits_us:5.1f} "
            f"({others}, {worst:.0e}) {listed}",
            flush=True,
        )


def compile_part(names: list[str], row_counts: list[int], part: int, parts: int) -> None:
    work = [
        (name, noise, rows, way)
        for name in names
        for noise in (True, False)
        for rows, way in [
            *dict.fromkeys((max(64, way.tokens), way) for rows in row_counts for way in ways(rows)),
            *((rows, None) for rows in row_counts),
        ]
    ][part::parts]
    benches = {name: Bench(name) for name in dict.fromkeys(name for name, *_ in work)}
    for name, noise, rows, way in work:
        try:
            if way is None:
                benches[name].by_logits(rows, noise=noise)
            else:
                benches[name].fused(rows, way, noise=noise)
        except CANNOT_RUN:
            continue  # reported where it would be timed


def main() -> None:
    def measure(name: str, row_counts: list[int]) -> None:
        bench = Bench(name)
        for noise in (False, True):
            for rows in row_counts:
                bench.compare(name, rows, noise=noise)

    parser = parser_of(__doc__, counts="rows", default="1,8,32,64,128,256,512", smoke="3,70")
    run(parser.parse_args(), compile_part, measure)


if __name__ == "__main__":
    main()
