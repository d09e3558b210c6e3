"""The fewest replicas that do."""

from __future__ import annotations

from collections.abc import Callable

RESOLUTION = 50
"""A count of N is found to within N / 50, at least to 1."""


def fewest(meets: Callable[[int], bool], guess: int, most: int) -> int | None:
    """The least count from 1 to `most` that meets, if more always do where fewer did; None if `most` does not.

    From `guess`, at most `most`, it goes up or down in steps that double; then the space between is halved.
    """
    step = max(1, guess // RESOLUTION)
    if meets(guess):
        below, high = max(0, guess - step), guess
        while below and meets(below):
            step *= 2
            below, high = max(0, below - step), below
    else:
        below, high = guess, min(most, guess + step)
        while below < most and not meets(high):
            step *= 2
            below, high = high, min(most, high + step)
        if below == most:
            return None
    while high - below > max(1, high // RESOLUTION):
        middle = (below + high) // 2
        if meets(middle):
            high = middle
        else:
            below = middle
    return high
