"""Tune a decoder's linear layers where they run: in one CUDA graph of all layers, each with weights of its own.

A layer is norm + qkv, a stand-in for attention (one small kernel with a programmatic launch), o + residual, norm +
gate/up + SiLU, down + residual, by `CudaOps` itself, so that what one kernel leaves for the next (its tail, the wait,
the cache) is counted. For each number of tokens every way of one linear is timed with the others fixed, linear after
linear, then again with the best few. Each way is first checked against float32. The head is timed alone.

Prints, for each number of tokens, us per layer with what `choose` names (before) and with the best (after), the best of
each linear, and by how much the layer is longer than without that linear. `--model 8b`, `--tokens 1,8`, `--json
FILE`, or `--smoke` without a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

SMOKE = "--smoke" in sys.argv
if SMOKE:
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    from support.triton_interpreter import use_interpreter

    use_interpreter()

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from linear_ways import CUBLAS, CUBLAS_TURNED, Linear, Way, compile_key, short, ways_of  # noqa: E402
from torch import Tensor  # noqa: E402

from gpu_runner.kernels import reference  # noqa: E402
from gpu_runner.kernels.cuda_ops import CudaOps  # noqa: E402
from gpu_runner.kernels.linear_config import LinearConfig, choose  # noqa: E402

DEVICE = "cpu" if SMOKE else "cuda"
DTYPE = torch.float32 if SMOKE else torch.bfloat16
EPS = 1e-6
MAX_ERROR = 1e-2
REPLAYS = 3 if SMOKE else 9
HEAD_LAUNCHES = 4
FINALISTS = 3
CANNOT_RUN = (triton.runtime.errors.OutOfResources, triton.CompilationError, RuntimeError)
LAYER = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True)
class Model:
    layers: int  # of the graph: enough that L2 holds none of their weights at the next replay
    hidden: int
    heads: int  # columns of all query heads
    kv_heads: int  # columns of all key heads
    inner: int
    vocab: int

    def linear(self, name: str) -> Linear:
        shapes = {
            "qkv": (self.heads + 2 * self.kv_heads, self.hidden),
            "o": (self.hidden, self.heads),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
            "head": (self.vocab, self.hidden),
        }
        return Linear(name, *shapes[name])


MODELS = {
    "0.6b": Model(28, 1024, 2048, 1024, 3072, 151936),
    "8b": Model(16, 4096, 4096, 1024, 14336, 128256),
    "135m": Model(30, 576, 576, 192, 1536, 49152),
    "smoke": Model(1, 32, 64, 16, 48, 96),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@triton.jit
def _stand_in_attention_kernel(
    qkv, heads, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Copy the query heads, as a kernel that depends on all of the step's tokens."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    values = tl.load(qkv + row * WIDTH + column, mask=column < COLUMNS)
    tl.store(heads + row * COLUMNS + column, values, mask=column < COLUMNS)


class Chain:
    """A model's layers and head, and the way in which each linear is to be computed."""

    def __init__(self, model: Model, *, layers: int) -> None:
        self.model = model
        self.ways: dict[tuple[int, int], Way] = {}  # by [n, k] of the weight
        self._timer = GraphTimer()
        self.norm = random_normal(model.hidden)
        self.layers = [{name: self._weight(model.linear(name)) for name in LAYER} for _ in range(layers)]
        self.head = self._weight(model.linear("head"))
        self.ops = CudaOps(torch.device(DEVICE), pdl=not SMOKE, choose=self._choose)

    def set(self, linear: Linear, way: Way) -> None:
        self.ways[linear.n, linear.k] = way

    def apply(self, name: str, weights: dict[str, Tensor], values: dict[str, Tensor]) -> None:
        """One linear as the decoder calls it. values: the tensors between the linears."""
        ops, residual = self.ops, values["residual"]
        if name == "qkv":
            values["qkv"] = ops.norm_linear(residual, self.norm, EPS, weights[name], None)
        elif name == "gate_up":
            values["inner"] = ops.norm_gate_up(residual, self.norm, EPS, weights[name], None)
        else:
            ops.linear_add(values["heads" if name == "o" else "inner"], weights[name], None, residual)

    def values(self, tokens: int) -> dict[str, Tensor]:
        model = self.model
        columns = {"residual": model.hidden, "qkv": model.linear("qkv").n, "heads": model.heads, "inner": model.inner}
        return {name: random_normal(tokens, width) for name, width in columns.items()}

    def layer_us(self, tokens: int, *, without: str | None = None) -> float:
        values = self.values(tokens)

        def run() -> None:
            for weights in self.layers:
                for name in LAYER:
                    if name == "o":
                        self.attend(values)
                    if name != without:
                        self.apply(name, weights, values)

        return self._timer.us(run) / len(self.layers)

    def head_us(self, tokens: int, way: Way) -> float:
        self.set(self.model.linear("head"), way)
        residual = random_normal(tokens, self.model.hidden)
        turned = self.head.t().contiguous() if way == CUBLAS_TURNED else None

        def run() -> None:
            for _ in range(HEAD_LAUNCHES):
                self.logits(residual, turned)

        return self._timer.us(run) / HEAD_LAUNCHES

    def logits(self, residual: Tensor, turned: Tensor | None) -> Tensor:
        hidden = self.ops.rms_norm(residual, self.norm, EPS)
        return self.ops.logits(hidden, self.head) if turned is None else _wide_mm(hidden, turned)

    def errors(self, linear: Linear, tokens: int, ways: Iterable[Way]) -> dict[Way, float]:
        """Relative, of the whole, of the ways that the device can run; infinite for one that does not repeat itself."""
        given = self.values(tokens)
        weights = {**self.layers[0], "head": self.head}
        expected = self._expected(linear, given, weights[linear.name])
        errors: dict[Way, float] = {}
        for way in ways:
            self.set(linear, way)
            try:
                results = [self._once(linear.name, weights, given, way) for _ in range(2)]
            except CANNOT_RUN as problem:
                print(f"T={tokens} {linear.name} {short(way)}: {str(problem)[:200]}", flush=True)
                continue
            error = float((results[0].float() - expected).norm() / expected.norm())
            errors[way] = error if torch.equal(*results) else float("inf")
        return errors

    def _once(self, name: str, weights: dict[str, Tensor], given: dict[str, Tensor], way: Way) -> Tensor:
        values = {key: value.clone() for key, value in given.items()}
        if name == "head":
            return self.logits(values["residual"], self.head.t().contiguous() if way == CUBLAS_TURNED else None)
        self.apply(name, weights, values)
        return values[{"qkv": "qkv", "gate_up": "inner"}.get(name, "residual")]

    def _expected(self, linear: Linear, given: dict[str, Tensor], weight: Tensor) -> Tensor:
        residual = given["residual"].float()
        if linear.name in ("o", "down"):
            return residual + given["heads" if linear.name == "o" else "inner"].float() @ weight.float().t()
        normed = reference.rms_norm(residual, self.norm.float(), EPS)
        product = normed @ weight.float().t()
        return reference.silu_mul(product) if linear.name == "gate_up" else product

    def attend(self, values: dict[str, Tensor]) -> None:
        tokens, width = values["qkv"].shape
        columns, block = self.model.heads, 1024
        options = {} if SMOKE else {"launch_pdl": True}
        _stand_in_attention_kernel[(tokens, triton.cdiv(columns, block))](
            values["qkv"], values["heads"], WIDTH=width, COLUMNS=columns, BLOCK=block, PDL=not SMOKE, **options
        )

    def _choose(self, x: Tensor, weight: Tensor) -> LinearConfig | None:
        way = self.ways.get((weight.shape[0], weight.shape[1]), CUBLAS)
        return None if isinstance(way, str) else way

    @staticmethod
    def _weight(linear: Linear) -> Tensor:
        return random_normal(linear.n, linear.k).mul_(linear.k**-0.5)


