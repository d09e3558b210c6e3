"""Server-sent events: one line of JSON each, as many per write as there are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType

from aiohttp import web

DONE = b"data: [DONE]\n\n"
SLOW_CLIENT_SECONDS = 120.0
"""A client that lets one write wait for so long, with all buffers full, counts as gone."""
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(json: bytes) -> bytes:
    """`json` must hold no raw line break, which encoded JSON never does."""
    return b"data: " + json + b"\n\n"


class EventStream:
    """A response that is being written, as `async with`. Entering sends the status: nothing may be refused after it.

    One timer for the whole stream looks whether the same write is waiting as when it looked last. A time-out of its own
    for each write would cost more than the write.
    """

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        self._request = request
        self.response = web.StreamResponse(headers={**HEADERS, **headers})
        self._writes = 0  # odd while one is waiting
        self._seen_writes = 0
        self._watch: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> EventStream:
        await self.response.prepare(self._request)
        self._watch_again()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._watch.cancel()

    async def send(self, events: bytes) -> None:
        """One write. Waits while the client is behind; raises ConnectionError, or is cancelled, when it is gone."""
        if events:
            self._writes += 1
            await self.response.write(events)
            self._writes += 1

    async def close(self) -> None:
        self._writes += 1
        await self.response.write_eof()
        self._writes += 1

    def _watch_again(self) -> None:
        self._watch = asyncio.get_running_loop().call_later(SLOW_CLIENT_SECONDS, self._look)

    def _look(self) -> None:
        stuck = self._writes % 2 == 1 and self._writes == self._seen_writes
        self._seen_writes = self._writes
        if not stuck:
            self._watch_again()
        elif self._request.transport is not None:
            self._request.transport.abort()
