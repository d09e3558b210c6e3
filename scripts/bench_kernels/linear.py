"""Check and time the skinny linear kernels against cuBLAS and the floor, with weights that L2 cannot hold.

Each line: the best configuration of ours in a CUDA graph of launches over different weights, with PDL; the one that
`choose` names, with and without PDL; cuBLAS for the bare product; the floor at the device's bandwidth. At the end, the
0.6B model's linear layers of a whole step in one graph. `--models 0.6b,8b,135m`, `--tokens 1,8`, or `--smoke` without
a GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

SMOKE = "--smoke" in sys.argv
if SMOKE:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from gpu_runner.kernels import linear, reference  # noqa: E402
from gpu_runner.kernels.linear import SplitScratch  # noqa: E402
from gpu_runner.kernels.linear_config import DotConfig, FmaConfig, LinearConfig, choose, split_for  # noqa: E402

DEVICE = "cpu" if SMOKE else "cuda"
DTYPE = torch.float32 if SMOKE else torch.bfloat16
PDL = not SMOKE
EPS = 1e-6
FLOOR_BYTES_PER_US = 4.5e6
ROTATED_BYTES = 1 << 14 if SMOKE else 256 << 20  # of weights: several times L2
MIN_LAUNCHES = 2 if SMOKE else 16
MODELS = {
    "0.6b": {
        "qkv": ("norm_linear", 4096, 1024),
        "o": ("linear_add", 1024, 2048),
        "gate_up": ("norm_gate_up", 6144, 1024),
        "down": ("linear_add", 1024, 3072),
        "head": ("linear", 151936, 1024),
    },
    "8b": {
        "qkv": ("norm_linear", 6144, 4096),
        "o": ("linear_add", 4096, 4096),
        "gate_up": ("norm_gate_up", 28672, 4096),
        "down": ("linear_add", 4096, 14336),
        "head": ("linear", 128256, 4096),
    },
    "135m": {
        "qkv": ("norm_linear", 960, 576),
        "o": ("linear_add", 576, 576),
        "gate_up": ("norm_gate_up", 3072, 576),
        "down": ("linear_add", 576, 1536),
        "head": ("linear", 49152, 576),
    },
    "smoke": {
        "qkv": ("norm_linear", 96, 72),
        "gate_up": ("norm_gate_up", 72, 40),
        "down": ("linear_add", 40, 136),
        "head": ("linear", 100, 40),
    },
}
TOKENS = {"0.6b": (1, 4, 8, 16, 32), "8b": (1, 8, 32), "135m": (1, 8), "smoke": (1, 8)}


@dataclass(frozen=True)
class Case:
    """One layer shape at one number of tokens."""

    model: str
    layer: str
    op: str
    n: int
    k: int
    tokens: int

    @property
    def floor_us(self) -> float:
        columns = self.n // 2 if self.op == "norm_gate_up" else self.n
        values = self.n * self.k + self.tokens * (self.k + columns * (2 if self.op == "linear_add" else 1))
        return values * DTYPE.itemsize / FLOOR_BYTES_PER_US

    def chosen(self) -> LinearConfig | None:
        return choose(self.tokens, self.n, self.k, norm=self.op.startswith("norm"))

    def candidates(self) -> list[LinearConfig]:
        """The chosen configuration first, if any; at the crossovers the other kernel too."""
        fma, dot = self._fma_candidates(), self._dot_candidates()
        configs = fma if self.tokens < 4 else [*fma[:3], *dot[:2]] if self.tokens == 4 else dot
        if self.tokens == 8:
            configs = [*dot, fma[0]]
        if (chosen := self.chosen()) is not None:
            configs = [chosen, *configs]
        return list(dict.fromkeys(configs))

    def _fma_candidates(self) -> list[LinearConfig]:
        wide = 1 << (self.k - 1).bit_length()
        cuts = [(8, wide, 1, 4), (4, wide, 1, 4), (8, 256, 4, 4), (16, wide, 1, 8), (4, wide, 1, 2)]
        if self.k > 1024:
            cuts = [(4, 1024, 4, 4), (8, 512, 4, 4), (4, 512, 8, 2), (4, 2048, 4, 8), (2, 1024, 4, 4), (8, 1024, 2, 4)]
        return [FmaConfig(rows=rows, block_k=k, depth=depth, num_warps=warps) for rows, k, depth, warps in cuts]

    def _dot_candidates(self) -> list[LinearConfig]:
        part = 1 << (self.k - 1).bit_length()
        cuts = [  # rows, block_k, stages, warps, weight_first, prefetch_k
            (32, 128, 4, 4, False, 1024),
            (16, 128, 4, 2, False, 1024),
            (32, 128, 4, 4, False, 0),
            (64, 128, 4, 4, True, 512),
            (16, 256, 4, 4, False, 1024),
            (64, 64, 6, 4, True, 0),
        ]
        return [
            DotConfig(
                rows=rows,
                block_k=block_k,
                stages=stages,
                num_warps=warps,
                split_k=(split := split_for(self.n, self.k, rows=rows, block_k=block_k)),
                prefetch_k=min(prefetch, part // split),
                weight_first=first,
            )
            for rows, block_k, stages, warps, first, prefetch in cuts
        ]


class Bench:
    """The tensors of a case, weights several times."""

    def __init__(self, case: Case, *, copies: int | None = None) -> None:
        self.case = case
        if copies is None:
            copies = max(2, min(64, -(-ROTATED_BYTES // (case.n * case.k * DTYPE.itemsize))))
        self.x = _normal(case.tokens, case.k)
        self.norm = _normal(case.k)
        self.weights = [_normal(case.n, case.k) / case.k**0.5 for _ in range(copies)]
        self.residual = _normal(case.tokens, case.n)
        self.out = torch.empty(
            case.tokens, case.n // 2 if case.op == "norm_gate_up" else case.n, dtype=DTYPE, device=DEVICE
        )
        splits = [config for config in case.candidates() if isinstance(config, DotConfig)]
        self.scratch = SplitScratch.allocate(
            max_values=max((c.split_k * case.tokens * case.n for c in splits if c.split_k > 1), default=1),
            max_tiles=-(-case.n // 16),
            device=DEVICE,
        )

    def launch(self, config: LinearConfig, weight: Tensor, *, pdl: bool) -> None:
        launch_op(self.case.op, self.x, self.norm, weight, self.out, config, self.scratch, pdl=pdl)

    def error(self, config: LinearConfig) -> float:
        """Relative, of the whole; infinite if the launch cannot repeat itself exactly."""
        case, weight = self.case, self.weights[0]
        x = reference.rms_norm(self.x, self.norm, EPS) if case.op.startswith("norm") else self.x
        expected = reference.linear(x.float(), weight.float(), None).to(DTYPE)
        if case.op == "norm_gate_up":
            expected = reference.silu_mul(expected)
        elif case.op == "linear_add":
            expected = self.residual + expected
        results = []
        for _ in range(2):
            if case.op == "linear_add":
                self.out.copy_(self.residual)
            else:
                self.out.fill_(float("nan"))
            self.launch(config, weight, pdl=PDL)
            results.append(self.out.clone())
        if not torch.equal(*results):
            return float("inf")
        return float((results[0].float() - expected.float()).norm() / expected.float().norm())

    def time_us(self, config: LinearConfig, *, pdl: bool) -> float:
        return self._time(lambda weight: self.launch(config, weight, pdl=pdl))

    def time_cublas_us(self) -> float:
        out = torch.empty(self.case.tokens, self.case.n, dtype=DTYPE, device=DEVICE)
        return self._time(lambda weight: torch.mm(self.x, weight.t(), out=out))

    def _time(self, call: Callable[[Tensor], object]) -> float:
        count = max(MIN_LAUNCHES, len(self.weights))
        return graph_us(lambda: [call(self.weights[i % len(self.weights)]) for i in range(count)]) / count


def launch_op(
    op: str,
    x: Tensor,
    norm: Tensor,
    weight: Tensor,
    out: Tensor,
    config: LinearConfig,
    scratch: SplitScratch,
    *,
    pdl: bool,
) -> None:
    if op == "linear_add":
        linear.linear_add(x, weight, out, config=config, scratch=scratch, pdl=pdl)
    elif op == "linear":
        linear.linear(x, weight, out=out, config=config, scratch=scratch, pdl=pdl)
    else:
        fused = linear.norm_linear if op == "norm_linear" else linear.norm_gate_up
        fused(x, norm, EPS, weight, out=out, config=config, scratch=scratch, pdl=pdl)


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
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[2:])


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE)


def cases(models: list[str], tokens: tuple[int, ...] | None = None) -> list[Case]:
    return [
        Case(model, layer, *shape, count)
        for model in models
        for layer, shape in MODELS[model].items()
        for count in tokens or TOKENS[model]
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


def compile_part(chosen: list[Case], part: int, parts: int) -> None:
    work = [(case, config) for case in chosen for config in case.candidates()]
    for case, config in work[part::parts]:
        bench = Bench(case, copies=1)
        for pdl in {PDL, PDL and config != case.chosen()}:
            bench.launch(config, bench.weights[0], pdl=pdl)
    if not SMOKE:
        torch.cuda.synchronize()


def short(config: LinearConfig | None) -> str:
    if config is None:
        return "cuBLAS"
    if isinstance(config, FmaConfig):
        return f"fma r{config.rows} k{config.block_k} d{config.depth} w{config.num_warps}"
    return (
        f"dot r{config.rows} k{config.block_k} s{config.stages} w{config.num_warps} split{config.split_k}"
        f" pf{config.prefetch_k}{' W' if config.weight_first else ''}"
    )


def run_case(case: Case) -> tuple[LinearConfig, bool]:
    """Print the case's line. Returns the fastest right configuration, and whether all were right."""
    bench = Bench(case)
    errors = {config: bench.error(config) for config in case.candidates()}
    right = [config for config, error in errors.items() if error < 1e-2]
    for config in errors.keys() - set(right):
        print(f"WRONG {case} {short(config)}: error {errors[config]:.3g}")
    if not right:
        raise SystemExit("no configuration is right")
    times = {config: bench.time_us(config, pdl=PDL) for config in right}
    best = min(times, key=lambda config: times[config])
    chosen = case.chosen()
    chosen_us = f"{times[chosen]:7.2f} {bench.time_us(chosen, pdl=False):7.2f}" if chosen in times else " " * 15
    print(
        f"{case.model:>5} {case.layer:8}{case.tokens:3} {times[best]:7.2f} {chosen_us} {bench.time_cublas_us():7.2f} "
        f"{case.floor_us:7.2f} {case.floor_us / times[best]:5.0%} {max(errors.values()):7.1e} "
        f"{short(best)}{'' if best == chosen else '  != ' + short(chosen)}",
        flush=True,
    )
    return best, len(right) == len(errors)


