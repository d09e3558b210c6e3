"""The fewest replicas that do."""

from __future__ import annotations

from collections.abc import Callable

RESOLUTION = 50
"""A count of N is found to within N / 50, at least to 1."""


def fewest(meets: Callable[[int], bool], low: int, most: int) -> int | None:
    """The least count from `low` to `most` that meets, if more always do where fewer did; None if `most` does not.

    From `low` on the steps double until one meets; then the space between is halved.
    """
    below, high, step = low - 1, low, max(1, low // RESOLUTION)
    while not meets(high):
        if high == most:
            return None
        below, high, step = high, min(most, high + step), 2 * step
    while high - below > max(1, high // RESOLUTION):
        middle = (below + high) // 2
        if meets(middle):
            high = middle
        else:
            below = middle
    return high
