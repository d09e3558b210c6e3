"""Check and time the ways to compute a layer's linear parts, with weights that L2 cannot hold.

Every way is all that the decoder's operation needs, in one CUDA graph of launches over different weights: the norm in
front (fused, or as a kernel), the product, SiLU or the residual's sum. Columns, us:

    fused   multiply-adds, the norm inside (linear_fma)
    dot     norm kernel, then the tensor-core kernel (linear_dot) in its best configuration
    cuBLAS  norm kernel, torch.mm or addmm, SiLU kernel
    chosen  what `choose` names; floor: weights and tokens at the device's bandwidth

Then, for each number of tokens, a layer's sum and the linears of a step; and with 64 tokens or more, bare products by
cuBLAS: torch.mm of the weights as they lie, of weights laid out [K, N], and of cublasLt. `--models 0.6b,8b,135m`,
`--tokens 1,8`, `--best 3` to print more configurations, or `--smoke` without a GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

SMOKE = "--smoke" in sys.argv
if SMOKE:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from gpu_runner.kernels import linear, norm_rope, reference  # noqa: E402
from gpu_runner.kernels.linear import SplitScratch  # noqa: E402
from gpu_runner.kernels.linear_config import (  # noqa: E402
    MIN_HEAD_ROWS,
    NUM_PROGRAMS,
    DotConfig,
    FmaConfig,
    LinearConfig,
    choose,
    fitted,
)

DEVICE = "cpu" if SMOKE else "cuda"
DTYPE = torch.float32 if SMOKE else torch.bfloat16
PDL = not SMOKE
EPS = 1e-6
FLOOR_BYTES_PER_US = 4.5e6
FLOOR_FLOPS_PER_US = 750e6
ROTATED_BYTES = 1 << 14 if SMOKE else 256 << 20  # of weights: several times L2
MIN_LAUNCHES = 2 if SMOKE else 16
REPLAYS = 7
MANY_TOKENS = 64
NORMED = ("norm_linear", "norm_gate_up")
# layers, then each operation with [N, K]
MODELS: dict[str, tuple[int, dict[str, tuple[str, int, int]]]] = {
    "0.6b": (
        28,
        {
            "qkv": ("norm_linear", 4096, 1024),
            "o": ("linear_add", 1024, 2048),
            "gate_up": ("norm_gate_up", 6144, 1024),
            "down": ("linear_add", 1024, 3072),
            "head": ("linear", 151936, 1024),
        },
    ),
    "8b": (
        32,
        {
            "qkv": ("norm_linear", 6144, 4096),
            "o": ("linear_add", 4096, 4096),
            "gate_up": ("norm_gate_up", 28672, 4096),
            "down": ("linear_add", 4096, 14336),
            "head": ("linear", 128256, 4096),
        },
    ),
    "135m": (
        30,
        {
            "qkv": ("norm_linear", 960, 576),
            "o": ("linear_add", 576, 576),
            "gate_up": ("norm_gate_up", 3072, 576),
            "down": ("linear_add", 576, 1536),
            "head": ("linear", 49152, 576),
        },
    ),
    "smoke": (
        2,
        {
            "qkv": ("norm_linear", 96, 72),
            "o": ("linear_add", 72, 136),
            "gate_up": ("norm_gate_up", 80, 72),
            "down": ("linear_add", 72, 40),
            "head": ("linear", 100, 72),
        },
    ),
}
TOKENS = {"0.6b": (2, 4, 8, 16, 32, 64, 256, 512), "8b": (2, 8, 32, 64, 256), "135m": (1, 8, 64), "smoke": (2, 8, 64)}

Way = LinearConfig | None  # None: cuBLAS


@dataclass(frozen=True)
class Case:
    """One operation's shape at one number of tokens."""

    model: str
    layer: str
    op: str
    n: int
    k: int
    tokens: int

    @property
    def columns(self) -> int:
        return self.n // 2 if self.op == "norm_gate_up" else self.n

    @property
    def floor_us(self) -> float:
        values = self.n * self.k + self.tokens * (self.k + self.columns * (2 if self.op == "linear_add" else 1))
        flops = 2 * self.tokens * self.n * self.k
        return max(values * DTYPE.itemsize / FLOOR_BYTES_PER_US, flops / FLOOR_FLOPS_PER_US)

    def chosen(self) -> Way:
        return choose(self.tokens, self.n, self.k)

    def ways(self) -> list[Way]:
        """The chosen one first."""
        ways: list[Way] = [self.chosen(), *self._dot_configs(), None]
        if self.tokens <= 4:
            head = self.n >= MIN_HEAD_ROWS
            ways.append(choose(1, self.n, self.k))
            ways.append(
                FmaConfig(rows=4, block_k=min(1024, _power_of_two(self.k)), depth=2 if head else 4, num_warps=4)
            )
        return list(dict.fromkeys(ways))

    def _dot_configs(self) -> list[DotConfig]:
        small_k = self.k <= 3072
        pipelined = DotConfig(rows=64, block_k=128, stages=4, num_warps=4, prefetch_k=512, weight_first=True)
        if self.tokens < MANY_TOKENS:
            cuts = [pipelined]
            if self.n >= MIN_HEAD_ROWS:
                return [fitted(cut, self.n, self.k) for cut in cuts]
            if small_k:  # the weights of a program's part in registers before the wait
                cuts += [
                    DotConfig(rows=64, block_k=512, depth=1, num_warps=8, weight_first=True),
                    DotConfig(rows=64, block_k=256, depth=1, num_warps=8, weight_first=True),
                    DotConfig(rows=32, block_k=512, depth=1, num_warps=4),
                ]
                if self.tokens <= 16:  # above, registers do not suffice
                    cuts.append(DotConfig(rows=16, block_k=1024, depth=1, num_warps=4))
            else:
                cuts += [
                    DotConfig(rows=128, block_k=64, stages=6, num_warps=8, prefetch_k=256, weight_first=True),
                    DotConfig(rows=64, block_k=128, stages=6, num_warps=4, prefetch_k=512, weight_first=True),
                ]
            return [fitted(cut, self.n, self.k) for cut in cuts]
        if self.tokens <= 128:
            cuts = [
                pipelined,
                DotConfig(rows=64, block_k=128, stages=4, num_warps=4, prefetch_k=512),
                DotConfig(rows=32, block_k=128, stages=4, num_warps=4, prefetch_k=512),
                DotConfig(rows=128, block_k=64, stages=5, num_warps=8, prefetch_k=256, weight_first=True),
            ]
            if small_k:
                cuts.append(DotConfig(rows=64, block_k=512, depth=1, num_warps=8, weight_first=True))
        else:
            cuts = [
                DotConfig(rows=128, block_k=64, stages=4, num_warps=8, tokens=128),
                DotConfig(rows=128, block_k=64, stages=4, num_warps=4, tokens=64),
                DotConfig(rows=64, block_k=64, stages=5, num_warps=4, tokens=64),
            ]
            if self.n >= 8192:  # the larger, the fewer times a tile of tokens is read
                cuts = [cuts[0], DotConfig(rows=256, block_k=64, stages=4, num_warps=8, tokens=128)]
        return [self._fitted(cut) for cut in cuts]

    def _fitted(self, cut: DotConfig) -> DotConfig:
        """Split, but of many tokens, whose parts are traffic too, only where half of the device would idle."""
        token_tiles = -(-self.tokens // cut.tokens)
        config = fitted(cut, self.n, self.k, token_tiles=token_tiles)
        filled = token_tiles * (self.n // cut.rows) > NUM_PROGRAMS // 2
        return replace(config, split_k=1) if filled and self.tokens > MANY_TOKENS else config


class Bench:
    """The tensors of a case, weights several times."""

    def __init__(self, case: Case, *, copies: int | None = None) -> None:
        self.case = case
        if copies is None:
            copies = max(2, min(64, -(-ROTATED_BYTES // (case.n * case.k * DTYPE.itemsize))))
        self.x = _normal(case.tokens, case.k)
        self.norm = _normal(case.k)
        self.weights = [_normal(case.n, case.k) / case.k**0.5 for _ in range(copies)]
        self.out_dtype = torch.float32 if case.op == "linear" else DTYPE
        self.out = torch.zeros(case.tokens, case.columns, dtype=self.out_dtype, device=DEVICE)
        self.scratch = scratch_for(case)

    def launch(self, way: Way, weight: Tensor, *, pdl: bool) -> None:
        launch_op(self.case.op, self.x, self.norm, weight, self.out, way, self.scratch, pdl=pdl)

    def errors(self, ways: list[Way]) -> dict[Way, float]:
        """Relative, of the whole; infinite if a way cannot repeat itself exactly."""
        case, weight = self.case, self.weights[0]
        x = reference.rms_norm(self.x, self.norm, EPS) if case.op in NORMED else self.x
        residual = _normal(case.tokens, case.columns)
        expected = reference.linear(x.float(), weight.float(), None).to(self.out_dtype)
        if case.op == "norm_gate_up":
            expected = reference.silu_mul(expected)
        elif case.op == "linear_add":
            expected = residual + expected
        errors: dict[Way, float] = {}
        for way in ways:
            results = []
            for _ in range(2):
                self.out.copy_(residual) if case.op == "linear_add" else self.out.fill_(float("nan"))
                self.launch(way, weight, pdl=PDL)
                results.append(self.out.clone())
            error = float((results[0].float() - expected.float()).norm() / expected.float().norm())
            errors[way] = error if torch.equal(*results) else float("inf")
        return errors

    def time_us(self, way: Way, *, pdl: bool = PDL) -> float:
        return self._time(self.weights, lambda weight: self.launch(way, weight, pdl=pdl))

    def bare_cublas_us(self) -> tuple[float, float, float]:
        """The product alone: weights as they lie, weights laid out [K, N], and cublasLt."""
        out = torch.empty(self.case.tokens, self.case.n, dtype=DTYPE, device=DEVICE)
        plain = self._time(self.weights, lambda weight: torch.mm(self.x, weight.t(), out=out))
        turned = [weight.t().contiguous() for weight in self.weights]
        turned_us = self._time(turned, lambda weight: torch.mm(self.x, weight, out=out))
        if SMOKE:
            return plain, turned_us, plain
        before = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library("cublaslt")
        lt = self._time(self.weights, lambda weight: torch.mm(self.x, weight.t(), out=out))
        torch.backends.cuda.preferred_blas_library(before)
        return plain, turned_us, lt

    def _time(self, weights: list[Tensor], call: Callable[[Tensor], object]) -> float:
        count = max(MIN_LAUNCHES, len(weights))
        return graph_us(lambda: [call(weights[i % len(weights)]) for i in range(count)]) / count


def scratch_for(case: Case) -> SplitScratch:
    splits = [way for way in case.ways() if isinstance(way, DotConfig) and way.split_k > 1]
    return SplitScratch.allocate(
        max_values=max((way.split_k * case.tokens * case.n for way in splits), default=1),
        max_tiles=-(-case.n // 16) * -(-case.tokens // 16),
        device=DEVICE,
    )


def launch_op(
    op: str, x: Tensor, norm: Tensor, weight: Tensor, out: Tensor, way: Way, scratch: SplitScratch, *, pdl: bool
) -> None:
    """An operation into `out`, as `CudaOps` would compute it in that way."""
    if isinstance(way, FmaConfig) and op in NORMED:
        fused = linear.norm_linear if op == "norm_linear" else linear.norm_gate_up
        fused(x, norm, EPS, weight, out=out, config=way, pdl=pdl)
        return
    if op in NORMED:
        x = norm_rope.rms_norm(x, norm, EPS, pdl=pdl)
    if way is None:
        launch_cublas(op, x, weight, out, pdl=pdl)
    elif op == "linear_add":
        linear.linear_add(x, weight, out, config=way, scratch=scratch, pdl=pdl)
    elif op == "norm_gate_up":
        linear.gate_up(x, weight, out=out, config=way, scratch=scratch, pdl=pdl)
    else:
        linear.linear(x, weight, out=out, config=way, scratch=scratch, pdl=pdl)


def launch_cublas(op: str, x: Tensor, weight: Tensor, out: Tensor, *, pdl: bool) -> None:
    if op == "linear_add":
        torch.addmm(out, x, weight.t(), out=out)
    elif op == "norm_gate_up":
        norm_rope.silu_mul(torch.mm(x, weight.t()), out=out, pdl=pdl)
    elif out.dtype == x.dtype:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)


def graph_us(calls: Callable[[], object]) -> float:
    """Median of replays of one graph of `calls`."""
    if SMOKE:
        began = time.perf_counter()
        calls()
        return (time.perf_counter() - began) * 1e6
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        calls()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[2:])


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE)


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def cases(models: list[str], tokens: tuple[int, ...] | None = None) -> list[Case]:
    return [
        Case(model, layer, *shape, count)
        for model in models
        for count in tokens or TOKENS[model]
        for layer, shape in MODELS[model][1].items()
    ]


def compile_all(arguments: list[str], workers: int) -> None:
    """Fill Triton's cache from several processes: one after the other the kernels would take minutes."""
    parts = [
        subprocess.Popen([sys.executable, __file__, *arguments, "--part", f"{part}/{workers}"])
        for part in range(workers)
    ]
    codes = [process.wait() for process in parts]
    if any(codes):
        raise SystemExit("a compiling process failed")


def compile_part(selected: list[Case], part: int, parts: int) -> None:
    for case in selected[part::parts]:
        bench = Bench(case, copies=1)
        for way in case.ways():
            bench.launch(way, bench.weights[0], pdl=PDL)
    if not SMOKE:
        torch.cuda.synchronize()


def short(way: Way) -> str:
    if way is None:
        return "cuBLAS"
    if isinstance(way, FmaConfig):
        return f"fma r{way.rows} k{way.block_k} d{way.depth} w{way.num_warps}"
    ahead = f"d{way.depth}" if way.depth else f"s{way.stages}"
    tokens = f" t{way.tokens}" if way.tokens != MANY_TOKENS else ""
    return (
        f"dot r{way.rows} k{way.block_k} {ahead} w{way.num_warps} split{way.split_k} pf{way.prefetch_k}{tokens}"
        f"{' W' if way.weight_first else ''}"
    )


@dataclass(frozen=True)
class Result:
    case: Case
    times: dict[Way, float]  # of the right ways, the fastest first
    all_right: bool

    @property
    def best(self) -> Way:
        return next(iter(self.times))

    def kind_us(self, kind: type | None) -> float:
        """Of the fastest of a kind; NaN if there is none."""
        times = [us for way, us in self.times.items() if (way is None if kind is None else isinstance(way, kind))]
        return min(times, default=float("nan"))


def run_case(case: Case, num_best: int) -> Result:
    """Print the case's line."""
    bench = Bench(case)
    errors = bench.errors(case.ways())
    right = [way for way, error in errors.items() if error < 1e-2]
    for way in errors.keys() - set(right):
        print(f"WRONG {case} {short(way)}: error {errors[way]:.3g}")
    if not right:
        raise SystemExit("no way is right")
    times = dict(sorted(((way, bench.time_us(way)) for way in right), key=lambda item: item[1]))
    result = Result(case, times, len(right) == len(errors))
    chosen = case.chosen()
    columns = [*(result.kind_us(kind) for kind in (FmaConfig, DotConfig, None)), times.get(chosen, float("nan"))]
    best = ", ".join(f"{short(way)} {us:.2f}" for way, us in list(times.items())[:num_best])
    line = f"{case.model:>5} {case.layer:8}{case.tokens:4} {' '.join(f'{us:7.2f}' for us in columns)} "
    line += f"{case.floor_us:7.2f} {max(errors.values()):7.1e} {best}"
    if result.best != chosen:
        line += "  != " + short(chosen)
    if case.tokens >= MANY_TOKENS:
        line += "  mm {:.2f}, [K, N] {:.2f}, Lt {:.2f}".format(*bench.bare_cublas_us())
    print(line.replace("nan", "  -"), flush=True)
    return result


def sum_up(results: list[Result]) -> None:
    """A layer's and a step's linears at one number of tokens: each alone, then all in one graph, chained."""
    case = results[0].case
    num_layers, shapes = MODELS[case.model]
    counts = [num_layers if layer != "head" else 1 for layer in shapes]

    def sums(us: Callable[[Result], float]) -> str:
        """Of a layer, us, and of a step, ms; NaN if one is missing."""
        times = [us(result) for result in results]
        step = sum(count * time for count, time in zip(counts, times, strict=True))
        return f"{sum(times[:-1]):.1f} us, {step / 1e3:.3f} ms"

    best = sums(lambda result: result.times[result.best])
    chosen = sums(lambda result: result.times.get(result.case.chosen(), float("nan")))
    cublas = sums(lambda result: result.kind_us(None))
    floor = sums(lambda result: result.case.floor_us)
    print(
        f"{case.model}, {case.tokens} tokens, a layer and a step: best {best}; chosen {chosen}; cuBLAS {cublas}; "
        f"floor {floor}; best in one graph {chained_ms(results, num_layers):.3f} ms",
        flush=True,
    )


def chained_ms(results: list[Result], num_layers: int) -> float:
    """The linears of a step in their best ways, each with its own weights; attention is left out."""
    of = {result.case.layer: result for result in results}
    tokens = results[0].case.tokens
    residual, norm = _normal(tokens, of["qkv"].case.k), _normal(of["qkv"].case.k)
    heads, inner = _normal(tokens, of["o"].case.k), _normal(tokens, of["down"].case.k)
    ins = {"qkv": residual, "o": heads, "gate_up": residual, "down": inner, "head": residual}
    outs = {"o": residual, "gate_up": inner, "down": residual}
    outs["qkv"] = _normal(tokens, of["qkv"].case.n)
    outs["head"] = torch.empty(tokens, of["head"].case.n, dtype=torch.float32, device=DEVICE)
    scratch = max((scratch_for(result.case) for result in results), key=lambda scratch: scratch.partials.numel())
    scratch = SplitScratch.allocate(max_values=scratch.partials.numel(), max_tiles=1 << 18, device=DEVICE)
    sequence = [of[name] for _ in range(num_layers) for name in ("qkv", "o", "gate_up", "down")] + [of["head"]]
    weights = [_normal(result.case.n, result.case.k) / result.case.k**0.5 for result in sequence]

    def calls() -> None:
        for result, weight in zip(sequence, weights, strict=True):
            layer = result.case.layer
            launch_op(result.case.op, ins[layer], norm, weight, outs[layer], result.best, scratch, pdl=PDL)

    return graph_us(calls) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="smoke" if SMOKE else "0.6b,8b", help="of 0.6b, 8b, 135m")
    parser.add_argument("--tokens", help="e.g. 1,8; by default some for each model")
    parser.add_argument("--best", type=int, default=2, help="fastest ways printed for each line")
    parser.add_argument("--workers", type=int, default=16, help="processes that compile")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes under Triton's interpreter")
    parser.add_argument("--part", help="compile one part, for the parent process")
    arguments = parser.parse_args()
    tokens = tuple(int(count) for count in arguments.tokens.split(",")) if arguments.tokens else None
    began = time.perf_counter()
    torch.manual_seed(0)
    selected = cases(arguments.models.split(","), tokens)
    if arguments.part:
        part, parts = arguments.part.split("/")
        compile_part(selected, int(part), int(parts))
        return
    if not SMOKE:
        compile_all(sys.argv[1:], arguments.workers)
    print(f"compiled after {time.perf_counter() - began:.0f} s")
    print("model layer      T   fused     dot  cuBLAS  chosen   floor   error fastest  != chosen")
    results: list[Result] = []
    for case in selected:
        results.append(run_case(case, arguments.best))
        if case.layer == "head":
            sum_up(results[-len(MODELS[case.model][1]) :])
    print(f"done after {time.perf_counter() - began:.0f} s")
    if not all(result.all_right for result in results):
        raise SystemExit("some ways are wrong: see above")


if __name__ == "__main__":
    main()
