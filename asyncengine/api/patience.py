"""How long the server lets a request take, by the engine's configuration, so that no wait lasts for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from asyncengine.engine_info import EngineInfo
from asyncengine.errors import EngineError, OverloadedError, RequestTimeoutError


class Patience:
    """With one request, from now on.

    now          first output                              end
     |--- beginning ---|                                    |
     |------------------------ whole -----------------------|
    """

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._began = asyncio.get_running_loop().time()

    @asynccontextmanager
    async def beginning(self) -> AsyncIterator[None]:
        """Wait, within it, for the first output, or for an answer that takes no running. Raises `OverloadedError`."""
        seconds = self._info.queue_timeout_seconds
        error = OverloadedError(f"nothing of the answer was there after {seconds:g} s", code="queue_timeout")
        async with self._until(seconds, error):
            yield

    @asynccontextmanager
    async def whole(self) -> AsyncIterator[None]:
        """Wait, within it, for the rest. Raises `RequestTimeoutError`."""
        seconds = self._info.request_timeout_seconds
        error = RequestTimeoutError(f"the answer was not complete after {seconds:g} s", code="request_timeout")
        async with self._until(seconds, error):
            yield

    @asynccontextmanager
    async def _until(self, seconds: float, error: EngineError) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(self._began + seconds) as scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise error from None
