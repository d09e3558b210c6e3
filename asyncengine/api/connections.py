"""Connections that bring no request: bytes that are not HTTP get the error object, silence is not waited for."""

from __future__ import annotations

import logging

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


class Runner(web.AppRunner):
    """aiohttp's, with connections of the kind below."""

    def __init__(self, app: web.Application, *, shutdown_timeout: float) -> None:
        # without handler_cancellation a client that is gone would go unnoticed until the next write
        super().__init__(
            app,
            logger=logging.getLogger(__name__),
            access_log=None,
            handler_cancellation=True,
            auto_decompress=False,  # `json_body` does it, and no further than a body may be long
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
