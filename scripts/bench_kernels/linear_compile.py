"""Each kernel once that `linear.py` may launch, so that Triton's cache has all before anything is timed."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from bench_device import CANNOT_RUN, SMOKE
from bench_models import LAYER, MODELS, Model
from linear_chain import Chain, attention_of
from linear_ways import ACROSS_NORM, CUBLAS, Linear, Way, chosen_way, compile_key, room_for_parts, ways_of

from gpu_runner.kernels.linear_config import DotConfig, choose_heads

ATTENTION = "attention"


@dataclass(frozen=True)
class Launch:
    """Of one linear, or of a layer for its attention."""

    name: str
    way: Way
    across: Way  # of the linear on the other side of its norm, or the way of `down` in front of attention


def tuned_of(model: Model, tokens: int) -> tuple[str, ...]:
    """The linears of a layer that are computed as `choose` says."""
    qkv = model.linear("qkv")
    return LAYER if choose_heads(tokens, qkv.n, qkv.k, model.head_dim) is None else LAYER[1:]


def tried_ways(linear: Linear, tokens: int, *, together: bool) -> list[Way]:
    ways = ways_of(linear, tokens, together=together)
    return list(dict.fromkeys([*ways[:2], ways[-1]])) if SMOKE else ways


def launches(model: Model, tokens: int, *, head: bool, together: bool) -> dict[Hashable, Launch]:
    """By what makes them kernels of their own. together: with any ways of the linear on the other side of a norm, not
    only with that which `choose` names."""
    names = tuned_of(model, tokens)

    def across_of(name: str) -> list[Way]:
        other = model.linear(ACROSS_NORM.get(name, name))
        return (
            tried_ways(other, tokens, together=True)
            if together and other.name in names
            else [chosen_way(other, tokens)]
        )

    found: dict[Hashable, Launch] = {}
    qkv = model.linear("qkv")
    for down in across_of("qkv"):
        # With its heads, qkv is none of `names`, but reads what `down` writes all the same.
        reads = "qkv" not in names and isinstance(chosen_way(qkv, tokens), DotConfig)
        parts = room_for_parts(qkv, down) if reads else 0
        found.setdefault((ATTENTION, tokens, parts), Launch(ATTENTION, CUBLAS, down))
    for name in (*names, *["head"] * head):
        linear = model.linear(name)
        for way in tried_ways(linear, tokens, together=together):
            for across in across_of(name):
                if not isinstance(way, str):
                    found.setdefault(compile_key(linear, tokens, way, across), Launch(name, way, across))
    return found


def compile_part(
    names: list[str], token_counts: list[int], part: int, parts: int, *, head: bool, together: bool
) -> None:
    for name in names:
        found: dict[Hashable, tuple[int, Launch]] = {}
        for tokens in token_counts:
            for key, launch in launches(MODELS[name], tokens, head=head, together=together).items():
                found.setdefault(key, (tokens, launch))
        chain = Chain(MODELS[name], layers=1, head=head)
        for tokens, launch in list(found.values())[part::parts]:
            try:
                if launch.name == ATTENTION:
                    _attend(chain, tokens, launch.across, together=together)
                else:
                    chain.choose_all(tokens)
                    chain.apply_alone(launch.name, launch.way, launch.across, chain.values(tokens))
            except CANNOT_RUN:
                continue  # reported where it would be timed


def _attend(chain: Chain, tokens: int, down: Way, *, together: bool) -> None:
    """A layer as `choose` has it, but for `down` and, if together, in each way to attend."""
    chain.choose_all(tokens)
    chain.set("down", down)
    attention = attention_of(chain.model, tokens, layers=1)
    for way in attention.ways if together else attention.ways[:1]:
        attention.way = way
        chain.run(chain.values(tokens), attention, layers=1)
