"""What the server's processes hold over time, and whether it grows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from chaos.processes import Process, family

EVERY_SECONDS = 2.0
WARM_UP_SECONDS = 90.0
"""Of each process: until then it may grow as it likes."""
JUDGED_SECONDS = 120.0
"""From then on; a process that did not live so long is not judged."""
MAX_GROWTH = 8 * 1024
"""Bytes of resident memory a second, and what a process of Python or torch that keeps nothing stays under."""


@dataclass
class History:
    """times: seconds from the first sample."""

    role: str
    times: list[float] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)

    def growth(self) -> float | None:
        """Bytes a second after the warm-up, by least squares; None for a life too short for it."""
        pairs = list(zip(self.times, self.rss_bytes, strict=True))
        points = [(at, rss) for at, rss in pairs if at >= self.times[0] + WARM_UP_SECONDS]
        if not points or points[-1][0] - points[0][0] < JUDGED_SECONDS:
            return None
        return slope(points)


class Sampler:
    """Samples the family of process `root`. `rows` are times and who there was; `histories` by process id."""

    def __init__(self, root: int) -> None:
        self._root = root
        self.rows: list[tuple[float, list[Process]]] = []
        self.histories: dict[int, History] = {}

    async def run(self) -> None:
        """Until cancelled."""
        begin = time.monotonic()
        while True:
            self.add(time.monotonic() - begin, family(self._root))
            await asyncio.sleep(EVERY_SECONDS)

    def add(self, at: float, processes: list[Process]) -> None:
        self.rows.append((at, processes))
        for process in processes:
            history = self.histories.setdefault(process.pid, History(process.role))
            history.times.append(at)
            history.rss_bytes.append(process.rss_bytes)

    def growing(self) -> list[str]:
        """Processes that grow faster than `MAX_GROWTH`."""
        return [
            f"{history.role} (process {pid}) grows by {growth / 1024:.1f} KiB a second, allowed are "
            f"{MAX_GROWTH / 1024:.0f}"
            for pid, history in self.histories.items()
            if (growth := history.growth()) is not None and growth > MAX_GROWTH
        ]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the straight line that is nearest to `points` (x, y), of which at least two differ in x."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
