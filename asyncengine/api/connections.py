"""What a connection may cost: bytes that are not HTTP get the error object, silence is not waited for, a client that
does not read its answer is not either, bodies are not decompressed, and connections leave files to the rest."""

from __future__ import annotations

import asyncio
import logging
import resource
import sys

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from asyncengine.api.errors import error_response
from asyncengine.errors import InvalidRequestError

IDLE_SECONDS = 75.0
"""How long a request's head may take to arrive, from the connection's start or from the answer before it: longer than
the 60 s for which proxies keep connections that they may use again."""
LINGER_SECONDS = 5.0
"""How long the rest of a body that nobody reads is thrown away after the answer: a client that still sends when the
connection is closed is told that it is broken, and loses the answer."""
SLOW_CLIENT_SECONDS = 120.0
"""A client that lets one write wait for so long, with all buffers full, counts as gone."""
RESERVED_FILES = 192
"""Open files that connections leave to the rest of the process: what a lost process's successor needs above all."""
NO_ROOM = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Runner(web.AppRunner):
    """aiohttp's, with connections of the kind below."""

    def __init__(self, app: web.Application, *, shutdown_timeout: float) -> None:
        # without handler_cancellation a client that is gone would go unnoticed until the next write
        super().__init__(
            app,
            logger=logging.getLogger(__name__),
            access_log=None,
            # aiohttp would before anybody has looked at the request, on the loop's thread: a megabyte that becomes a
            # gigabyte would stop all streams for seconds, whoever sent it
            auto_decompress=False,
            handler_cancellation=True,
            keepalive_timeout=IDLE_SECONDS,
            lingering_time=LINGER_SECONDS,
            shutdown_timeout=shutdown_timeout,
        )

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            **made._kwargs,
        )


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    __slots__ = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self._manager is not None
        if len(self._manager._connections) > most_connections():
            assert self.transport is not None
            self.transport.write(NO_ROOM)
            self.force_close()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """aiohttp would wait for ever for a client that does not read."""
        try:
            async with asyncio.timeout(SLOW_CLIENT_SECONDS):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            if self.transport is not None:
                self.transport.abort()
            return resp, True

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """To log what is no HTTP, as aiohttp would, lets anybody fill the log, and repeats what may be part of a
        prompt."""
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        what = "a line of its head is too long" if isinstance(exc, LineTooLong) else "it is malformed"
        response = error_response(InvalidRequestError(f"the request is not valid HTTP: {what}", code="invalid_http"))
        response.force_close()
        return response


def most_connections() -> int:
    """How many of the files that this process may have open may be connections."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if most == resource.RLIM_INFINITY else max(most - RESERVED_FILES, most // 2)
