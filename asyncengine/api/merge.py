"""Several streams of deltas as one, in batches: all the news there is each time the reader comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from asyncengine.delta import Delta

News = list[tuple[int, Delta]]
"""(choice's index in the whole response, what is new of it)"""


async def merge(streams: Sequence[AsyncGenerator[Delta, None]], n: int) -> AsyncGenerator[News, None]:
    """Run all streams, of `n` choices each, until each has ended; yield their news.

    Choice `k` of stream `i` has index `i * n + k`. The first exception of any stream is raised at once. Close this
    generator (`contextlib.aclosing`) to close the streams: leaving early aborts what still runs.
    """
    if len(streams) == 1 and n == 1:
        async with aclosing(streams[0]) as stream:
            async for delta in stream:
                yield [(0, delta)]
        return
    inbox = _Inbox(running=len(streams), limit=len(streams) * n)
    pumps = [asyncio.create_task(inbox.pump(stream, i * n)) for i, stream in enumerate(streams)]
    try:
        while (news := await inbox.take()) is not None:
            yield news
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


class _Inbox:
    """Where the pumps of one response leave their news.

    pump 0   put  put .............. wait for room ........ put
    pump 1        put   (limit)                         |    put
    reader   sleep | take [0,0,1] | busy writing ....... | take | ...

    A pump stops once `limit` deltas wait: from there on the engine's own streams merge what arrives, so a slow reader
    costs no memory here. Everything runs in one event loop.
    """

    def __init__(self, *, running: int, limit: int) -> None:
        self._running = running
        self._limit = limit
        self._news: News = []
        self._error: Exception | None = None
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()

    async def pump(self, stream: AsyncGenerator[Delta, None], first_index: int) -> None:
        try:
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    self._news.append((first_index + delta.index, delta))
                    self._arrived.set()
                    while len(self._news) >= self._limit:
                        self._room.clear()
                        await self._room.wait()
        except Exception as error:  # noqa: BLE001 - raised again by `take`, in the reader's task
            self._error = self._error or error
        self._running -= 1
        self._arrived.set()

    async def take(self) -> News | None:
        """All news there is, waiting for some; None when every pump has ended. Raises the first error of a pump."""
        while True:
            if self._error is not None:
                raise self._error
            if self._news:
                news, self._news = self._news, []
                self._room.set()
                return news
            if self._running == 0:
                return None
            self._arrived.clear()
            await self._arrived.wait()
