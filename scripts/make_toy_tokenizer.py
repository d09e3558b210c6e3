"""Writes a tokenizer.json of any vocabulary size, so that a model with random weights can be served.

    python scripts/make_toy_tokenizer.py OUT VOCAB_SIZE

OUT is the file to write, or a folder to write tokenizer.json into. Ids 0 to 255 are the bytes; those above are made-up
words of letters with a space before each, about as long as real tokens, so that text costs what it costs with a real
vocabulary. Encoding gives bytes only; the words are for what the model emits.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

BYTES = 256
SPACE = "Ġ"
"""The space in the alphabet of byte-level tokens."""


def toy_tokenizer(vocab_size: int) -> Tokenizer:
    """vocab_size: at least 256."""
    if vocab_size < BYTES:
        raise ValueError(f"a vocabulary needs at least the {BYTES} bytes, got {vocab_size}")
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [SPACE + word(index) for index in range(vocab_size - BYTES)]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def word(index: int) -> str:
    """A different word for every index: its number in base 26, of at least three letters."""
    letters = ""
    while index or len(letters) < 3:
        index, letter = divmod(index, 26)
        letters = chr(ord("a") + letter) + letters
    return letters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("vocab_size", type=int, metavar="VOCAB_SIZE")
    args = parser.parse_args()
    path = args.out / "tokenizer.json" if args.out.is_dir() else args.out
    toy_tokenizer(args.vocab_size).save(str(path))
    print(f"{path}: {args.vocab_size} tokens")


if __name__ == "__main__":
    main()
