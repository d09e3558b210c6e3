"""Log-probabilities as a caller sees them, and their way out of the columns of a `Deltas`."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from itertools import pairwise

import msgspec

from asyncengine.wire.answers import LogprobColumns, PromptColumns
from asyncengine.wire.frames import PromptLogprobs

LOWEST_LOGPROB = -9999.0
"""Stands for anything smaller, minus infinity included, which JSON could not hold."""


class _Token(msgspec.Struct, frozen=True, gc=False):
    token_id: int
    token: bytes

    @property
    def text(self) -> str:
        """`token` for a person: U+FFFD where its bytes are no whole character."""
        return self.token.decode("utf-8", "replace")


class TopLogprob(_Token, frozen=True, gc=False):
    """One of the most likely tokens at a position. token: its bytes; a part of a character may stand alone."""

    logprob: float


class TokenLogprob(_Token, frozen=True, kw_only=True, gc=False):
    """A generated token. logprob: natural logarithm of its probability by the model's own logits, before bias,
    penalties and temperature. text_offset: characters of the choice's text before it. top: the most likely tokens at
    its position, falling; the token itself may or may not be among them."""

    logprob: float
    text_offset: int
    top: tuple[TopLogprob, ...] = ()


class PromptLogprob(_Token, frozen=True, kw_only=True, gc=False):
    """A token of a prompt. logprob: as of a `TokenLogprob`, and rank: its place among all tokens, 1 the most likely;
    both None for the first token, which follows nothing. text_offset: characters of the text of the prompt's tokens
    before it, special tokens' included."""

    logprob: float | None
    rank: int | None
    text_offset: int
    top: tuple[TopLogprob, ...] = ()


def unpack_prompt(columns: PromptColumns) -> list[PromptLogprob]:
    """Raises ValueError for columns that contradict each other."""
    prompt = columns.logprobs
    items = _items(prompt, columns)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    entries: list[PromptLogprob] = []
    text_offset = 0
    for rank, (start, end) in zip(memoryview(prompt.ranks).cast("i"), _spans(prompt.item_ends), strict=True):
        chosen, *top = items[start:end]
        entries.append(
            PromptLogprob(
                token_id=chosen.token_id,
                token=chosen.token,
                logprob=chosen.logprob if rank else None,
                rank=rank or None,
                text_offset=text_offset,
                top=tuple(top),
            )
        )
        text_offset += len(decoder.decode(chosen.token))
    return entries


def unpack(columns: LogprobColumns) -> Iterator[list[TokenLogprob]]:
    """Each request's entries in turn, as many lists as the `Deltas` has requests. Raises ValueError for columns that
    contradict each other."""
    items = _items(columns, columns)
    entries = [
        _entry(text_offset, items[start:end])
        for text_offset, (start, end) in zip(
            memoryview(columns.text_offsets).cast("i"), _spans(columns.item_ends), strict=True
        )
    ]
    for start, end in _spans(columns.ends):
        yield entries[start:end]


def _items(tokens: LogprobColumns | PromptLogprobs, texts: LogprobColumns | PromptColumns) -> list[TopLogprob]:
    """All tokens of columns, those chosen and the most likely ones. texts: where the tokens' bytes are."""
    return [
        TopLogprob(token_id, texts.token_bytes[start:end], max(logprob, LOWEST_LOGPROB))
        for token_id, logprob, (start, end) in zip(
            memoryview(tokens.ids).cast("i"),
            memoryview(tokens.logprobs).cast("f"),
            _spans(texts.token_ends),
            strict=True,
        )
    ]


def _entry(text_offset: int, items: list[TopLogprob]) -> TokenLogprob:
    chosen, *top = items
    return TokenLogprob(
        token_id=chosen.token_id,
        token=chosen.token,
        logprob=chosen.logprob,
        text_offset=text_offset,
        top=tuple(top),
    )


def _spans(ends: bytes) -> Iterator[tuple[int, int]]:
    return pairwise((0, *memoryview(ends).cast("i")))
