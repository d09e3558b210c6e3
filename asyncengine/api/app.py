"""The HTTP server of one process: made of one engine, started on one address."""

from __future__ import annotations

import errno
import logging
import socket

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from asyncengine.api.backend import Backend
from asyncengine.api.errors import errors_as_json
from asyncengine.api.routes import Routes
from asyncengine.errors import StartupError

MIN_BODY_BYTES = 4 * 1024 * 1024
BODY_BYTES_PER_TOKEN = 16
"""A token id and its comma take at most 12 bytes of JSON, a token's text rarely more than 8."""
BACKLOG = 2048
ACCEPTORS = 8
"""Duplicates of the listening socket. uvloop accepts one connection a socket and turn of the loop; with hundreds of
streams to write a turn takes milliseconds, and new clients would queue for more than a second."""
SHUTDOWN_SECONDS = 2.0
"""How long `cleanup` waits for handlers, which end at once when the engine has been closed before."""

logger = logging.getLogger(__name__)


def make_app(backend: Backend) -> web.Application:
    """The application; see `run_app` for how it must be run."""
    max_body = max(MIN_BODY_BYTES, BODY_BYTES_PER_TOKEN * backend.info.max_model_len)
    app = web.Application(middlewares=[errors_as_json], client_max_size=max_body)
    Routes(backend).add_to(app)
    return app


async def run_app(backend: Backend, host: str, port: int) -> web.AppRunner:
    """Serve `backend` until the runner's `cleanup` is awaited. Port 0 takes a free one; `bound_port` tells which.

    Raises `StartupError` when the address cannot be had.
    """
    # without handler_cancellation a client that is gone would go unnoticed until the next write
    runner = web.AppRunner(
        make_app(backend),
        logger=logger,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=SHUTDOWN_SECONDS,
    )
    logger.addFilter(_is_no_clients_fault)
    await runner.setup()
    try:
        for listener in _listen(host, port):
            for _ in range(ACCEPTORS - 1):
                await web.SockSite(runner, listener.dup(), backlog=BACKLOG).start()
            await web.SockSite(runner, listener, backlog=BACKLOG).start()
    except OSError as error:
        await runner.cleanup()
        reason = "the port is already in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        raise StartupError(f"cannot listen on {host}:{port}: {reason}") from error
    return runner


def _listen(host: str, port: int) -> list[socket.socket]:
    """A listening socket for each address of `host`, all on one port; raises OSError."""
    listeners: list[socket.socket] = []
    try:
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            chosen = listeners[0].getsockname()[1] if listeners else port
            listeners.append(socket.create_server((address[0], chosen), family=family, backlog=BACKLOG))
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def bound_port(runner: web.AppRunner) -> int:
    """The port that a started runner listens on."""
    return int(runner.addresses[0][1])


def _is_no_clients_fault(record: logging.LogRecord) -> bool:
    """Bytes that are not HTTP get their 400; to log them, as aiohttp would, lets anybody fill the log, and repeats what
    may be part of a prompt."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)
