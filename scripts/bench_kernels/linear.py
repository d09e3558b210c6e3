"""Tune a decoder's linear layers where they run: in one CUDA graph of all layers, each with weights of its own.

A layer is norm + qkv, a stand-in for attention (one small kernel with a programmatic launch), o + residual, norm +
gate/up + SiLU, down + residual, by `CudaOps` itself, so that what one kernel leaves for the next (its tail, the wait,
the cache) is counted. For each number of tokens every way of one linear is timed with the others fixed, linear after
linear, then again with the best few. Each way is first checked against float32. The head is timed alone.

Prints, for each number of tokens, us per layer with what `choose` names (before), with the best (after), with the best
and no norms, and the floor: the weights' bytes or the arithmetic, whichever takes longer. Of each linear, by how much
the layer is longer than without it: of what `choose` names and of cuBLAS, the others at their best, and of the best.
`--models 0.6b,8b`, `--tokens 1,8`, `--no-head`, `--json FILE`, or `--smoke` without a GPU.
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
from itertools import pairwise, product
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
BYTES_PER_US = 4.5e6
FLOPS_PER_US = 700e6
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

    def floor_us(self, name: str, tokens: int) -> float:
        """Of a linear on an H200."""
        weights = self.linear(name).n * self.linear(name).k
        return max(2 * weights / BYTES_PER_US, 2 * weights * tokens / FLOPS_PER_US)

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


class _OpsWithoutNorms(CudaOps):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x


class Chain:
    """A model's layers and head, and the way in which each linear is to be computed."""

    def __init__(self, model: Model, *, layers: int, head: bool) -> None:
        self.model = model
        self.ways: dict[tuple[int, int], Way] = {}  # by [n, k] of the weight
        self._timer = GraphTimer()
        self.norm = random_normal(model.hidden)
        self.layers = [{name: self._weight(model.linear(name)) for name in LAYER} for _ in range(layers)]
        self.head = self._weight(model.linear("head")) if head else None
        self.names = (*LAYER, "head") if head else LAYER
        self.ops = CudaOps(torch.device(DEVICE), pdl=not SMOKE, choose=self._choose)
        self.ops_without_norms = _OpsWithoutNorms(torch.device(DEVICE), pdl=not SMOKE, choose=self._choose)

    def set(self, linear: Linear, way: Way) -> None:
        self.ways[linear.n, linear.k] = way

    def apply(self, name: str, weights: dict[str, Tensor], values: dict[str, Tensor], *, norms: bool = True) -> None:
        """One linear as the decoder calls it. values: the tensors between the linears."""
        ops, residual = self.ops if norms else self.ops_without_norms, values["residual"]
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

    def layer_us(self, tokens: int, *, without: str | None = None, norms: bool = True) -> float:
        values = self.values(tokens)

        def run() -> None:
            for weights in self.layers:
                for name in LAYER:
                    if name == "o":
                        self.attend(values)
                    if name != without:
                        self.apply(name, weights, values, norms=norms)

        return self._timer.us(run) / len(self.layers)

    def head_us(self, tokens: int, way: Way) -> float:
        self.set(self.model.linear("head"), way)
        residual = random_normal(tokens, self.model.hidden)
        assert self.head is not None
        turned = self.head.t().contiguous() if way == CUBLAS_TURNED else None

        def run() -> None:
            for _ in range(HEAD_LAUNCHES):
                self.logits(residual, turned)

        return self._timer.us(run) / HEAD_LAUNCHES

    def logits(self, residual: Tensor, turned: Tensor | None) -> Tensor:
        assert self.head is not None
        hidden = self.ops.rms_norm(residual, self.norm, EPS)
        return self.ops.logits(hidden, self.head) if turned is None else _wide_mm(hidden, turned)

    def errors(self, linear: Linear, tokens: int, ways: Iterable[Way]) -> dict[Way, float]:
        """Relative, of the whole, of the ways that the device can run; infinite for one that does not repeat itself."""
        given = self.values(tokens)
        weights = self.layers[0] if self.head is None else {**self.layers[0], "head": self.head}
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
            turned = weights["head"].t().contiguous() if way == CUBLAS_TURNED else None
            return self.logits(values["residual"], turned)
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
    without_norms_us: float
    ways: dict[str, Way]
    linear_us: dict[str, float]  # how much longer the layer is for each linear
    before_ways: dict[str, Way]
    candidates: dict[str, list[tuple[Way, float]]]  # of each linear, a layer's time with it, the fastest first
    finals: dict[str, dict[Way, float]]  # the same, of the best few, what was before and cuBLAS, with the others' best
    worst_error: float
    head: list[tuple[Way, float]]


