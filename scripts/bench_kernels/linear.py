"""Tune a decoder's linear layers where they run: in one CUDA graph of all layers, each with weights of its own.

A layer is norm + qkv + attention, o + residual, norm + gate/up + SiLU, down + residual, by `CudaOps` itself, so that
what one kernel leaves for the next (its tail, the wait, the cache, room to start early) is counted, and norms are where
it puts them: in their neighbours, or kernels of their own. Attention is that of a step that decodes, or prefills chunks
(see `chain_attention`), and each layer has pages of its own. Linear after linear, the graph with each way of it is
timed against the graph of the best so far, replay by replay in turns, then again with the best few; a way is taken if
it makes the whole layer shorter by more than the noise. Each way is first checked against float32, with the linear on
the other side of the norm. The head is timed alone. Where `choose_heads` names a tile, the layers compute qkv with it
and ask `choose` for the others only: qkv is `linear_heads.py`'s to tune then.

Prints, for each number of tokens, us per layer with what `choose` names (before), with the best (after; both graphs in
turns again), and the floor: bytes of weights, keys and values, or the arithmetic, whichever takes longer. Of each
linear, us per layer with the way taken, with cuBLAS and with the best few others. All us are ratios, times what the
first graph took at first. `--models 0.6b,8b`, `--tokens 1,8` (prefill: 2048), `--no-head`, `--json FILE`, or `--smoke`
without a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from attention import Shape
from bench_device import CANNOT_RUN, DEVICE, SMOKE
from bench_main import parser_of, run
from bench_models import LAYER, MODELS, Model, random_normal
from chain_attention import ChainAttention
from graph_timer import GraphTimer, Run
from linear_ways import ACROSS_NORM, CUBLAS, Linear, Way, chosen_way, compile_key, short, ways_of
from torch import Tensor

from gpu_runner.kernels import reference
from gpu_runner.kernels.cuda_ops import CudaOps
from gpu_runner.kernels.linear import SplitScratch
from gpu_runner.kernels.linear_config import NUM_PROGRAMS, LinearConfig, choose_heads
from gpu_runner.kernels.residual import NormedLinear, Residual

EPS = 1e-6
MAX_ERROR = 1e-2
HEAD_LAUNCHES = 4
FINALISTS = 3
WORTH_IT = 0.995
"""Of a layer's time: differences below are noise."""
FINAL_PRECISION = 3
SCRATCH_VALUES, SCRATCH_TILES = 2 * 2 * NUM_PROGRAMS * 128 * 256, 2 * NUM_PROGRAMS


TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def tuned_of(model: Model, tokens: int) -> tuple[str, ...]:
    """The linears of a layer that are computed as `choose` says."""
    qkv = model.linear("qkv")
    return LAYER if choose_heads(tokens, qkv.n, qkv.k, model.head_dim) is None else LAYER[1:]


