"""The token counts a step can be run at: each is one captured graph on a GPU."""

from __future__ import annotations

from bisect import bisect_left


def token_buckets(max_tokens: int) -> tuple[int, ...]:
    """Ascending buckets up to `max_tokens`, itself one: 1, 2, 4, 8, 16, 24, 32, then in steps of a quarter of a power
    of two, so that a step padded to the next bucket computes at most a quarter more. A GPU's time hardly depends on the
    number of tokens up to 32, so fewer graphs do."""
    buckets = [1, 2, 4, 8]
    power = 8
    while buckets[-1] < max_tokens:
        step = max(power // 4, 8)
        buckets.extend(range(power + step, 2 * power + 1, step))
        power *= 2
    return (*(bucket for bucket in buckets if bucket < max_tokens), max_tokens)


def bucket_for(buckets: tuple[int, ...], num_tokens: int) -> int:
    """The smallest bucket that holds `num_tokens`."""
    return buckets[bisect_left(buckets, num_tokens)]
