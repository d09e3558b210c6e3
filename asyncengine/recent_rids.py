"""What was aborted a moment ago."""

from __future__ import annotations

KEEP_SECONDS = 1.0


class RecentRids:
    """A set that forgets: a rid is in it for one to two `KEEP_SECONDS`, as long as others come.

    seconds   0      0.5      1.0      1.5      2.0
    newer     {a}    {a, b}   {}       {c}      {}
    older     {}     {}       {a, b}   {a, b}   {c}
    """

    def __init__(self) -> None:
        self._newer: set[int] = set()
        self._older: set[int] = set()
        self._turned = 0.0

    def add(self, rid: int, now: float) -> bool:
        """Whether it was not there. now: seconds of CLOCK_MONOTONIC."""
        if now - self._turned >= KEEP_SECONDS:
            self._older, self._newer, self._turned = self._newer, set(), now
        if rid in self._newer or rid in self._older:
            return False
        self._newer.add(rid)
        return True
