"""The search for a layer's ways to compute its linears, without a GPU: what it tries and what it compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import bench_models
import linear_chain
import pytest
import torch
from bench_models import LAYER, MODELS
from chain_attention import ChainAttention
from linear import Descent, Ways
from linear_chain import Chain
from linear_compile import ATTENTION, launches, tried_ways, tuned_of
from linear_together import DRAW_UNTIL, Size, TogetherSearch
from linear_ways import ACROSS_NORM, CUBLAS, size_of, ways_of

from gpu_runner.kernels import linear as linears
from gpu_runner.kernels import norm_rope
from gpu_runner.kernels.cuda_ops import CudaOps
from gpu_runner.kernels.linear_config import DotConfig, FmaConfig
from gpu_runner.kernels.residual import Residual

# ------------------------------------------------------------------------------------------------- sets of ways

NAMES = ("qkv", "o", "gate_up", "down")
SIZES = range(1, 9)


def own_cost(ways: dict[str, int]) -> float:
    """Each kernel on its own is the faster, the larger it is."""
    return sum(0.01 * (max(SIZES) - size) for size in ways.values())


def overlapping_cost(ways: dict[str, int]) -> float:
    """Unless all find room beside each other, then those of 1, 2, 1 and 2 most."""
    off = sum(abs(size - best) for size, best in zip(ways.values(), (1, 2, 1, 2), strict=True))
    return 0.5 + 0.01 * off if max(ways.values()) <= 3 else 1 + own_cost(ways)


def search_of(
    cost: Callable[[dict[str, int]], float], *, room: Callable[[int], Size], steps: int, left: float = 1.0
) -> TogetherSearch[int]:
    """A search whose time is counted in what asks for it. left: the share that it begins with."""
    asked = iter(range(steps))
    return TogetherSearch(
        {name: list(SIZES) for name in NAMES},
        size_of=room,
        time=cost,
        left=lambda: left * (1 - next(asked, steps) / steps),
    )


def room_of(size: int) -> Size:
    return Size(num_warps=4, held_bytes=size << 10)


def test_a_set_is_found_that_no_change_of_one_way_leads_to() -> None:
    start = dict.fromkeys(NAMES, max(SIZES))
    alone = [start | {name: size} for name in NAMES for size in SIZES]
    assert min(map(overlapping_cost, alone)) == overlapping_cost(start)
    search = search_of(overlapping_cost, room=room_of, steps=1000)
    search.run(start)
    assert search.best(1) == [{"qkv": 1, "o": 2, "gate_up": 1, "down": 2}]
    assert search.tried < 1000


def test_a_search_repeats_itself() -> None:
    searches = [search_of(overlapping_cost, room=room_of, steps=100) for _ in range(2)]
    for search in searches:
        search.run(dict.fromkeys(NAMES, 5))
    assert searches[0].best(100) == searches[1].best(100)


def test_two_ways_are_changed_at_once_where_changing_one_gains_nothing() -> None:
    def cost(ways: dict[str, int]) -> float:
        return ways["qkv"] + ways["gate_up"] - ways["o"] + 20 * (ways["o"] != ways["down"])

    search = search_of(cost, room=room_of, steps=2000, left=DRAW_UNTIL)
    search.run(dict.fromkeys(NAMES, 3))
    assert search.best(1) == [{"qkv": 1, "o": 8, "gate_up": 1, "down": 8}]
    too_short = search_of(cost, room=room_of, steps=100, left=DRAW_UNTIL)
    too_short.run(dict.fromkeys(NAMES, 3))
    assert too_short.best(1) == [{"qkv": 1, "o": 3, "gate_up": 1, "down": 3}], "descent alone"


def test_drawn_kernels_keep_to_one_limit_and_what_cannot_is_as_small_as_it_can_be() -> None:
    tried: list[dict[str, int]] = []

    def cost(ways: dict[str, int]) -> float:
        tried.append(ways)
        return 1.0

    asked = iter(range(1, 100))
    search = TogetherSearch(
        {"a": [1, 8], "b": [2, 4], "c": [6, 7]}, size_of=room_of, time=cost, left=lambda: 1 if next(asked, 0) else 0
    )
    search.run({"a": 8, "b": 4, "c": 7})
    drawn = {tuple(ways.values()) for ways in tried}
    assert {(1, 2, 6), (1, 4, 6), (1, 4, 7), (8, 4, 7)} <= drawn
    assert all(b == 2 or max(a, c) >= 4 for a, b, c in drawn)


def test_what_seems_to_be_the_fastest_is_timed_again_and_the_slower_time_counts() -> None:
    times = iter([1.0, 0.5, 0.9, 0.95])
    search = TogetherSearch({"a": [1, 2, 3]}, size_of=room_of, time=lambda ways: next(times), left=lambda: 0.0)
    assert [search.time({"a": way}) for way in (1, 2, 3)] == [1.0, 0.9, 0.95]
    assert search.time({"a": 2}) == 0.9
    assert search.best(2) == [{"a": 2}, {"a": 3}]
    assert search.tried == 3


class Layers:
    """Stand in for a chain whose graphs take as long as `overlapping_cost` says of its linears' ways, "1" to "8"."""

    def __init__(self) -> None:
        self.ways: dict[str, str] = {}
        self.timer = self
        self.values = self.model = lambda *_: None
        self.set, self.way = self.ways.__setitem__, self.ways.__getitem__
        self.wrong = ""

    def capture(self, values: Any, attention: Any) -> float:
        return overlapping_cost({name: int(way) for name, way in self.ways.items()})

    def us(self, run: float) -> float:
        return run

    def ratio(self, run: float, base: float, *, precision: int) -> float:
        return run / base

    def errors(self, name: str, tokens: int, ways: list[str]) -> dict[str, float]:
        return {way: float(self.ways["down"] == self.wrong) for way in ways}


