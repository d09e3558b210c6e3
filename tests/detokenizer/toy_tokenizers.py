"""Small tokenizers whose every id is known, one of each decoder family."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE, WordPiece
from tokenizers.pre_tokenizers import ByteLevel

HIDDEN = 256
"""`<|x|>`, a special token of `byte_level()`."""
SPELLED = 257
"""`<tool>`, an added token of `byte_level()` that is not special."""
LONG = 258
"""`qRSTq` of `byte_level()`."""
NAMELESS = 259
"""An id inside `byte_level()`'s range that no token has."""
BYTE_LEVEL_SIZE = 261


def byte_level() -> Tokenizer:
    """Ids 0 to 255 are the bytes themselves; see the constants above for the rest."""
    vocabulary = {char: _byte_of(char) for char in ByteLevel.alphabet()}
    vocabulary |= {"<|x|>": HIDDEN, "<tool>": SPELLED, "qRSTq": LONG, "last": BYTE_LEVEL_SIZE - 1}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|x|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>")])
    return tokenizer


def _byte_of(char: str) -> int:
    """The byte that a character of GPT-2's alphabet stands for."""
    if ord(char) < 256:
        return ord(char)
    moved = [byte for byte in range(256) if not (0x21 <= byte < 0x7F or 0xA1 <= byte < 0xAD or byte >= 0xAE)]
    return moved[ord(char) - 256]


PIECES = ["<s>", "▁", "▁Hello", "Hello", ",", "▁world", "!", "\n", "▁▁"]
BYTE_START = len(PIECES)


def byte_fallback(*, strip: int = 1) -> Tokenizer:
    """Llama-2's kind: `PIECES`, then `<0x00>` to `<0xFF>`; drops up to `strip` spaces where the text begins."""
    vocabulary = {piece: index for index, piece in enumerate(PIECES)}
    vocabulary |= {f"<0x{byte:02X}>": BYTE_START + byte for byte in range(256)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<s>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(" ", strip, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


def metaspace() -> Tokenizer:
    """A decoder that treats the first token differently, which no table can do."""
    vocabulary = {piece: index for index, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token="<s>"))
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


def word_pieces() -> Tokenizer:
    """BERT's kind: a space before each token that does not start with `##`."""
    tokenizer = Tokenizer(WordPiece(vocab={"un": 0, "##believ": 1, "##able": 2, "story": 3, ".": 4}, unk_token="un"))
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return tokenizer
