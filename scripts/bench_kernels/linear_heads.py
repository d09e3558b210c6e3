"""Check and time a layer's norm, its qkv product and what becomes of the heads: one kernel after the other, or the last
two in one.

A graph of all layers, each with weights and pages of its own: norm, the product as `choose` says and
`qk_norm_rope_write`, against norm and `qkv_norm_rope_write` by each tile, in turns. Prints us a layer: the product's
floor, the kernels one after the other (in brackets with what), what `choose_heads` takes (none: it leaves them so), and
the tiles, the fastest first. A tile whose queries, keys and values differ by over 1 % is told and not timed.
`--models 0.6b,8b`, `--tokens 256,4096` or `--smoke` without a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from bench_device import CANNOT_RUN, DEVICE, DTYPE, SMOKE
from bench_main import parser_of, run
from bench_models import MODELS, random_normal
from graph_timer import GraphTimer, Run
from linear_ways import CUBLAS, short
from torch import Tensor

from asyncengine.config import PAGE_SIZE
from gpu_runner.kernels.cuda_ops import CudaOps
from gpu_runner.kernels.linear_config import TileConfig, choose, choose_heads
from gpu_runner.kernels.linear_heads import qkv_norm_rope_write
from gpu_runner.kernels.norm_rope import qk_norm_rope_write
from gpu_runner.kernels.residual import NormedLinear, Residual

EPS = 1e-6
MAX_ERROR = 1e-2
MAX_POSITION = 30_000
_NARROW = TileConfig(tokens=64, rows=128, block_k=128, stages=4, num_warps=4, group=16, prefetch_k=256)
_WIDE = replace(_NARROW, tokens=128, block_k=64, stages=6, num_warps=8)
_LARGE = TileConfig(tokens=128, rows=256, block_k=64, stages=4, num_warps=8, group=16)
SMALL_TILES = (
    _NARROW,
    replace(_NARROW, block_k=64, stages=6),
    replace(_NARROW, rows=256, block_k=64, num_warps=8),
    _WIDE,
)
LARGE_TILES = (
    *(_LARGE, replace(_LARGE, group=8), replace(_LARGE, stages=3), replace(_LARGE, tokens=256, rows=128)),
    *(replace(_LARGE, rows=128, stages=3), replace(_LARGE, rows=128, stages=3, num_warps=4)),
)
SMOKE_TILES = (TileConfig(tokens=16, rows=64, block_k=16, stages=2, num_warps=4, group=4),)


def tiles(tokens: int) -> tuple[TileConfig, ...]:
    if SMOKE:
        return SMOKE_TILES
    return SMALL_TILES if tokens < 512 else LARGE_TILES if tokens > 512 else SMALL_TILES + LARGE_TILES


class Bench:
    """One model's layers, and a step of any number of tokens up to `most`."""

    def __init__(self, name: str, most: int, *, layers: int | None = None) -> None:
        self.name, self.model = name, MODELS[name]
        self.head_dim = self.model.head_dim
        linear = self.model.linear("qkv")
        self.n, self.k = linear.n, linear.k
        count = layers or self.model.layers
        gain = 1 + random_normal(self.k) / 8
        self.linears = [
            NormedLinear(gain, EPS, random_normal(self.n, self.k).mul_(self.k**-0.5), None) for _ in range(count)
        ]
        self.num_pages = -(-most // PAGE_SIZE) + 1
        planes = (2, self.num_pages, self.model.kv_heads // self.head_dim, PAGE_SIZE, self.head_dim)
        self.kv = torch.zeros(count, *planes, dtype=DTYPE, device=DEVICE)
        self.residual = random_normal(most, self.k)
        half = torch.arange(0, self.head_dim, 2, device=DEVICE) / self.head_dim
        q_norm, k_norm = 1 + random_normal(2, self.head_dim) / 8 if self.model.norms_heads else (None, None)
        self.options: dict[str, Any] = {"q_norm": q_norm, "k_norm": k_norm, "eps": EPS}
        self.inv_freq = (1e6**-half).float()
        self.positions = torch.randint(MAX_POSITION, (most,), dtype=torch.int32, device=DEVICE)
        self.kv_index = (PAGE_SIZE + torch.randperm(most, device=DEVICE)).to(torch.int32)
        self.queries = torch.zeros(most, self.model.heads // self.head_dim, self.head_dim, dtype=DTYPE, device=DEVICE)
        self.ops = CudaOps.for_weights([(self.n, self.k)], max_tokens=most, device=DEVICE)
        self.timer = GraphTimer()

    def layer(self, tokens: int, way: TileConfig | None, index: int) -> None:
        """way: None for the kernels one after the other."""
        linear, out = self.linears[index], self.queries[:tokens]
        where = (self.positions[:tokens], self.kv_index[:tokens], self.inv_freq, self.kv[index])
        x = self.residual[:tokens]
        if way is None:
            qkv = self.ops.norm_linear(Residual(x), linear)
            qk_norm_rope_write(qkv, *where, num_heads=out.shape[1], out=out, **self.options)
        else:
            normed = self.ops.rms_norm(x, linear.gain, EPS)
            qkv_norm_rope_write(normed, linear.weight, *where, out=out, config=way, **self.options)

    def capture(self, tokens: int, way: TileConfig | None) -> Run:
        def run() -> None:
            for index in range(len(self.linears)):
                self.layer(tokens, way, index)

        return self.timer.capture(run)

    def results(self, tokens: int, way: TileConfig | None) -> tuple[Tensor, Tensor]:
        self.queries.fill_(float("nan"))
        self.kv[0].zero_()
        self.layer(tokens, way, 0)
        return self.queries[:tokens].clone().float(), self.kv[0].clone().float()

    def compare(self, tokens: int) -> None:
        expected = self.results(tokens, None)
        apart = self.capture(tokens, None)
        apart_us = self.timer.us(apart) / len(self.linears)
        times: list[tuple[float, str]] = []
        for way in tiles(tokens):
            try:
                pairs = list(zip(self.results(tokens, way), expected, strict=True))
            except CANNOT_RUN as problem:
                print(f"{self.name} T={tokens} {short(way)}: {str(problem)[:120]}", flush=True)
                continue
            error = max(float((found - wanted).norm() / wanted.norm()) for found, wanted in pairs)
            if not error < MAX_ERROR:
                print(f"WRONG {self.name} T={tokens} {short(way)}: error {error:.3g}", flush=True)
                continue
            times.append((apart_us * self.timer.ratio(self.capture(tokens, way), apart), short(way)))
        product = choose(tokens, self.n, self.k)
        taken = choose_heads(tokens, self.n, self.k, self.head_dim)
        print(
            f"{self.name:>5} {tokens:5} floor {self.model.floor_us('qkv', tokens):6.1f} "
            f"apart {apart_us:6.1f} ({CUBLAS if product is None else short(product)}) "
            f"taken {'none' if taken is None else short(taken)}: "
            + ", ".join(f"{us:.1f} {way}" for us, way in sorted(times)[:4]),
            flush=True,
        )


def compile_part(names: list[str], counts: list[int], part: int, parts: int) -> None:
    ways: dict[tuple[str, TileConfig | None, int], int] = {}
    for name in names:
        for tokens in counts:
            ways[name, None, tokens] = tokens
            ways.update({(name, way, 0): tokens for way in tiles(tokens)})
    for (name, way, _), tokens in list(ways.items())[part::parts]:
        try:
            Bench(name, tokens, layers=1).layer(tokens, way, 0)
        except CANNOT_RUN:
            continue  # reported where it would be timed


def main() -> None:
    def measure(name: str, counts: list[int]) -> None:
        bench = Bench(name, max(counts))
        for tokens in counts:
            bench.compare(tokens)

    parser = parser_of(__doc__, counts="tokens", default="128,256,512,2048,4096,8192", smoke="19,70")
    run(parser.parse_args(), compile_part, measure)


if __name__ == "__main__":
    main()
