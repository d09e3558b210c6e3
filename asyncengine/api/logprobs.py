"""Log-probabilities in the two shapes OpenAI has for them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from asyncengine.logprobs import TokenLogprob, TopLogprob


class TopJson(msgspec.Struct, frozen=True, kw_only=True):
    """`token_id` is no part of OpenAI's schema; it is there when asked for."""

    token: str
    logprob: float
    bytes: list[int] | None
    token_id: int | UnsetType = UNSET


class EntryJson(msgspec.Struct, frozen=True, kw_only=True):
    """`token_id` and `text_offset` are no part of OpenAI's schema; they are there when asked for."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopJson]
    token_id: int | UnsetType = UNSET
    text_offset: int | UnsetType = UNSET


class ChatLogprobsJson(msgspec.Struct, frozen=True, kw_only=True):
    content: list[EntryJson]
    refusal: None = None


class CompletionLogprobsJson(msgspec.Struct, frozen=True, kw_only=True):
    """Columns, one entry a token. Of several likely tokens that look the same, `top_logprobs` has the most likely.

    text_offset: characters of the choice's text before the token. `content` is no part of OpenAI's schema: what a chat
    would have, when token ids are asked for.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
    content: list[EntryJson] | UnsetType = UNSET


def chat_logprobs(entries: Sequence[TokenLogprob], *, token_ids: bool) -> ChatLogprobsJson:
    return ChatLogprobsJson(content=[_entry(entry, token_ids) for entry in entries])


def completion_logprobs(entries: Sequence[TokenLogprob], *, token_ids: bool) -> CompletionLogprobsJson:
    return CompletionLogprobsJson(
        tokens=[entry.text for entry in entries],
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=[_by_text(entry) for entry in entries],
        text_offset=[entry.text_offset for entry in entries],
        content=[_entry(entry, token_ids) for entry in entries] if token_ids else UNSET,
    )


def _by_text(entry: TokenLogprob) -> dict[str, float]:
    """The most likely tokens, and the generated one even when it is none of them."""
    tops: dict[str, float] = {}
    for top in entry.top:
        tops.setdefault(top.text, top.logprob)
    tops.setdefault(entry.text, entry.logprob)
    return tops


def _entry(entry: TokenLogprob, token_ids: bool) -> EntryJson:
    return EntryJson(
        token=entry.text,
        logprob=entry.logprob,
        bytes=list(entry.token) or None,
        top_logprobs=[_top(top, token_ids) for top in entry.top],
        token_id=entry.token_id if token_ids else UNSET,
        text_offset=entry.text_offset if token_ids else UNSET,
    )


def _top(top: TopLogprob, token_ids: bool) -> TopJson:
    return TopJson(
        token=top.text,
        logprob=top.logprob,
        bytes=list(top.token) or None,
        token_id=top.token_id if token_ids else UNSET,
    )
