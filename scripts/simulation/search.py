"""The fewest replicas that do."""

from __future__ import annotations

import math
from collections.abc import Callable

RESOLUTION = 50
"""A count of N is found to within N / 50, at least to 1."""


def fewest(meets: Callable[[int], bool], low: int, most: int) -> int | None:
    """The least count from `low` to `most` that meets, if more always do where fewer did; None if `most` does not.

    From `low` on each is half as much again until one meets; then the space between is halved.
    """
    below, high = low - 1, low
    while not meets(high):
        if high == most:
            return None
        below, high = high, min(most, max(high + 1, math.ceil(1.5 * high)))
    while high - below > max(1, high // RESOLUTION):
        middle = (below + high) // 2
        if meets(middle):
            high = middle
        else:
            below = middle
    return high
