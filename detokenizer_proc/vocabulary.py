"""How a model's ids become text: by byte table where a self-test shows that to equal the library, else by window."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tokenizers import Tokenizer

from detokenizer_proc.byte_table import (
    BYTE_TOKEN,
    REPLACE_EACH_BYTE,
    ByteTable,
    build_byte_table,
    special_token_texts,
    tokens_by_id,
)
from detokenizer_proc.text_stream import TableStream, TextStream, WindowStream

SELF_TEST_TEXTS = (
    "The quick brown fox can't jump over 1234567 lazy dogs, e.g. Mr. O'Neill's!",
    "敏捷的棕色狐狸跳过了懒狗。你好，世界！ 日本語のテキスト 한국어",
    "👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 😀",
    "Cafe\u0301 n\u0303 Z\u0351\u036b\u0343 क्षि กำ",
    "مرحبا بالعالم، كيف حالك؟",
    "one\r\ntwo\r\n\r\n\tthree  four   five\n",
    'def f(x: int) -> str:\n    return f"{x!r:>8}"  # ▁ <0x41> \\u00e9\n',
    "  two leading spaces",
    " ",
)
RANDOM_SEQUENCES = 32
RANDOM_LENGTH = 24
CACHED_PIECES = 8
"""Sets of special tokens that requests want to see; an API process asks for as many as there are formats of answers."""


@dataclass(frozen=True, slots=True)
class _Windows:
    """What windowed streams need. nameless: ids without a token."""

    tokenizer: Tokenizer
    size: int
    nameless: frozenset[int]
    special: frozenset[int]


class Vocabulary:
    """Opens text streams for one tokenizer. Ids from 0 to `size` - 1 may be pushed into them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Takes well under a second; with a byte table the tokenizer itself is not kept."""
        table = build_byte_table(tokenizer)
        self._source: ByteTable | _Windows
        if table is not None and reproduces(tokenizer, table):
            self._source = table
        else:
            tokens, special = tokens_by_id(tokenizer), special_token_texts(tokenizer)
            self._source = _Windows(
                tokenizer,
                size=len(tokens),
                nameless=frozenset(index for index, token in enumerate(tokens) if token is None),
                special=frozenset(index for index, token in enumerate(tokens) if token in special),
            )
        self.size = self._source.size
        self._visible_pieces = lru_cache(maxsize=CACHED_PIECES)(self._pieces_with)

    @property
    def uses_table(self) -> bool:
        return isinstance(self._source, ByteTable)

    def open(
        self,
        *,
        skip_special_tokens: bool,
        prompt_tail: Sequence[int],
        prompt_tokens: int,
        shown_tokens: tuple[str, ...] = (),
    ) -> TextStream:
        """prompt_tail: the prompt's last ids, at most `prompt_tokens` of them; ids out of range are left out.
        shown_tokens: special tokens, by their spelling, that are not skipped."""
        context = [token for token in prompt_tail if 0 <= token < self.size]
        source = self._source
        if isinstance(source, ByteTable):
            whole = len(prompt_tail) >= prompt_tokens
            pieces = self._visible_pieces(shown_tokens) if skip_special_tokens else source.pieces
            return TableStream(source, pieces=pieces, context=context if whole else None)
        hidden = source.nameless
        if skip_special_tokens:
            hidden |= {token for token in source.special if source.tokenizer.id_to_token(token) not in shown_tokens}
        return WindowStream(source.tokenizer, hidden=hidden, context=context)

    def _pieces_with(self, shown_tokens: tuple[str, ...]) -> list[bytes]:
        """The visible pieces and these special tokens'."""
        assert isinstance(self._source, ByteTable)
        pieces, visible = self._source.pieces, self._source.visible_pieces
        texts = {text.encode() for text in shown_tokens}
        shown = [token for token, piece in enumerate(pieces) if piece in texts and not visible[token]]
        if not shown:
            return visible
        visible = visible.copy()
        for token in shown:
            visible[token] = pieces[token]
        return visible

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token by itself, a special token's spelling included; b"" for an id without a token. Exact
        with a byte table; other decoders show what they make of the token alone."""
        source = self._source
        if not 0 <= token < self.size:
            return b""
        if isinstance(source, ByteTable):
            return source.pieces[token]
        return b"" if token in source.nameless else source.tokenizer.decode([token], skip_special_tokens=False).encode()


def reproduces(tokenizer: Tokenizer, table: ByteTable) -> bool:
    """Whether the table's streams equal the library's decode: on texts of many scripts and on random ids, both with
    and without special tokens. The same ids are tried for the same tokenizer every time."""
    return all(
        table_text(table, ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)
        for ids in _self_test_ids(tokenizer, table)
        for skip in (True, False)
    )


def table_text(table: ByteTable, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """The text of `ids` with nothing before them, streamed one id at a time."""
    pieces = table.visible_pieces if skip_special_tokens else table.pieces
    stream = TableStream(table, pieces=pieces, context=())
    return "".join([*map(stream.push, ids), stream.flush()])


def _self_test_ids(tokenizer: Tokenizer, table: ByteTable) -> Iterator[list[int]]:
    for text in SELF_TEST_TEXTS:
        yield tokenizer.encode(text, add_special_tokens=False).ids
    generator = random.Random(0)
    special = [index for index, piece in enumerate(table.pieces) if piece != table.visible_pieces[index]]
    for _ in range(RANDOM_SEQUENCES):
        ids = [generator.randrange(table.size) for _ in range(RANDOM_LENGTH)]
        if special:
            ids[:: RANDOM_LENGTH // 4] = generator.choices(special, k=4)
        yield ids if table.errors != REPLACE_EACH_BYTE else without_byte_runs(tokenizer, table, ids)


def without_byte_runs(tokenizer: Tokenizer, table: ByteTable, ids: Sequence[int]) -> list[int]:
    """`ids` with a `<0xNN>` token left out where it follows another: on invalid runs of several such tokens streams
    differ from the library by design (see `TableStream`)."""
    kept: list[int] = []
    in_run = False
    for index in ids:
        is_byte = BYTE_TOKEN.fullmatch(tokenizer.id_to_token(index) or "") is not None
        if is_byte and in_run:
            continue
        kept.append(index)
        if is_byte or table.visible_pieces[index]:
            in_run = is_byte
    return kept