def random_normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE)


def _wide_mm(x: Tensor, turned: Tensor) -> Tensor:
    return torch.mm(x, turned) if SMOKE else torch.mm(x, turned, out_dtype=torch.float32)


class GraphTimer:
    """Times what is captured on the current stream, whose kernels have been loaded."""

    def __init__(self) -> None:
        self._pool = None if SMOKE else torch.cuda.graph_pool_handle()
        self._last: torch.cuda.CUDAGraph | None = None  # so that the pool lives on, for the next graph

    def us(self, run: Callable[[], None]) -> float:
        """Median time of a replay of one graph of `run`."""
        if SMOKE:
            began = time.perf_counter()
            run()
            return (time.perf_counter() - began) * 1e6
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`, which collects garbage and empties the allocator's cache each time.
        graph.capture_begin(pool=self._pool)
        run()
        graph.capture_end()
        self._last = graph
        events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
        graph.replay()
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in pairwise(events)) * 1e3


@dataclass
class Tuned:
    """What was found for one number of tokens."""

    tokens: int
    before_us: float  # a layer
    after_us: float
    ways: dict[str, Way]
    linear_us: dict[str, float]  # how much longer the layer is for each linear
    before_ways: dict[str, Way]
    before_linear_us: dict[str, float]
    candidates: dict[str, list[tuple[Way, float]]]  # of each linear, a layer's time with it, the fastest first
    head_before_us: float
    head: list[tuple[Way, float]]


def tune(chain: Chain, tokens: int) -> Tuned:
    before: dict[str, Way] = {}
    right: dict[str, list[Way]] = {}
    for name in (*LAYER, "head"):
        linear = chain.model.linear(name)
        before[name] = choose(tokens, linear.n, linear.k) or CUBLAS
        errors = chain.errors(linear, tokens, _ways(linear, tokens))
        right[name] = [way for way, error in errors.items() if error < MAX_ERROR]
        for way in errors.keys() - set(right[name]):
            print(f"WRONG T={tokens} {name} {short(way)}: error {errors[way]:.3g}", flush=True)
        chain.set(linear, before[name])
    chain.attend(chain.values(tokens))
    before_us = chain.layer_us(tokens)
    before_linear_us = {name: before_us - chain.layer_us(tokens, without=name) for name in LAYER}

    best = dict(before)
    candidates = {name: _descend(chain, tokens, name, right[name], best) for name in LAYER}
    for name in LAYER:
        finalists = [way for way, _ in candidates[name][:FINALISTS]]
        _descend(chain, tokens, name, list(dict.fromkeys([*finalists, best[name]])), best)
    after_us = chain.layer_us(tokens)
    linear_us = {name: after_us - chain.layer_us(tokens, without=name) for name in LAYER}
    head = sorted(((way, chain.head_us(tokens, way)) for way in right["head"]), key=lambda item: item[1])
    print(f"T={tokens}", flush=True)
    for name in LAYER:
        print(f"    {name:8}{_ranking(candidates[name])}", flush=True)
    print(f"    head    {_ranking(head)}", flush=True)
    return Tuned(
        tokens, before_us, after_us, best, linear_us, before, before_linear_us, candidates,
        dict(head).get(before["head"], float("nan")), head,
    )  # fmt: skip


def _ways(linear: Linear, tokens: int) -> list[Way]:
    ways = ways_of(linear, tokens)
    return list(dict.fromkeys([*ways[:2], ways[-1]])) if SMOKE else ways


def _descend(chain: Chain, tokens: int, name: str, ways: list[Way], best: dict[str, Way]) -> list[tuple[Way, float]]:
    """Time each way with the other linears as they are; leave the fastest in place."""
    linear = chain.model.linear(name)
    times = []
    for way in ways:
        chain.set(linear, way)
        times.append((way, chain.layer_us(tokens)))
    times.sort(key=lambda item: item[1])
    best[name] = times[0][0]
    chain.set(linear, best[name])
    return times


def _ranking(times: list[tuple[Way, float]]) -> str:
    cublas = [f"{short(way)} {us:.2f}" for way, us in times[4:] if isinstance(way, str)]
    return ", ".join([f"{short(way)} {us:.2f}" for way, us in times[:4]] + cublas)


def compile_part(model: Model, token_counts: list[int], part: int, parts: int) -> None:
    """Launch one part of the ways once, so that Triton's cache has them."""
    chain = Chain(model, layers=1)
    keyed: dict[Any, tuple[Linear, int, Way]] = {}
    for tokens in token_counts:
        for name in (*LAYER, "head"):
            linear = model.linear(name)
            for way in _ways(linear, tokens):
                if not isinstance(way, str):
                    keyed.setdefault(compile_key(linear, tokens, way), (linear, tokens, way))
    for linear, tokens, way in list(keyed.values())[part::parts]:
        chain.set(linear, way)
        values = chain.values(tokens)
        try:
            if linear.name == "head":
                chain.logits(values["residual"], None)
            else:
                chain.apply(linear.name, chain.layers[0], values)
        except CANNOT_RUN:
            continue  # reported where it would be timed


def compile_all(workers: int, *, script: str, arguments: list[str]) -> None:
    """Have processes of the script itself compile a part each."""
    parts = [
        subprocess.Popen([sys.executable, script, *arguments, "--part", f"{part}/{workers}"]) for part in range(workers)
    ]
    codes = [process.wait() for process in parts]
    if any(codes):
        raise SystemExit("a compiling process failed")


def print_table(results: list[Tuned], num_layers: int) -> None:
    print("\n   T  layer us: before   after   step ms   head: before  after")
    for r in results:
        step = (r.after_us * num_layers + r.head[0][1]) / 1e3
        print(
            f"{r.tokens:4} {r.before_us:17.2f} {r.after_us:7.2f} {step:9.3f} {r.head_before_us:14.1f} "
            f"{r.head[0][1]:6.1f}"
        )
    for r in results:
        for name in LAYER:
            was = f"{short(r.before_ways[name])} {r.before_linear_us[name]:.2f}"
            print(f"{r.tokens:4} {name:8} {r.linear_us[name]:6.2f} {short(r.ways[name]):45} was {was}")
        print(f"{r.tokens:4} head     {r.head[0][1]:6.1f} {short(r.head[0][0])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smoke" if SMOKE else "0.6b", choices=list(MODELS))
    parser.add_argument("--tokens", default="1,8,64" if SMOKE else ",".join(map(str, TOKENS)))
    parser.add_argument("--workers", type=int, default=1 if SMOKE else 16, help="processes that compile")
    parser.add_argument("--json", type=Path, help="write all times here")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes under Triton's interpreter")
    parser.add_argument("--part", help="compile one part, for the parent process")
    arguments = parser.parse_args()
    began = time.perf_counter()
    torch.manual_seed(0)
    model = MODELS[arguments.model]
    token_counts = [int(count) for count in arguments.tokens.split(",")]
    with torch.inference_mode():
        if arguments.part:
            part, parts = map(int, arguments.part.split("/"))
            compile_part(model, token_counts, part, parts)
            return
        if not SMOKE:
            compile_all(arguments.workers, script=__file__, arguments=sys.argv[1:])
            print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
        results = []
        with nullcontext() if SMOKE else torch.cuda.stream(torch.cuda.Stream()):
            chain = Chain(model, layers=model.layers)
            for tokens in token_counts:
                results.append(tune(chain, tokens))
                print(f"after {time.perf_counter() - began:.0f} s", flush=True)
    print_table(results, {"8b": 32}.get(arguments.model, model.layers))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1, default=repr))


if __name__ == "__main__":
    main()
