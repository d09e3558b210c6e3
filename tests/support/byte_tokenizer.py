"""A byte-level tokenizer for tests of structured output: ids 0 to 255 are the bytes, 256 ends a text."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

EOS = 256


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    tokenizer = Tokenizer(BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def _byte_of(char: str) -> int:
    """The byte that a character of the byte-level alphabet stands for."""
    if ord(char) < 256:
        return ord(char)
    moved = [byte for byte in range(256) if not (0x21 <= byte < 0x7F or 0xA1 <= byte < 0xAD or byte >= 0xAE)]
    return moved[ord(char) - 256]
