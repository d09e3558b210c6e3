"""The HTTP server of one process: made of one engine, started on one address."""

from __future__ import annotations

import errno
import gc
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Middleware

from asyncengine.api.access import key_check
from asyncengine.api.backend import Backend
from asyncengine.api.connections import Runner
from asyncengine.api.console_routes import ConsoleRoutes
from asyncengine.api.endpoints import serve
from asyncengine.api.errors import errors_as_json
from asyncengine.api.hosts import host_check
from asyncengine.api.openapi import openapi_endpoint
from asyncengine.api.reception import RECEPTION, Reception
from asyncengine.api.routes import Routes
from asyncengine.api.status_routes import StatusRoutes
from asyncengine.api.token_routes import TokenRoutes
from asyncengine.config import HTTP_DEFAULTS, HttpOptions
from asyncengine.errors import StartupError

if TYPE_CHECKING:
    from asyncengine.api.tracing import Tracing

MIN_BODY_BYTES = 4 * 1024 * 1024
BODY_BYTES_PER_TOKEN = 16
"""A token id and its comma take at most 12 bytes of JSON, a token's text rarely more than 8."""
TOTAL_BODY_BYTES = 256 * 1024 * 1024
"""Of all bodies that are being received, or twice the largest if that is more."""
BACKLOG = 2048
ACCEPTORS = 32
"""Duplicates of the listening socket. uvloop accepts one connection a socket and turn of the loop; with hundreds of
streams to write a turn takes ten milliseconds, and new clients would queue for a second. Each one costs every accept a
system call."""
SHUTDOWN_SECONDS = 2.0
"""How long `cleanup` waits for handlers, which end at once when the engine has been closed before."""


def make_app(backend: Backend, http: HttpOptions = HTTP_DEFAULTS, *, tracing: Tracing | None = None) -> web.Application:
    """The application; see `run_app` for how it must be run. It closes `tracing`."""
    max_body = max(MIN_BODY_BYTES, BODY_BYTES_PER_TOKEN * backend.info.max_model_len)
    middlewares: list[Middleware] = [errors_as_json] if tracing is None else [tracing.middleware, errors_as_json]
    middlewares.append(key_check(http.api_keys) if http.api_keys else host_check(http.allowed_hosts))
    app = web.Application(middlewares=middlewares, client_max_size=max_body)
    app[RECEPTION] = Reception(most_bytes=max(TOTAL_BODY_BYTES, 2 * max_body))
    if tracing is not None:
        app.on_cleanup.append(tracing.close)
    endpoints = [
        endpoint
        for routes in (Routes(backend), TokenRoutes(backend), StatusRoutes(backend))
        for endpoint in routes.endpoints()
    ]
    serve([*endpoints, openapi_endpoint(endpoints)], app)
    if http.console:
        ConsoleRoutes(backend).add_to(app)
    return app


async def run_app(
    backend: Backend,
    host: str,
    port: int,
    http: HttpOptions = HTTP_DEFAULTS,
    *,
    tracing: Tracing | None = None,
) -> web.AppRunner:
    """Serve `backend` until the runner's `cleanup` is awaited. Port 0 takes a free one; `bound_port` tells which.

    Raises `StartupError` when the address cannot be had.
    """
    return await run_app_on(backend, bind(host, port), http, tracing=tracing)


async def run_app_on(
    backend: Backend,
    sockets: Sequence[socket.socket],
    http: HttpOptions = HTTP_DEFAULTS,
    *,
    acceptors: int = ACCEPTORS,
    tracing: Tracing | None = None,
) -> web.AppRunner:
    """Serve `backend` on bound sockets, which the runner then owns.

    Raises `StartupError` when they cannot listen.
    """
    runner = Runner(make_app(backend, http, tracing=tracing), shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    try:
        for listener in sockets:
            # Before it is duplicated: `dup` gives the duplicate this object's mode, and the mode belongs to what all
            # processes share. Were it blocking for a moment, a process whose client another has taken would be stuck.
            listener.setblocking(False)
            for _ in range(acceptors - 1):
                await web.SockSite(runner, listener.dup(), backlog=BACKLOG).start()
            await web.SockSite(runner, listener, backlog=BACKLOG).start()
    except OSError as error:
        await runner.cleanup()
        host, port, *_ = sockets[0].getsockname()
        raise cannot_listen(host, port, error) from error
    return runner


def freeze_start_up() -> None:
    """Exempt from garbage collection what start-up has made: it lives as long as the process, and to look through it
    again would stop all streams for tens of milliseconds. For processes that do nothing but serve."""
    gc.collect()
    gc.freeze()


def bind(host: str, port: int) -> list[socket.socket]:
    """A bound socket for each address of `host`, all on one port; nobody can connect before it listens.

    Raises `StartupError`.
    """
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            sockets.append(socket.socket(family, socket.SOCK_STREAM))
            sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sockets[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sockets[-1].bind((address[0], sockets[0].getsockname()[1] or port))
    except OSError as error:
        for opened in sockets:
            opened.close()
        raise cannot_listen(host, port, error) from error
    return sockets


def cannot_listen(host: str, port: int, error: OSError) -> StartupError:
    """What to raise for `error`."""
    reason = "the port is already in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
    return StartupError(f"cannot listen on {host}:{port}: {reason}")


def bound_port(runner: web.AppRunner) -> int:
    """The port that a started runner listens on."""
    return int(runner.addresses[0][1])
