"""Tune a decoder's linear layers where they run: in one CUDA graph of all layers, each with weights of its own.

A layer is norm + qkv + attention, o + residual, norm + gate/up + SiLU, down + residual, by `CudaOps` itself, so that
what one kernel leaves for the next (its tail, the wait, the cache, room to start early) is counted, and norms are where
it puts them: in their neighbours, or kernels of their own. Attention is that of a step that decodes, or prefills chunks
(see `chain_attention`), and each layer has pages of its own. Linear after linear, the graph with each way of it is
timed against the graph of the best so far, replay by replay in turns, then again with the best few; a way is taken if
it makes the whole layer shorter by more than the noise. Each way is first checked against float32, with the linear on
the other side of the norm. The head is timed alone. Where `choose_heads` names a tile, the layers compute qkv with it
and ask `choose` for the others only: qkv is `linear_heads.py`'s to tune then.

So no set is found of which each way alone gains nothing: kernels overlap as far as all of them find room. With
`--together SECONDS` whole sets are searched (`linear_together.py`), with a few ways to attend, for so long for each
number of tokens, from what was found linear after linear. If the best is worth it, all linears are gone through again
from there.

Prints, for each number of tokens, us per layer with what `choose` names (before), with the best (after; both graphs in
turns again), and the floor: bytes of weights, keys and values, or the arithmetic, whichever takes longer. Of each
linear, us per layer with the way taken, with cuBLAS and with the best few others. All us are ratios, times what the
first graph took at first. `--models 0.6b,8b`, `--tokens 1,8` (prefill: 2048), `--together 60`, `--no-head`,
`--json FILE`, or `--smoke` without a GPU.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from bench_device import CANNOT_RUN
from bench_main import parser_of, run
from bench_models import LAYER, MODELS
from chain_attention import ChainAttention
from graph_timer import Run
from linear_chain import HEAD_LAUNCHES, Chain, attention_of
from linear_compile import ATTENTION, compile_part, tried_ways, tuned_of
from linear_together import TogetherSearch
from linear_ways import CUBLAS, LayerWay, Way, short, size_of

from gpu_runner.kernels.decode_way import DecodeWay

MAX_ERROR = 1e-2
FINALISTS = 3
WORTH_IT = 0.995
"""Of a layer's time: differences below are noise."""
FINAL_PRECISION = 3
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

Ways = dict[str, LayerWay]
"""Of each linear of a layer that is tuned, and with --together of its attention."""


@dataclass
class Tuned:
    """What was found for one number of tokens. Times are us; of a linear's ways, a layer's with the others as they were
    at best then."""

    tokens: int
    before_us: float  # a layer
    after_us: float
    floor_us: float
    before: dict[str, str]  # of each linear that is tuned, and with --together of attention
    after: dict[str, str]
    layer_us: dict[str, dict[str, float]]  # of each linear and way, the shortest first
    worst_error: float
    head_us: dict[str, float]  # of each way, the shortest first


def tune(chain: Chain, tokens: int, together_s: float) -> Tuned:
    chosen = chain.choose_all(tokens)
    linears = tuned_of(chain.model, tokens)
    names = linears if chain.head is None else (*linears, "head")
    right, worst_error = right_ways(chain, tokens, names, together=together_s > 0)
    attention = attention_of(chain.model, tokens, layers=len(chain.layers))
    before: Ways = {name: chosen[name] for name in linears}
    tried: dict[str, Sequence[LayerWay]] = {name: right[name] for name in linears}
    if together_s:
        before[ATTENTION], tried[ATTENTION] = attention.way, attention.ways

    descent = Descent(chain, tokens, attention, before)
    descent.sweep(tried)
    if together_s and descent.take_best(search_together(descent, tried, together_s)):
        descent.sweep(tried)
    for name in before:
        descent.improve(name, descent.best_of(name, FINALISTS), precision=FINAL_PRECISION)
    timer, first_us = chain.timer, descent.first_us / len(chain.layers)
    head_us: dict[Way, float] = {}
    if chain.head is not None:
        first_head = chain.capture_head(descent.values, chosen["head"])
        first_head_us = timer.us(first_head) / HEAD_LAUNCHES
        for way in right["head"]:
            head_us[way] = first_head_us * timer.ratio(chain.capture_head(descent.values, way), first_head)
    return Tuned(
        tokens=tokens,
        before_us=first_us,
        after_us=first_us * timer.ratio(descent.standing, descent.first, precision=FINAL_PRECISION),
        floor_us=sum(chain.model.floor_us(name, tokens) for name in LAYER) + attention.floor_us,
        before={name: short(way) for name, way in before.items()},
        after={name: short(way) for name, way in descent.best.items()},
        layer_us={name: _sorted(ratios, first_us) for name, ratios in descent.ratios.items()},
        worst_error=worst_error,
        head_us=_sorted(head_us, 1.0),
    )