def step_of_linears(best: dict[Case, LinearConfig], model: str, tokens: int, num_layers: int) -> None:
    """All linear layers of a decode step, each with its own weights, chained by PDL; attention is left out."""
    layers = {case.layer: case for case in best if (case.model, case.tokens) == (model, tokens)}
    hidden = layers["qkv"].k
    residual, norm = _normal(tokens, hidden), _normal(hidden)
    scratch = SplitScratch.allocate(max_values=1 << 22, max_tiles=1 << 14, device=DEVICE)
    sequence = [layers[name] for _ in range(num_layers) for name in ("qkv", "o", "gate_up", "down")] + [layers["head"]]
    weights = [_normal(case.n, case.k) / case.k**0.5 for case in sequence]
    inputs = {name: _normal(tokens, case.k) for name, case in layers.items()}
    outs = {name: torch.empty(tokens, case.n, dtype=DTYPE, device=DEVICE) for name, case in layers.items()}
    outs["gate_up"] = inputs["down"]
    for name in ("o", "down"):
        outs[name] = residual
    for name in ("qkv", "gate_up", "head"):
        inputs[name] = residual

    def calls(pdl: bool) -> None:
        for case, weight in zip(sequence, weights, strict=True):
            name = case.layer
            launch_op(case.op, inputs[name], norm, weight, outs[name], best[case], scratch, pdl=pdl)

    floor = sum(case.floor_us for case in sequence)
    print(
        f"{model}, {tokens} tokens, linears of a step: {graph_us(lambda: calls(PDL)) / 1e3:.3f} ms, "
        f"without PDL {graph_us(lambda: calls(False)) / 1e3:.3f}, floor {floor / 1e3:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="smoke" if SMOKE else "0.6b,8b", help="of 0.6b, 8b, 135m")
    parser.add_argument("--tokens", help="e.g. 1,8; by default some for each model")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes under Triton's interpreter")
    parser.add_argument("--part", help="compile one part, for the parent process")
    arguments = parser.parse_args()
    tokens = tuple(int(count) for count in arguments.tokens.split(",")) if arguments.tokens else None
    models = arguments.models.split(",")
    torch.manual_seed(0)
    chosen = cases(models, tokens)
    if arguments.part:
        part, parts = arguments.part.split("/")
        compile_part(chosen, int(part), int(parts))
        return
    if SMOKE:
        compile_part(chosen[:1], 0, 1)
    else:
        compile_all(sys.argv[1:], arguments.workers)
    print("model layer     T best us  chosen  no PDL  cuBLAS   floor share   error best configuration  != chosen")
    results = {case: run_case(case) for case in chosen}
    best = {case: config for case, (config, _) in results.items()}
    if "0.6b" in models:
        for count in {case.tokens for case in chosen} & {1, 8}:
            step_of_linears(best, "0.6b", count, num_layers=28)
    if not all(right for _, right in results.values()):
        raise SystemExit("some configurations are wrong: see above")


if __name__ == "__main__":
    main()
