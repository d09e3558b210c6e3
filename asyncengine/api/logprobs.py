"""Log-probabilities in the two shapes OpenAI has for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from asyncengine.logprobs import PromptLogprob, TokenLogprob, TopLogprob


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

    text_offset: characters of the choice's text before the token. With an echo the prompt's tokens come first; the very
    first follows nothing and has null. `content` is no part of OpenAI's schema: what a chat would have of the generated
    tokens, when token ids are asked for.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    content: list[EntryJson] | UnsetType = UNSET


def chat_logprobs(entries: Sequence[TokenLogprob], *, token_ids: bool) -> ChatLogprobsJson:
    return ChatLogprobsJson(content=[_entry(entry, token_ids) for entry in entries])


def completion_logprobs(
    entries: Sequence[TokenLogprob], *, token_ids: bool, prompt: Sequence[PromptLogprob] = (), num_top: int = 0
) -> CompletionLogprobsJson:
    """prompt: the tokens of an echoed prompt, with at most `num_top` likely ones each."""
    both: list[PromptLogprob | TokenLogprob] = [*prompt, *entries]
    return CompletionLogprobsJson(
        tokens=[entry.text for entry in both],
        token_logprobs=[entry.logprob for entry in both],
        top_logprobs=[
            *(_by_text(entry.text, entry.logprob, entry.top[:num_top]) for entry in prompt),
            *(_by_text(entry.text, entry.logprob, entry.top) for entry in entries),
        ],
        text_offset=[entry.text_offset for entry in both],
        content=[_entry(entry, token_ids) for entry in entries] if token_ids else UNSET,
    )


class PromptItemJson(msgspec.Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobsJson = list[dict[int, PromptItemJson] | None]
"""As vLLM has them: for each token of a prompt itself and the most likely ones, by id; null for the first."""


def prompt_logprobs(entries: Sequence[PromptLogprob], *, num_top: int) -> PromptLogprobsJson:
    return [None if entry.logprob is None else dict(_prompt_items(entry, num_top)) for entry in entries]


def _prompt_items(entry: PromptLogprob, num_top: int) -> Iterator[tuple[int, PromptItemJson]]:
    assert entry.logprob is not None
    assert entry.rank is not None
    yield entry.token_id, PromptItemJson(entry.logprob, entry.rank, entry.text)
    for rank, top in enumerate(entry.top[:num_top], start=1):
        yield top.token_id, PromptItemJson(top.logprob, rank, top.text)


def _by_text(text: str, logprob: float | None, likely: Sequence[TopLogprob]) -> dict[str, float] | None:
    """The most likely tokens, and the one that is there even when it is none of them."""
    if logprob is None:
        return None
    tops: dict[str, float] = {}
    for top in likely:
        tops.setdefault(top.text, top.logprob)
    tops.setdefault(text, logprob)
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