def right_ways(
    chain: Chain, tokens: int, names: tuple[str, ...], *, together: bool
) -> tuple[dict[str, list[Way]], float]:
    """Of each linear those whose results are right, with the others as the table names them; and their worst error."""
    right: dict[str, list[Way]] = {}
    worst_error = 0.0
    for name in names:
        linear = chain.model.linear(name)
        errors = chain.errors(name, tokens, tried_ways(linear, tokens, together=together))
        right[name] = [way for way, error in errors.items() if error < MAX_ERROR]
        worst_error = max([worst_error, *(error for error in errors.values() if error < MAX_ERROR)])
        for way, error in errors.items():
            if way not in right[name]:
                print(f"WRONG T={tokens} {name} {short(way)}: error {error:.3g}", flush=True)
        chain.choose_all(tokens)
    return right, worst_error


def _sorted(times: Mapping[Any, float], scale: float) -> dict[str, float]:
    return {short(way): scale * times[way] for way in sorted(times, key=times.__getitem__)}


class Descent:
    """A graph with the best ways so far, and how those of one linear, or of attention, compare with it."""

    def __init__(self, chain: Chain, tokens: int, attention: ChainAttention, best: Ways) -> None:
        self._chain = chain
        self.tokens = tokens
        self.values = chain.values(tokens)
        self._attention = attention
        self._standing_ratio = 1.0
        self.best = best
        self.ratios: dict[str, dict[LayerWay, float]] = {name: {} for name in best}  # to `first`
        self.first = self.standing = self._capture(best)
        self.first_us = chain.timer.us(self.first)

    def best_of(self, name: str, count: int) -> list[LayerWay]:
        ratios = self.ratios[name]
        return sorted(ratios, key=ratios.__getitem__)[:count]

    def sweep(self, ways: Mapping[str, Sequence[LayerWay]]) -> None:
        for name in self.best:
            self.improve(name, ways[name])

    def improve(self, name: str, ways: Sequence[LayerWay], *, precision: int = 1) -> None:
        """Time the layers with each way of one linear, and take the best if it is worth it."""
        graphs: dict[LayerWay, Run] = {}
        found = self.ratios[name]
        found[self.best[name]] = self._standing_ratio
        for way in ways:
            graph = None if way == self.best[name] else self._graph(self.best | {name: way})
            if graph is not None:
                graphs[way] = graph
                found[way] = self._standing_ratio * self._ratio(graph, precision)
        winner = min(graphs, key=found.__getitem__, default=None)
        if winner is not None and found[winner] < WORTH_IT * self._standing_ratio:
            ratio = self._ratio(graphs[winner], FINAL_PRECISION)
            found[winner] = self._standing_ratio * ratio
            if ratio < WORTH_IT:
                self._stand(self.best | {name: winner}, graphs[winner], ratio)

    def ratio(self, ways: Ways) -> float:
        """To the standing graph's time; infinite if the device cannot run the set."""
        graph = self._graph(ways)
        return float("inf") if graph is None else self._ratio(graph, precision=1)

    def take_best(self, sets: list[Ways]) -> bool:
        """Time whole sets again, and take the best if it is right and worth it."""
        found: list[tuple[float, Ways, Run]] = []
        for ways in sets:
            graph = self._graph(ways)
            if graph is not None:
                ratio = self._ratio(graph, FINAL_PRECISION)
                print(f"T={self.tokens} together {ratio:.4f}: {_shown(ways)}", flush=True)
                found.append((ratio, ways, graph))
        for ratio, ways, graph in sorted(found, key=itemgetter(0)):
            if ratio < WORTH_IT and self._is_right(ways):
                self._stand(ways, graph, ratio)
                self.ratios = {name: {} for name in self.best}  # those so far are of other neighbours
                return True
        return False

    def _is_right(self, ways: Ways) -> bool:
        self._set(ways)
        for name in ("o", "down"):  # each with what is behind its norm
            for error in self._chain.errors(name, self.tokens, [self._chain.way(name)]).values():
                if not error < MAX_ERROR:
                    print(f"WRONG T={self.tokens} together, {name}: error {error:.3g}: {_shown(ways)}", flush=True)
                    return False
        return True

    def _stand(self, best: Ways, graph: Run, ratio: float) -> None:
        """ratio: to the graph that stood before."""
        self.best, self.standing = best, graph
        self._standing_ratio *= ratio

    def _graph(self, ways: Ways) -> Run | None:
        """None if the device cannot run the set."""
        try:
            return self._capture(ways)
        except CANNOT_RUN as problem:
            print(f"T={self.tokens} {_shown(ways)}: {str(problem)[:200]}", flush=True)
            return None

    def _capture(self, ways: Ways) -> Run:
        self._set(ways)
        return self._chain.capture(self.values, self._attention)

    def _set(self, ways: Ways) -> None:
        for name, way in ways.items():
            if isinstance(way, DecodeWay):
                self._attention.way = way
            else:
                self._chain.set(name, way)

    def _ratio(self, graph: Run, precision: int) -> float:
        return self._chain.timer.ratio(graph, self.standing, precision=precision)


