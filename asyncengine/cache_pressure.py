"""Tells an operator of a KV cache that is too small for what is asked of it, which else shows as lost speed only."""

from __future__ import annotations

from collections.abc import Mapping

PERSISTS_SECONDS = 10.0
"""What is over sooner is the ordinary end of a busy moment."""
CALM_SECONDS = 3.0
"""So long without a sign of it, and it is over."""
QUIET_SECONDS = 60.0
"""Least time between two reports."""


class CachePressure:
    """Watches gpu_runner's gauges: whether requests wait for pages, and how many have lost theirs."""

    def __init__(self) -> None:
        self._preemptions = 0  # at the latest look
        self._began = self._seen = 0.0
        self._before = 0  # preemptions when it began
        self._quiet_until = 0.0

    def look(self, gauges: Mapping[str, int], now: float) -> str | None:
        """The report, if one is due. gauges: of the latest heartbeat. now: in s."""
        preemptions, waiting = gauges.get("preemptions", 0), gauges.get("waiting_for_pages", 0)
        before, self._preemptions = self._preemptions, preemptions
        if not waiting and preemptions <= before:
            return None
        if now - self._seen > CALM_SECONDS or preemptions < before:  # or it is another process's count
            self._began, self._before = now, min(before, preemptions)
        self._seen = now
        if now - self._began < PERSISTS_SECONDS or now < self._quiet_until:
            return None
        self._quiet_until = now + QUIET_SECONDS
        return (
            f"the KV cache of {gauges.get('total_pages', 0)} pages has been full for {now - self._began:.0f} s: "
            f"{gauges.get('running', 0)} requests run, {waiting} wait for pages, "
            f"{preemptions - self._before} times one that ran had to give up its own"
        )
