"""How long the mask of a slot is: a bit for each token id, the lowest of a word first, in int32 words.

Kernels take it 16 bytes a thread if they know its length to be a multiple of 16.
"""

from __future__ import annotations

ALIGNMENT_WORDS = 16


def mask_words(vocab: int) -> int:
    words = -(-vocab // 32)
    return words + -words % ALIGNMENT_WORDS