def search_together(descent: Descent, tried: Mapping[str, Sequence[LayerWay]], seconds: float) -> list[Ways]:
    """The best sets that were found in so many seconds, the best first."""
    began = time.monotonic()
    search = TogetherSearch(
        {name: list(dict.fromkeys([best, *tried[name]])) for name, best in descent.best.items()},
        size_of=partial(size_of, tokens=descent.tokens),
        time=descent.ratio,
        left=lambda: 1 - (time.monotonic() - began) / seconds,
    )
    search.run(descent.best)
    print(f"T={descent.tokens} together: {search.tried} sets in {time.monotonic() - began:.0f} s", flush=True)
    return search.best(FINALISTS)


def _shown(ways: Ways) -> str:
    return " | ".join(f"{name} {short(way)}" for name, way in ways.items())


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
            shown = [way for way in dict.fromkeys([taken, was, *others, CUBLAS]) if way in times]
            line = " | ".join(f"{times[way]:.2f} {'was ' * (way == was)}{way}" for way in shown)
            print(f"{r.tokens:5} {name:10}{line}", flush=True)


def main() -> None:
    parser = parser_of(__doc__, counts="tokens", default=",".join(map(str, TOKENS)), smoke="1,8,64")
    parser.add_argument("--together", type=float, default=0, metavar="SECONDS", help="search sets of ways for so long")
    parser.add_argument("--no-head", action="store_true", help="of a layer's linears only")
    parser.add_argument("--json", type=Path, help="write all times here")
    arguments = parser.parse_args()
    head = not arguments.no_head
    found: dict[str, list[Any]] = {}

    def measure(name: str, token_counts: list[int]) -> None:
        model = MODELS[name]
        chain = Chain(model, layers=model.layers, head=head)
        results = [tune(chain, tokens, arguments.together) for tokens in token_counts]
        print_table(results, {"8b": 32}.get(name, model.layers))
        found[name] = [asdict(result) for result in results]

    run(arguments, partial(compile_part, head=head, together=arguments.together > 0), measure)
    if arguments.json and not arguments.part:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
