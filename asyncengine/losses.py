"""The processes that an engine has lost: how many it bears, and whose successors are not ready yet."""

from __future__ import annotations

from collections import Counter, deque


class Losses:
    """`most` losses within `window_seconds` are too many. All times are in seconds of one clock."""

    def __init__(self, *, most: int, window_seconds: float) -> None:
        self._most = most
        self._window_seconds = window_seconds
        self._latest: deque[tuple[float, str, bool]] = deque(maxlen=most)
        self._open: dict[str, float] = {}

    def begin(self, name: str, now: float) -> None:
        """Process `name` is lost, or as good as that; said again, it changes nothing."""
        self._open.setdefault(name, now)

    def count(self, name: str, reason: str, now: float, *, crashed: bool = False) -> str | None:
        """It has ended; the sentence with which its engine ends, if it was one too many. crashed: as in `Crash`."""
        self.begin(name, now)
        self._latest.append((now, name, crashed))
        if len(self._latest) < self._most or now - self._latest[0][0] > self._window_seconds:
            return None
        if self._most == 1:
            return reason
        times = Counter(name for _, name, _ in self._latest)
        who = ", ".join(f"{name} {'once' if count == 1 else f'{count} times'}" for name, count in times.items())
        return f"{self._most} processes were lost within {self._window_seconds:g} s ({who}); the last: {reason}"

    def excuse(self, reason: str, *, in_a_row: int) -> str | None:
        """A crash, and those before it, were a request's fault, which is not sent again: none of them counts. The
        sentence with which the engine ends, if more than `most` requests `in_a_row` were blamed: it is not them."""
        self._latest = deque((loss for loss in self._latest if not loss[2]), maxlen=self._most)
        if in_a_row <= self._most:
            return None
        return f"{reason}; {in_a_row} requests in a row have done so, and none has ended well since"

    def end(self, name: str, now: float) -> float:
        """Its successor is ready; returns how long its place was empty."""
        return now - self._open.pop(name)

    def lost_at(self, name: str) -> float | None:
        """Since when the place is empty; None if it is not."""
        return self._open.get(name)
