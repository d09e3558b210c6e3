"""Who hears how an engine's start goes."""

from __future__ import annotations

from typing import Protocol


class StartupProgress(Protocol):
    """Hears how start-up goes, that of a lost process's successor too; called in the event loop."""

    def update(self, role: str, index: int, phase: str, done: int, total: int) -> None:
        """`phase` of a sidecar is at `done` of `total` units (bytes while weights load; 0 = no measure)."""

    def phase_done(self, role: str, index: int, phase: str, seconds: float) -> None:
        """A phase of a sidecar has ended after `seconds`."""

    def ready(self, role: str, index: int, seconds: float) -> None:
        """A sidecar serves, `seconds` after its process began."""
