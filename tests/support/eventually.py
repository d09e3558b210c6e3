"""Waiting for what another task, thread or process still has to do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PATIENCE_SECONDS = 60
"""A machine with busy cores is several times slower."""


async def eventually(condition: Callable[[], bool]) -> None:
    """Returns once `condition` holds; fails after a minute."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)