def attention_of(model: Model, tokens: int, *, layers: int) -> ChainAttention:
    shape = Shape("", model.heads // model.head_dim, model.kv_heads // model.head_dim, model.head_dim)
    return ChainAttention(shape, tokens, layers=layers, norms_heads=model.norms_heads)


class Chain:
    """A model's layers and head, and the way in which each linear is to be computed."""

    def __init__(self, model: Model, *, layers: int, head: bool) -> None:
        self.model = model
        self.ways: dict[tuple[int, int], Way] = {}  # by [n, k] of the weight
        self.timer = GraphTimer()
        self.norm = random_normal(model.hidden)
        self.layers = [{name: self._weight(model.linear(name)) for name in LAYER} for _ in range(layers)]
        self.head = self._weight(model.linear("head")) if head else None
        scratch = SplitScratch.allocate(max_values=SCRATCH_VALUES, max_tiles=SCRATCH_TILES, device=DEVICE)
        self.ops = CudaOps(scratch=scratch, choose=self._choose)

    def set(self, linear: Linear, way: Way) -> None:
        self.ways[linear.n, linear.k] = way

    def choose_all(self, tokens: int) -> dict[str, Way]:
        """Set what the table names, and return it."""
        chosen = {name: chosen_way(self.model.linear(name), tokens) for name in (*LAYER, "head")}
        for name, way in chosen.items():
            self.set(self.model.linear(name), way)
        return chosen

    def apply(self, name: str, weights: dict[str, Tensor], values: dict[str, Tensor], residual: Residual) -> None:
        """One linear as the decoder calls it, qkv without attention. values: the tensors between the linears."""
        ops = self.ops
        if name == "qkv":
            values["qkv"] = ops.norm_linear(residual, self._normed(weights[name]))
        elif name == "gate_up":
            values["inner"] = ops.norm_gate_up(residual, self._normed(weights[name]))
        else:
            x, reader = values["heads" if name == "o" else "inner"], self._normed(weights[ACROSS_NORM[name]])
            ops.linear_add(x, weights[name], None, residual, reader)

    def apply_across_norm(self, name: str, values: dict[str, Tensor], residual: Residual) -> None:
        """A linear and that on the other side of its norm, in the decoder's order."""
        for each in ("o", "gate_up") if name in ("o", "gate_up") else ("down", "qkv"):
            self.apply(each, self.layers[0], values, residual)

    def _normed(self, weight: Tensor) -> NormedLinear:
        return NormedLinear(self.norm, EPS, weight, None)

    def values(self, tokens: int) -> dict[str, Tensor]:
        model = self.model
        columns = {"residual": model.hidden, "heads": model.heads, "inner": model.inner}
        return {name: random_normal(tokens, width) for name, width in columns.items()}

    def run(self, given: dict[str, Tensor], attention: ChainAttention, *, layers: int) -> None:
        """The first layers as they are set; each has its qkv and attention at the end, so that all norms stand between
        linears."""
        values, residual = dict(given), Residual(given["residual"])
        for index, weights in enumerate(self.layers[:layers]):
            for name in ("o", "gate_up", "down"):
                self.apply(name, weights, values, residual)
            values["heads"] = attention.attend(self.ops, residual, self._normed(weights["qkv"]), index)

    def capture(self, given: dict[str, Tensor], attention: ChainAttention) -> Run:
        """All layers as they are set, on what must outlive it; one runs before, to load the kernels of all."""
        self.run(given, attention, layers=1)
        return self.timer.capture(lambda: self.run(given, attention, layers=len(self.layers)))

    def capture_head(self, given: dict[str, Tensor], way: Way) -> Run:
        self.set(self.model.linear("head"), way)

        def run() -> None:
            for _ in range(HEAD_LAUNCHES):
                self.logits(given["residual"])

        return self.timer.capture(run)

    def logits(self, residual: Tensor) -> Tensor:
        assert self.head is not None
        return self.ops.logits(self.ops.rms_norm(residual, self.norm, EPS), self.head)

    def errors(self, linear: Linear, tokens: int, ways: Iterable[Way]) -> dict[Way, float]:
        """Relative, of the whole, of the ways that the device can run; infinite for one that does not repeat itself."""
        given = self.values(tokens)
        errors: dict[Way, float] = {}
        for way in ways:
            self.set(linear, way)
            try:
                results, again = (self._once(linear.name, given) for _ in range(2))
            except CANNOT_RUN as problem:
                print(f"T={tokens} {linear.name} {short(way)}: {str(problem)[:200]}", flush=True)
                continue
            pairs = zip(results, self._expected(linear.name, given, results), strict=True)
            error = max(float((result.float() - wide).norm() / wide.norm()) for result, wide in pairs)
            errors[way] = error if all(map(torch.equal, results, again)) else float("inf")
        return errors

    def _once(self, name: str, given: dict[str, Tensor]) -> list[Tensor]:
        """The logits; or the residual in front of the linear's norm, and what the product behind it makes of that."""
        if name == "head":
            return [self.logits(given["residual"])]
        values, residual = dict(given), Residual(given["residual"].clone())
        self.apply_across_norm(name, values, residual)
        return [residual.values, values["inner" if name in ("o", "gate_up") else "qkv"]]

    def _expected(self, name: str, given: dict[str, Tensor], results: list[Tensor]) -> list[Tensor]:
        """Of `_once`, in float32; what is behind the norm, of the residual that it had."""
        weights = self.layers[0] if self.head is None else {**self.layers[0], "head": self.head}

        def product(x: Tensor, name: str) -> Tensor:
            return x.float() @ weights[name].float().t()

        def normed(x: Tensor) -> Tensor:
            return reference.rms_norm(x.float(), self.norm.float(), EPS)

        residual = given["residual"].float()
        if name == "head":
            return [product(normed(residual), "head")]
        if name in ("o", "gate_up"):
            inner = reference.silu_mul(product(normed(results[0]), "gate_up"))
            return [residual + product(given["heads"], "o"), inner]
        return [residual + product(given["inner"], "down"), product(normed(results[0]), "qkv")]

    def _choose(self, x: Tensor, weight: Tensor) -> LinearConfig | None:
        way = self.ways.get((weight.shape[0], weight.shape[1]), CUBLAS)
        return None if isinstance(way, str) else way

    @staticmethod
    def _weight(linear: Linear) -> Tensor:
        return random_normal(linear.n, linear.k).mul_(linear.k**-0.5)


@dataclass
class Tuned:
    """What was found for one number of tokens. Times are us; of a linear's ways, a layer's with the others as they were
    at best then."""

    tokens: int
    before_us: float  # a layer
    after_us: float
    floor_us: float
    before: dict[str, str]  # of each linear that is tuned
    after: dict[str, str]
    layer_us: dict[str, dict[str, float]]  # of each linear and way, the shortest first
    worst_error: float
    head_us: dict[str, float]  # of each way, the shortest first


def tune(chain: Chain, tokens: int) -> Tuned:
    before = chain.choose_all(tokens)
    right: dict[str, list[Way]] = {}
    worst_error = 0.0
    names = tuned_of(chain.model, tokens)
    for name in names if chain.head is None else (*names, "head"):
        linear = chain.model.linear(name)
        errors = chain.errors(linear, tokens, _ways(linear, tokens))
        right[name] = [way for way, error in errors.items() if error < MAX_ERROR]
        worst_error = max([worst_error, *(errors[way] for way in right[name])])
        for way in errors.keys() - set(right[name]):
            print(f"WRONG T={tokens} {name} {short(way)}: error {errors[way]:.3g}", flush=True)
        chain.set(linear, before[name])

    descent = Descent(chain, tokens, {name: before[name] for name in names})
    for name in names:
        descent.improve(name, right[name])
    for name in names:
        descent.improve(name, descent.best_of(name, FINALISTS), precision=FINAL_PRECISION)
    timer, first_us = chain.timer, descent.first_us / len(chain.layers)
    head_us: dict[Way, float] = {}
    if chain.head is not None:
        first_head = chain.capture_head(descent.values, before["head"])
        first_head_us = timer.us(first_head) / HEAD_LAUNCHES
        for way in right["head"]:
            head_us[way] = first_head_us * timer.ratio(chain.capture_head(descent.values, way), first_head)
    return Tuned(
        tokens=tokens,
        before_us=first_us,
        after_us=first_us * timer.ratio(descent.standing, descent.first, precision=FINAL_PRECISION),
        floor_us=sum(chain.model.floor_us(name, tokens) for name in LAYER) + descent.attention.floor_us,
        before={name: short(before[name]) for name in names},
        after={name: short(descent.best[name]) for name in names},
        layer_us={name: _sorted(descent.ratios[name], first_us) for name in names},
        worst_error=worst_error,
        head_us=_sorted(head_us, 1.0),
    )


def _sorted(times: dict[Way, float], scale: float) -> dict[str, float]:
    return {short(way): scale * times[way] for way in sorted(times, key=times.__getitem__)}


class Descent:
    """A graph with the best ways so far, and how those of one linear compare with it."""

    def __init__(self, chain: Chain, tokens: int, best: dict[str, Way]) -> None:
        self._chain = chain
        self.values = chain.values(tokens)
        self.attention = attention_of(chain.model, tokens, layers=len(chain.layers))
        self._standing_ratio = 1.0
        self.best = best
        self.ratios: dict[str, dict[Way, float]] = {name: {} for name in best}  # to `first`
        self.first = self.standing = chain.capture(self.values, self.attention)
        self.first_us = chain.timer.us(self.first)

    def best_of(self, name: str, count: int) -> list[Way]:
        ratios = self.ratios[name]
        return sorted(ratios, key=ratios.__getitem__)[:count]

    def improve(self, name: str, ways: list[Way], *, precision: int = 1) -> None:
        """Time the layers with each way of one linear, and take the best if it is worth it."""
        linear = self._chain.model.linear(name)
        graphs: dict[Way, Run] = {}
        found = self.ratios[name]
        found[self.best[name]] = self._standing_ratio
        for way in ways:
            if way != self.best[name]:
                graphs[way] = self._capture(linear, way)
                found[way] = self._standing_ratio * self._ratio(graphs[way], precision)
        winner = min(graphs, key=found.__getitem__, default=None)
        if winner is not None and found[winner] < WORTH_IT * self._standing_ratio:
            ratio = self._ratio(graphs[winner], FINAL_PRECISION)
            found[winner] = self._standing_ratio * ratio
            if ratio < WORTH_IT:
                self._standing_ratio = found[winner]
                self.best[name], self.standing = winner, graphs[winner]
        self._chain.set(linear, self.best[name])

    def _capture(self, linear: Linear, way: Way) -> Run:
        self._chain.set(linear, way)
        return self._chain.capture(self.values, self.attention)

    def _ratio(self, graph: Run, precision: int) -> float:
        return self._chain.timer.ratio(graph, self.standing, precision=precision)


def _ways(linear: Linear, tokens: int) -> list[Way]:
    ways = ways_of(linear, tokens)
    return list(dict.fromkeys([*ways[:2], ways[-1]])) if SMOKE else ways


def compile_part(names: list[str], token_counts: list[int], part: int, parts: int, *, head: bool) -> None:
    """Launch one part of the ways once, so that Triton's cache has them."""
    keyed: dict[Any, tuple[str, Linear | None, int, Way]] = {}
    for model, tokens in product(names, token_counts):
        keyed[model, tokens] = model, None, tokens, CUBLAS  # the layer as `choose` has it, for its attention
        for name in (*tuned_of(MODELS[model], tokens), *["head"] * head):
            linear = MODELS[model].linear(name)
            across = chosen_way(MODELS[model].linear(ACROSS_NORM.get(name, name)), tokens)
            for way in _ways(linear, tokens):
                if not isinstance(way, str):
                    keyed.setdefault(compile_key(linear, tokens, way, across), (model, linear, tokens, way))
    mine = list(keyed.values())[part::parts]
    for model in names:
        chain = Chain(MODELS[model], layers=1, head=head)
        for _, linear, tokens, way in (item for item in mine if item[0] == model):
            chain.choose_all(tokens)
            values = chain.values(tokens)
            try:
                if linear is None:
                    chain.run(values, attention_of(chain.model, tokens, layers=1), layers=1)
                    continue
                chain.set(linear, way)
                if linear.name == "head":
                    chain.logits(values["residual"])
                else:
                    chain.apply_across_norm(linear.name, values, Residual(values["residual"]))
            except CANNOT_RUN:
                continue  # reported where it would be timed


def print_table(results: list[Tuned], num_layers: int) -> None:
    for r in results:
        head = " head " + ", ".join(f"{us:.1f} {way}" for way, us in list(r.head_us.items())[:2]) if r.head_us else ""
        print(
            f"T={r.tokens} layer us: before {r.before_us:.2f} after {r.after_us:.2f} floor {r.floor_us:.2f}; saved "
            f"{(r.before_us - r.after_us) * num_layers / 1e3:.3f} ms a step; worst error {r.worst_error:.1e}{head}",
            flush=True,
        )
        for name in r.after:
            times, taken, was = r.layer_us[name], r.after[name], r.before[name]
            others = [way for way in times if way not in (taken, was)][:2]
            shown = dict.fromkeys([taken, was, *others, *[way for way in (CUBLAS,) if way in times]])
            line = " | ".join(f"{times[way]:.2f} {'was ' * (way == was)}{way}" for way in shown)
            print(f"{r.tokens:5} {name:8}{line}", flush=True)


def main() -> None:
    parser = parser_of(__doc__, counts="tokens", default=",".join(map(str, TOKENS)), smoke="1,8,64")
    parser.add_argument("--no-head", action="store_true", help="of a layer's linears only")
    parser.add_argument("--json", type=Path, help="write all times here")
    arguments = parser.parse_args()
    head = not arguments.no_head
    found: dict[str, list[Any]] = {}

    def measure(name: str, token_counts: list[int]) -> None:
        model = MODELS[name]
        chain = Chain(model, layers=model.layers, head=head)
        results = [tune(chain, tokens) for tokens in token_counts]
        print_table(results, {"8b": 32}.get(name, model.layers))
        found[name] = [asdict(result) for result in results]

    run(arguments, partial(compile_part, head=head), measure)
    if arguments.json and not arguments.part:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
