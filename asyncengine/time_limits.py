"""How long a client waits, and for what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Literal

import msgspec

from asyncengine.errors import InvalidRequestError, RequestTimeoutError

Phase = Literal["first", "next", "pause"]
"""Waiting for the first output, for what follows it, and before another attempt."""


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one request in seconds; None is no limit. One that passes raises `RequestTimeoutError` with the code
    told here, and the request is cancelled at the server. Construction raises `InvalidRequestError`.

    connect: until the connection is made ("connect_timeout").
    first_token: from the beginning of an attempt to its first output ("first_token_timeout").
    between_chunks: from then on, until something more comes ("chunk_timeout").
    total: for everything, further attempts and the caller's own pauses included ("total_timeout").
    """

    connect: float | None = 10.0
    first_token: float | None = None
    between_chunks: float | None = None
    total: float | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            seconds = getattr(self, name)
            if seconds is not None and not 0.0 < seconds < float("inf"):
                raise InvalidRequestError(f"the timeout {name} must be above 0 seconds, or None, got {seconds!r}")


class TimeLimits:
    """The limits of a request that begins now.

    begin      begin_attempt        first output                          end
      |--- pause ---|----- first ---------|--- next ---|--- next ---| ... |
      |<---------------------------- total ------------------------------>|
    """

    def __init__(self, timeouts: Timeouts) -> None:
        self.timeouts = timeouts
        self._loop = asyncio.get_running_loop()
        self._began = self._attempt = self._loop.time()

    def begin_attempt(self) -> None:
        self._attempt = self._loop.time()

    @asynccontextmanager
    async def wait(self, phase: Phase) -> AsyncIterator[None]:
        """Within it, at most as long may pass as this phase has left. Raises `RequestTimeoutError`."""
        now = self._loop.time()
        moment, code, message = min(self._ends(phase, now), default=(None, "", ""))
        if moment is not None and moment <= now:
            raise RequestTimeoutError(message, code=code)
        try:
            async with asyncio.timeout_at(moment) as scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise RequestTimeoutError(message, code=code) from None

    def _ends(self, phase: Phase, now: float) -> Iterator[tuple[float, str, str]]:
        limits = self.timeouts
        if limits.total is not None:
            yield self._began + limits.total, "total_timeout", f"the answer was not complete after {limits.total:g} s"
        if phase == "first" and limits.first_token is not None:
            moment = self._attempt + limits.first_token
            yield moment, "first_token_timeout", f"there was no output after {limits.first_token:g} s"
        if phase == "next" and limits.between_chunks is not None:
            yield now + limits.between_chunks, "chunk_timeout", f"nothing more came for {limits.between_chunks:g} s"
