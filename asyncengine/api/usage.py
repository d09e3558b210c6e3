"""Counting a response's tokens the way OpenAI does."""

from __future__ import annotations

import msgspec

from asyncengine.delta import Delta


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """`prompt_tokens` counts each prompt once, however many choices it has; cached tokens are part of it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(delta: Delta) -> Usage:
    """Usage of one choice so far."""
    return _usage(delta.prompt_tokens, delta.completion_tokens, delta.cached_tokens)


class UsageCounter:
    """Totals over all choices of a response; remembers the latest delta of each."""

    def __init__(self, *, n: int) -> None:
        self._n = n
        self._latest: dict[int, Delta] = {}

    def add(self, index: int, delta: Delta) -> None:
        self._latest[index] = delta

    def total(self) -> Usage:
        # the first choice is the one whose prompt was computed or found in the cache; the others share it
        firsts = [delta for index, delta in self._latest.items() if index % self._n == 0]
        return _usage(
            sum(delta.prompt_tokens for delta in firsts),
            sum(delta.completion_tokens for delta in self._latest.values()),
            sum(delta.cached_tokens for delta in firsts),
        )


def _usage(prompt: int, completion: int, cached: int) -> Usage:
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))
