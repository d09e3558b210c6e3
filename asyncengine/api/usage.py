"""Counting a response's tokens the way OpenAI does."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from asyncengine.delta import Delta


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """session_tokens: what the request's session had before it, if there was such a session; first_differing_token:
    where the prompt ceases to be that, if it does (see `Delta`)."""

    cached_tokens: int
    session_tokens: int | UnsetType = UNSET
    first_differing_token: int | UnsetType = UNSET


class Usage(msgspec.Struct, frozen=True):
    """`prompt_tokens` counts each prompt once, however many choices it has; cached tokens are part of it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(delta: Delta) -> Usage:
    """Usage of one choice so far."""
    return _usage(delta.prompt_tokens, delta.completion_tokens, delta.cached_tokens, delta)


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
            firsts[0] if firsts else None,
        )


def _usage(prompt: int, completion: int, cached: int, first: Delta | None) -> Usage:
    """first: of the choices; a request with a session has only one prompt."""
    details = PromptTokensDetails(cached)
    if first is not None and first.session_tokens is not None:
        differs = first.first_differing_token
        details = PromptTokensDetails(cached, first.session_tokens, UNSET if differs is None else differs)
    return Usage(prompt, completion, prompt + completion, details)
