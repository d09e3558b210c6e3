"""Tells of life while a turn lasts: long texts take the library seconds, many where others have the cores."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from asyncengine.wire.sidecar import HEARTBEAT_SECONDS

TURN_SECONDS = 90.0
"""Of silence there is an end too: what a turn computes is bounded by the kernel, but it might wait for ever."""


class Pulse:
    """Calls `beat` in a thread of its own, every `HEARTBEAT_SECONDS` of a turn that lasts so long, and never outside of
    one. The library lets go of the interpreter while it encodes; a process that is stopped has no thread that runs.

        turn      begin ........................................ end | begin .. end
        thread           beat        beat        beat                |
    """

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat = beat
        self._lock = threading.Lock()
        self._began: float | None = None
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    @contextmanager
    def turn(self) -> Iterator[None]:
        self._began = time.monotonic()
        try:
            yield
        finally:
            with self._lock:  # no beat is under way once the turn is over: its pipe may be closed now
                self._began = None

    def _run(self) -> None:
        while True:
            time.sleep(HEARTBEAT_SECONDS)
            with self._lock:
                if self._began is not None and HEARTBEAT_SECONDS < time.monotonic() - self._began < TURN_SECONDS:
                    self._beat()
