"""Server-sent events: one line of JSON each, as many per write as there are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from aiohttp import HttpVersion11, web

from asyncengine.api import connections

DONE = b"data: [DONE]\n\n"
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(json: bytes) -> bytes:
    """`json` must hold no raw line break, which encoded JSON never does."""
    return b"data: " + json + b"\n\n"


class EventStream:
    """A response that is being written: `start`, then `push` as often as there is something, then `close`.

    `start`, `drain` and `close` wait while the client is behind; they raise ConnectionError, or are cancelled, when it
    is gone. `push` never waits, so that it can be called from anywhere in the event loop: whoever calls it looks at
    `behind` first, and waits for `drain` where that is so.
    """

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        self._request = request
        self._protocol = request.protocol
        self._chunked = request.version >= HttpVersion11
        self.response = web.StreamResponse(headers={**HEADERS, **headers})

    async def start(self, events: bytes) -> None:
        """Send the status, after which nothing may be refused, and the first events."""
        async with self._patience():
            await self.response.prepare(self._request)
            await self.response.write(events)

    @property
    def behind(self) -> bool:
        """The client leaves all buffers full."""
        return self._protocol.writing_paused

    def push(self, events: bytes) -> None:
        """Write now. To a client that is gone nothing is written: its handler is about to be cancelled."""
        transport = self._protocol.transport
        if transport is not None and not transport.is_closing():
            # the framing of aiohttp's own writer, without its coroutine for each write
            transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)

    async def drain(self) -> None:
        async with self._patience():
            await self._request.writer.drain()

    async def close(self, events: bytes) -> None:
        """Send the last events and the end of the response."""
        async with self._patience():
            await self.response.write_eof(events)

    @asynccontextmanager
    async def _patience(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(connections.SLOW_CLIENT_SECONDS):
                yield
        except TimeoutError:
            if self._protocol.transport is not None:
                self._protocol.transport.abort()
            raise ConnectionResetError("the client has stopped reading") from None