def descent_of(layers: Layers) -> Descent:
    chain, attention = cast(Chain, layers), cast(ChainAttention, None)
    return Descent(chain, 1, attention, set_of("8788"))


def set_of(ways: str) -> Ways:
    return dict(zip(NAMES, ways, strict=True))


TRIED = {name: [str(size) for size in SIZES] for name in NAMES}


def test_the_best_set_that_is_right_is_taken_and_what_is_reported_is_beside_it() -> None:
    layers = Layers()
    descent = descent_of(layers)
    descent.sweep(TRIED)
    assert set(descent.best.values()) == {"8"}, "linear after linear"
    layers.wrong = "2"
    best, wrong, slow = (set_of(ways) for ways in ("1213", "1212", "8787"))
    assert descent.take_best([slow, wrong, best])
    assert descent.best == best
    descent.improve("o", TRIED["o"])
    assert descent.best == best
    first = descent.first_us
    assert descent.ratios["o"] == pytest.approx(
        {way: overlapping_cost({"qkv": 1, "o": int(way), "gate_up": 1, "down": 3}) / first for way in TRIED["o"]}
    )


def test_a_set_that_gains_no_more_than_the_noise_is_not_taken() -> None:
    descent = descent_of(Layers())
    descent.sweep(TRIED)
    ratios = descent.ratios
    assert not descent.take_best([set_of("8888"), set_of("8887")])
    assert set(descent.best.values()) == {"8"}
    assert descent.ratios is ratios


# ------------------------------------------------------------------------------------------------- ways of a linear


@pytest.mark.parametrize("model", ["0.6b", "8b"])
@pytest.mark.parametrize("tokens", [1, 4, 16, 64])
def test_ways_are_few_enough_to_compile_and_small_ones_are_among_them(model: str, tokens: int) -> None:
    for name in LAYER:
        linear = MODELS[model].linear(name)
        ways = ways_of(linear, tokens, together=True)
        assert set(ways_of(linear, tokens, together=False)) <= set(ways)
        assert len(ways) <= 100
        fma = [way for way in ways if isinstance(way, FmaConfig)]
        dots = [way for way in ways if isinstance(way, DotConfig)]
        assert all(way.rows > 1 for way in fma) or name != "gate_up"
        if not linear.is_small:
            continue
        if tokens <= 4:
            assert min(way.num_warps for way in fma) == 1
        if tokens >= 4:
            assert min(size_of(way, tokens).held_bytes for way in dots) <= 80 << 10


