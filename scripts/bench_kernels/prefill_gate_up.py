"""Check and time gate-up products of prefill: cuBLAS and a SiLU kernel, or large tiles with SiLU in their epilogue.

Each way is a graph of launches over weights of their own, without the norm in front, timed in turns with the graph of
what `choose` names. Prints us and the product's TFLOP/s, SiLU's time counted in, of the fastest ways, the chosen and
cuBLAS. `--models 0.6b,8b`, `--tokens 2048,4096` or `--smoke` without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext

import torch
from graph_timer import GraphTimer, Run
from linear import CANNOT_RUN, MAX_ERROR, MODELS, SCRATCH_TILES, SCRATCH_VALUES, SMOKE, compile_all, random_normal
from linear_ways import CUBLAS, Linear, Way, prefill_ways, short
from torch import Tensor

from gpu_runner.kernels import linear, norm_rope, reference
from gpu_runner.kernels.linear import SplitScratch
from gpu_runner.kernels.linear_config import TileConfig, choose

ROTATED_BYTES = 1 << 14 if SMOKE else 128 << 20  # of weights and of outputs: more than L2
SHOWN = 4


class Bench:
    """The tensors of one product, weights and outputs several times."""

    def __init__(self, shape: Linear, tokens: int, *, copies: int | None = None) -> None:
        if copies is None:
            copies = max(2, -(-ROTATED_BYTES // (2 * min(shape.n * shape.k, tokens * shape.n // 2))))
        self.flops = 2 * tokens * shape.n * shape.k
        self.x = random_normal(tokens, shape.k)
        self.weights = [random_normal(shape.n, shape.k).mul_(shape.k**-0.5) for _ in range(copies)]
        self.outs = [random_normal(tokens, shape.n // 2) for _ in range(copies)]
        self.timer = GraphTimer()
        self._scratch = SplitScratch.allocate(max_values=SCRATCH_VALUES, max_tiles=SCRATCH_TILES, device=self.x.device)
        self._expected: Tensor | None = None

    def launch(self, way: Way, weight: Tensor, out: Tensor) -> None:
        if isinstance(way, str):
            norm_rope.silu_mul(torch.mm(self.x, weight.t()), out=out)
        else:
            linear.gate_up(self.x, weight, out=out, config=way, scratch=self._scratch, pdl=not SMOKE)

    def error(self, way: Way) -> float:
        """Relative, of the whole, against float32; infinite for one that does not repeat itself."""
        if self._expected is None:
            self._expected = reference.silu_mul(self.x.float() @ self.weights[0].float().t())
        expected = self._expected
        for out in self.outs[:2]:
            out.fill_(torch.nan)
            self.launch(way, self.weights[0], out)
        if not torch.equal(self.outs[0], self.outs[1]):
            return float("inf")
        return float((self.outs[0].float() - expected).norm() / expected.norm())

    def capture(self, way: Way) -> Run:
        def run() -> None:
            for weight, out in zip(self.weights, self.outs, strict=True):
                self.launch(way, weight, out)

        return self.timer.capture(run)


def compare(name: str, tokens: int, ways: list[TileConfig]) -> None:
    shape = MODELS[name].linear("gate_up")
    bench = Bench(shape, tokens)
    chosen: Way = choose(tokens, shape.n, shape.k) or CUBLAS
    right: list[Way] = []
    for way in dict.fromkeys((chosen, CUBLAS, *ways)):
        try:
            error = bench.error(way)
        except CANNOT_RUN as problem:
            print(f"{name} {tokens} {short(way)}: {str(problem)[:200]}", flush=True)
            continue
        if error < MAX_ERROR:
            right.append(way)
        else:
            print(f"WRONG {name} {tokens} {short(way)}: error {error:.3g}", flush=True)
    base = bench.capture(chosen)
    base_us = bench.timer.us(base) / len(bench.weights)
    times = {way: base_us * bench.timer.ratio(bench.capture(way), base) for way in right}
    fastest = sorted(times, key=times.__getitem__)
    for way in fastest:
        if way in (*fastest[:SHOWN], chosen, CUBLAS):
            us, mark = times[way], " (chosen)" if way == chosen else ""
            print(
                f"{name:>5} {tokens:5} {us:9.1f} us {bench.flops / us / 1e6:6.0f} TFLOP/s  {short(way)}{mark}",
                flush=True,
            )


def compile_part(selected: list[tuple[str, TileConfig]], part: int, parts: int) -> None:
    for name, way in selected[part::parts]:
        # Programs that are fewer than tiles are another kernel.
        tokens = 4 * way.tokens if SMOKE else 2048
        bench = Bench(MODELS[name].linear("gate_up"), tokens, copies=1)
        try:
            bench.launch(way, bench.weights[0], bench.outs[0])
        except CANNOT_RUN:
            continue  # reported where it would be timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="smoke" if SMOKE else "0.6b,8b")
    parser.add_argument("--tokens", default="70" if SMOKE else "2048,4096,8192")
    parser.add_argument("--workers", type=int, default=1 if SMOKE else 16, help="processes that compile")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes under Triton's interpreter")
    parser.add_argument("--part", help="compile one part, for the parent process")
    arguments = parser.parse_args()
    began = time.perf_counter()
    torch.manual_seed(0)
    names = arguments.models.split(",")
    ways = prefill_ways()[: 3 if SMOKE else None]
    with torch.inference_mode():
        if arguments.part:
            part, parts = map(int, arguments.part.split("/"))
            compile_part([(name, way) for name in names for way in ways], part, parts)
            return
        if not SMOKE:
            compile_all(arguments.workers, script=__file__, arguments=sys.argv[1:])
            print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
        with nullcontext() if SMOKE else torch.cuda.stream(torch.cuda.Stream()):
            for name in names:
                for tokens in map(int, arguments.tokens.split(",")):
                    compare(name, tokens, ways)
    print(f"done after {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
