"""A decoder's layers, each with weights of its own, whose linears are computed in whatever ways one sets."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from attention import Shape
from bench_device import CANNOT_RUN, DEVICE
from bench_models import LAYER, Model, random_normal
from chain_attention import ChainAttention
from graph_timer import GraphTimer, Run
from linear_ways import ACROSS_NORM, CUBLAS, Linear, Way, chosen_way, short
from torch import Tensor

from gpu_runner.kernels import reference
from gpu_runner.kernels.cuda_ops import CudaOps
from gpu_runner.kernels.linear import SplitScratch, row_tiles
from gpu_runner.kernels.linear_config import NUM_PROGRAMS, DotConfig, LinearConfig
from gpu_runner.kernels.residual import Gained, NormedLinear, Residual

EPS = 1e-6
HEAD_LAUNCHES = 4
SCRATCH_VALUES, SCRATCH_TILES = 2 * 2 * NUM_PROGRAMS * 128 * 256, 2 * NUM_PROGRAMS


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

    def set(self, name: str, way: Way) -> None:
        linear = self.model.linear(name)
        self.ways[linear.n, linear.k] = way

    def way(self, name: str) -> Way:
        linear = self.model.linear(name)
        return self.ways[linear.n, linear.k]

    def choose_all(self, tokens: int) -> dict[str, Way]:
        """Set what the table names, and return it."""
        chosen = {name: chosen_way(self.model.linear(name), tokens) for name in (*LAYER, "head")}
        for name, way in chosen.items():
            self.set(name, way)
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

    def apply_alone(self, name: str, way: Way, across: Way, values: dict[str, Tensor]) -> None:
        """One linear's kernels as they are where `across` computes that on the other side of its norm."""
        self.set(name, way)
        if name == "head":
            self.logits(values["residual"])
            return
        self.set(ACROSS_NORM[name], across)
        residual = Residual(values["residual"])
        if self.model.linear(name).normed and isinstance(way, DotConfig) and isinstance(across, DotConfig):
            parts = row_tiles(across, self.model.hidden)
            residual.gained = Gained.allocate(residual.values, self.norm, parts=parts)
        self.apply(name, self.layers[0], values, residual)

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
        self.set("head", way)

        def run() -> None:
            for _ in range(HEAD_LAUNCHES):
                self.logits(given["residual"])

        return self.timer.capture(run)

    def logits(self, residual: Tensor) -> Tensor:
        assert self.head is not None
        return self.ops.logits(self.ops.rms_norm(residual, self.norm, EPS), self.head)

    def errors(self, name: str, tokens: int, ways: Iterable[Way]) -> dict[Way, float]:
        """Relative, of the whole, of the ways that the device can run; infinite for one that does not repeat itself."""
        given = self.values(tokens)
        errors: dict[Way, float] = {}
        for way in ways:
            self.set(name, way)
            try:
                results, again = (self._once(name, given) for _ in range(2))
            except CANNOT_RUN as problem:
                print(f"T={tokens} {name} {short(way)}: {str(problem)[:200]}", flush=True)
                continue
            pairs = zip(results, self._expected(name, given, results), strict=True)
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
