"""Server-sent events: one line of JSON each, as many per write as there are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiohttp import web

DONE = b"data: [DONE]\n\n"
SLOW_CLIENT_SECONDS = 120.0
"""A client that has not taken a byte for so long, with all buffers full, counts as gone."""
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(json: bytes) -> bytes:
    """`json` must hold no raw line break, which encoded JSON never does."""
    return b"data: " + json + b"\n\n"


class EventStream:
    """A response that is being written. `open` sends the status, so nothing may be refused after it."""

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        self._request = request
        self.response = web.StreamResponse(headers={**HEADERS, **headers})

    async def open(self) -> None:
        await self.response.prepare(self._request)

    async def send(self, events: bytes) -> None:
        """One write. Waits while the client is behind; raises ConnectionError when it is gone or takes nothing."""
        if not events:
            return
        try:
            async with asyncio.timeout(SLOW_CLIENT_SECONDS):
                await self.response.write(events)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionAbortedError("the client does not read") from None

    async def close(self) -> None:
        await self.response.write_eof()
