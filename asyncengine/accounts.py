"""What an API process writes about itself where every process of the engine can read it."""

from __future__ import annotations

import time
from pathlib import Path

from asyncengine.config import EngineConfig
from asyncengine.errors import StartupError
from asyncengine.gc_clock import GcClock
from asyncengine.metrics import RequestMetrics
from asyncengine.request_terms import targets_of
from asyncengine.wire.accounting import RingWriter, TurnRecord


class Accounts:
    """What its requests amounted to, how long collecting garbage stopped it, and its latest turns; until `close`."""

    def __init__(self, run_dir: Path, worker: int, config: EngineConfig, *, metrics_fd: int | None = None) -> None:
        """metrics_fd: as in `SidecarConfig`. Raises `StartupError`."""
        self.run_dir = run_dir
        try:
            self.metrics = RequestMetrics(run_dir, worker, targets_of(config), fd=metrics_fd)
            self._ring = RingWriter(run_dir, "engine", worker, TurnRecord)
        except OSError as error:
            raise StartupError(f"cannot get memory for the engine's accounts: {error}") from error
        self._gc_clock = GcClock(self.metrics.paused)
        self._gc_clock.start()

    def turn(self, begin: int, middle: int, *, messages: int, rows: int, requests: int) -> None:
        """A turn ends now that began at `begin` and had read its messages, with news of `rows` choices, at `middle` (ns
        of CLOCK_MONOTONIC). requests: that are open."""
        self._ring.write((begin, middle, time.monotonic_ns(), messages, rows, requests, 0))

    def close(self) -> None:
        self._gc_clock.stop()
        self._ring.close()
        self.metrics.close()
