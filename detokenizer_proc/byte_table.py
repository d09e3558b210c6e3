"""One table from token id to bytes, for tokenizers whose decoder works on each token by itself.

Two families qualify, told apart by the tokenizer's own decoder: byte-level BPE, whose tokens spell bytes in GPT-2's
printable alphabet, and SentencePiece-like vocabularies with `▁` for a space and `<0xNN>` for a byte. Text is then
nothing but the tokens' bytes read as UTF-8, so a stream needs no look back at earlier tokens.
"""

from __future__ import annotations

import codecs
import json
import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
REPLACE_EACH_BYTE = "asyncengine.replace-each-byte"


@dataclass(frozen=True, slots=True)
class ByteTable:
    """What each token id adds to the text, as bytes.

    pieces, visible_pieces: [V] by token id; in `visible_pieces` special tokens are empty. Ids no token has are empty.
    errors: how invalid UTF-8 is shown, a codecs error handler. Byte-level decoders show one U+FFFD for each maximal
    bad part, byte-fallback decoders one for each byte.
    strip, strip_count: at most that many of that character are dropped where the text (prompt included) begins.
    """

    pieces: list[bytes]
    visible_pieces: list[bytes]
    errors: str
    strip: str
    strip_count: int

    @property
    def size(self) -> int:
        return len(self.pieces)


@dataclass(frozen=True, slots=True)
class _Rules:
    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: str = ""
    strip_count: int = 0


def build_byte_table(tokenizer: Tokenizer) -> ByteTable | None:
    """The tokenizer's table, or None when its decoder is of neither family."""
    rules = _read_rules(tokenizer)
    if rules is None:
        return None
    tokens = tokens_by_id(tokenizer)
    pieces = _byte_level_pieces(tokens) if rules.byte_level else _marked_space_pieces(tokens, rules)
    special = special_token_texts(tokenizer)
    visible = [b"" if token in special else piece for token, piece in zip(tokens, pieces, strict=True)]
    errors = REPLACE_EACH_BYTE if rules.byte_fallback else "replace"
    return ByteTable(pieces, visible, errors, rules.strip, rules.strip_count)


def tokens_by_id(tokenizer: Tokenizer) -> list[str | None]:
    """[V] the vocabulary's spelling of each token; None for an id without one. An added token hides the model's."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    added = tokenizer.get_added_tokens_decoder()
    tokens: list[str | None] = [None] * (max(max(vocabulary.values(), default=-1), max(added, default=-1)) + 1)
    for token, index in vocabulary.items():
        tokens[index] = token
    for index, added_token in added.items():
        tokens[index] = added_token.content
    return tokens


def special_token_texts(tokenizer: Tokenizer) -> frozenset[str]:
    """Spellings that `skip_special_tokens` hides. Like the library, by spelling and not by id."""
    return frozenset(token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special)


def _read_rules(tokenizer: Tokenizer) -> _Rules | None:
    if tokenizer.decoder is None:
        return None
    config = json.loads(tokenizer.decoder.__getstate__())
    steps: list[dict[str, Any]] = config["decoders"] if config["type"] == "Sequence" else [config]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _Rules(byte_level=True)
    replacements: list[tuple[str, str]] = []
    byte_fallback = fused = False
    strip, strip_count = "", 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not byte_fallback | fused:
                replacements.append((old, new))
            case {"type": "ByteFallback"} if not byte_fallback | fused:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": str(content), "start": int(start), "stop": 0} if fused and not strip:
                strip, strip_count = content, start
            case _:
                return None
    return _Rules(replacements=tuple(replacements), byte_fallback=byte_fallback, strip=strip, strip_count=strip_count)


def _byte_level_pieces(tokens: list[str | None]) -> list[bytes]:
    alphabet = _gpt2_alphabet()
    pieces = []
    for token in tokens:
        try:
            pieces.append(codecs.charmap_encode(token or "", "strict", alphabet)[0])
        except UnicodeEncodeError:  # an added token: a character outside the alphabet makes the whole of it literal
            pieces.append((token or "").encode())
    return pieces


def _gpt2_alphabet() -> dict[int, int]:
    """Character -> byte. Printable latin-1 stands for itself, the other 68 bytes in order for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + index: byte for index, byte in enumerate(others)}


def _marked_space_pieces(tokens: list[str | None], rules: _Rules) -> list[bytes]:
    pieces = []
    for token in tokens:
        text = token or ""
        for old, new in rules.replacements:
            text = text.replace(old, new)
        if rules.byte_fallback and BYTE_TOKEN.fullmatch(text):
            pieces.append(bytes([int(text[3:5], 16)]))
        else:
            pieces.append(text.encode())
    return pieces


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(REPLACE_EACH_BYTE, _replace_each_byte)