@pytest.mark.parametrize(("tokens", "parts"), [(64, {0}), (100, {0, 16})])
def test_attention_is_compiled_behind_any_way_of_down_where_it_reads_what_that_writes(
    tokens: int, parts: set[int]
) -> None:
    found = launches(MODELS["0.6b"], tokens, head=False, together=True)
    assert {key for key, launch in found.items() if launch.name == ATTENTION} == {
        (ATTENTION, tokens, each) for each in parts
    }


def test_cublas_leaves_no_room_beside_it() -> None:
    linear = MODELS["0.6b"].linear("down")
    assert all(size_of(way, 64).within(size_of(CUBLAS, 64)) for way in ways_of(linear, 64, together=True))


# ------------------------------------------------------------------------------------------------- what is compiled


class Recorded:
    """Stands in for a kernel. launched: what made Triton compile, once for each launch."""

    def __init__(self, launched: list[Any], name: str) -> None:
        self._launched, self._name = launched, name

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            absent = tuple(argument is None for argument in arguments)
            self._launched.append((self._name, absent, tuple(sorted(constants.items()))))

        return launch


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """By linears of tensors that hold nothing."""
    launched: list[Any] = []
    for name in ("linear_fma_kernel", "linear_dot_kernel", "linear_tile_kernel"):
        monkeypatch.setattr(linears, name, Recorded(launched, name))
    meta = torch.device("meta")
    monkeypatch.setattr(bench_models, "DEVICE", meta)
    monkeypatch.setattr(linear_chain, "DEVICE", meta)
    monkeypatch.setattr(linear_chain, "GraphTimer", lambda: None)
    monkeypatch.setattr(CudaOps, "rms_norm", lambda self, x, weight, eps: torch.empty_like(x))
    monkeypatch.setattr(norm_rope, "silu_mul", lambda product: product[:, ::2].contiguous())
    with torch.inference_mode():
        yield launched


def compiled(chain: Chain, tokens: int, launched: list[Any], *, together: bool) -> list[Any]:
    launched.clear()
    for launch in launches(chain.model, tokens, head=False, together=together).values():
        if launch.name != ATTENTION:
            chain.choose_all(tokens)
            chain.apply_alone(launch.name, launch.way, launch.across, chain.values(tokens))
    return [*launched]


def met(chain: Chain, tokens: int, launched: list[Any]) -> set[Any]:
    """In all sets of a layer's ways."""
    launched.clear()
    values = chain.values(tokens)
    chain.choose_all(tokens)
    names = tuned_of(chain.model, tokens)
    for name in ("o", "down"):
        reader = ACROSS_NORM[name]
        for way in tried_ways(chain.model.linear(name), tokens, together=True):
            chain.set(name, way)
            own = reader in names
            others = tried_ways(chain.model.linear(reader), tokens, together=True) if own else [chain.way(reader)]
            for other in others:
                chain.set(reader, other)
                chain.apply_across_norm(name, values, Residual(values["residual"]))
    return {*launched}


@pytest.mark.parametrize(("model", "tokens"), [("0.6b", 2), ("0.6b", 4), ("0.6b", 64), ("0.6b", 100), ("8b", 16)])
def test_every_kernel_that_a_set_of_ways_can_meet_is_compiled_and_none_twice(
    launched: list[Any], model: str, tokens: int
) -> None:
    chain = Chain(MODELS[model], layers=1, head=False)
    before = compiled(chain, tokens, launched, together=True)
    found = met(chain, tokens, launched)
    if "qkv" not in tuned_of(chain.model, tokens):  # its launch is another kernel's then
        found = {launch for launch in found if dict(launch[2])["N"] != chain.model.linear("qkv").n}
    assert {*before} == found
    assert len(before) == len(found)


def test_without_a_search_of_sets_only_the_tables_neighbours_are_compiled(launched: list[Any]) -> None:
    chain = Chain(MODELS["0.6b"], layers=1, head=False)
    alone, together = (compiled(chain, 16, launched, together=each) for each in (False, True))
    assert {*alone} < {*together}
    assert len(alone) == sum(
        not isinstance(way, str) for name in LAYER for way in tried_ways(chain.model.linear(name), 16, together=False)
    )