def tune(chain: Chain, tokens: int) -> Tuned:
    before: dict[str, Way] = {}
    right: dict[str, list[Way]] = {}
    worst_error = 0.0
    for name in chain.names:
        linear = chain.model.linear(name)
        before[name] = choose(tokens, linear.n, linear.k) or CUBLAS
        errors = chain.errors(linear, tokens, _ways(linear, tokens))
        right[name] = [way for way, error in errors.items() if error < MAX_ERROR]
        worst_error = max([worst_error, *(errors[way] for way in right[name])])
        for way in errors.keys() - set(right[name]):
            print(f"WRONG T={tokens} {name} {short(way)}: error {errors[way]:.3g}", flush=True)
        chain.set(linear, before[name])
    chain.attend(chain.values(tokens))
    before_us = chain.layer_us(tokens)

    best = dict(before)
    candidates = {name: _descend(chain, tokens, name, right[name], best) for name in LAYER}
    finals: dict[str, dict[Way, float]] = {}
    for name in LAYER:
        finalists = [way for way, _ in candidates[name][:FINALISTS]]
        ways = list(dict.fromkeys([*finalists, before[name], CUBLAS]))
        finals[name] = dict(_descend(chain, tokens, name, ways, best))
    after_us = chain.layer_us(tokens)
    without_norms_us = chain.layer_us(tokens, norms=False)
    linear_us = {name: after_us - chain.layer_us(tokens, without=name) for name in LAYER}
    head: list[tuple[Way, float]] = []
    if "head" in chain.names:
        head = sorted(((way, chain.head_us(tokens, way)) for way in right["head"]), key=lambda item: item[1])
    return Tuned(
        tokens, before_us, after_us, without_norms_us, best, linear_us, before, candidates, finals, worst_error, head
    )


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


def compile_part(names: list[str], token_counts: list[int], part: int, parts: int, *, head: bool) -> None:
    """Launch one part of the ways once, so that Triton's cache has them."""
    keyed: dict[Any, tuple[str, Linear, int, Way]] = {}
    for model, tokens, name in product(names, token_counts, (*LAYER, "head") if head else LAYER):
        linear = MODELS[model].linear(name)
        for way in _ways(linear, tokens):
            if not isinstance(way, str):
                keyed.setdefault(compile_key(linear, tokens, way), (model, linear, tokens, way))
    mine = list(keyed.values())[part::parts]
    for model in names:
        chain = Chain(MODELS[model], layers=1, head=head)
        for _, linear, tokens, way in (item for item in mine if item[0] == model):
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


def print_table(model: Model, results: list[Tuned], num_layers: int) -> None:
    for r in results:
        floors = {name: model.floor_us(name, r.tokens) for name in LAYER}
        head = f" head {r.head[0][1]:.1f} {short(r.head[0][0])}" if r.head else ""
        print(
            f"T={r.tokens} layer us: before {r.before_us:.2f} after {r.after_us:.2f} without norms "
            f"{r.without_norms_us:.2f} floor {sum(floors.values()):.2f}; saved a step "
            f"{(r.before_us - r.after_us) * num_layers / 1e3:.3f} ms; worst error {r.worst_error:.1e}{head}"
        )
        for name in LAYER:
            without = r.after_us - r.linear_us[name]
            times = r.finals[name]
            print(
                f"{r.tokens:5} {name:8} floor {floors[name]:6.2f} best {times[r.ways[name]] - without:6.2f} "
                f"was {times[r.before_ways[name]] - without:6.2f} cuBLAS {times[CUBLAS] - without:6.2f}  "
                f"{short(r.ways[name])} (was {short(r.before_ways[name])})"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="smoke" if SMOKE else "0.6b,8b", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--tokens", default="1,8,64" if SMOKE else ",".join(map(str, TOKENS)))
    parser.add_argument("--workers", type=int, default=1 if SMOKE else 16, help="processes that compile")
    parser.add_argument("--no-head", action="store_true", help="of a layer's linears only")
    parser.add_argument("--json", type=Path, help="write all times here")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes under Triton's interpreter")
    parser.add_argument("--part", help="compile one part, for the parent process")
    arguments = parser.parse_args()
    began = time.perf_counter()
    torch.manual_seed(0)
    names, head = arguments.models.split(","), not arguments.no_head
    token_counts = [int(count) for count in arguments.tokens.split(",")]
    found: dict[str, list[Tuned]] = {}
    with torch.inference_mode():
        if arguments.part:
            part, parts = map(int, arguments.part.split("/"))
            compile_part(names, token_counts, part, parts, head=head)
            return
        if not SMOKE:
            compile_all(arguments.workers, script=__file__, arguments=sys.argv[1:])
            print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
        for name in names:
            model = MODELS[name]
            with nullcontext() if SMOKE else torch.cuda.stream(torch.cuda.Stream()):
                chain = Chain(model, layers=model.layers, head=head)
                found[name] = [tune(chain, tokens) for tokens in token_counts]
            print(f"{name} after {time.perf_counter() - began:.0f} s", flush=True)
            print_table(model, found[name], {"8b": 32}.get(name, model.layers))
    if arguments.json:
        results = {name: [asdict(result) for result in results] for name, results in found.items()}
        arguments.json.write_text(json.dumps(results, indent=1, default=repr))


if __name__ == "__main__":
    main()
