"""Whose web pages may use a server without keys: those of this machine, and those that the operator names.

A browser lets every page send requests to a loopback address. From a page of another origin it keeps the answers, but
not what the request does; and a page whose own name now resolves to 127.0.0.1 (DNS rebinding) is of the same origin,
so that it reads them. Neither can hide the name that it was loaded from:

    page of                     Host                Origin, of all but GET and HEAD
    evil.example, rebound       evil.example        http://evil.example
    evil.example                127.0.0.1:8000      http://evil.example
    a sandboxed frame           127.0.0.1:8000      null
    the console                 127.0.0.1:8000      http://127.0.0.1:8000
    the same by an ssh tunnel   localhost:9000      http://localhost:9000
    no page: curl, a client     127.0.0.1:8000      none
    the same by /etc/hosts      gpu1:8000           none

A `Host` of one label is nobody's in the public DNS, so no site can be rebound from it: programs may use such names.
Their pages may not, since a name of the local network can be a stranger's: such a page, rebound, can read what a GET
answers, which is no text of a request, and nothing else. Ports count for nothing: behind tunnels they differ, and what
is served at another port of this machine is its own.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web
from aiohttp.typedefs import Middleware

from asyncengine.api.errors import ForbiddenError, error_response
from asyncengine.host_names import host_name, is_loopback

MAX_SHOWN_CHARS = 128
MAX_LABEL_CHARS = 63
"""RFC 1035, 2.3.4."""
_WEB_ORIGIN = re.compile(r"https?://(?P<host>.*)", re.IGNORECASE)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def host_check(allowed: Sequence[str]) -> Middleware:
    """A middleware that answers only requests to loopback names and names of one label, and from pages of the former.
    allowed: further names, as `read_allowed_hosts` gives them."""
    names = frozenset(allowed)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        error = _refusal(request, names)
        if error is None:
            return await handler(request)
        response = error_response(error)
        response.force_close()  # as in `access`
        return response

    return check


def _refusal(request: web.Request, allowed: frozenset[str]) -> ForbiddenError | None:
    for host in request.headers.getall("Host", ()):  # of HTTP/1.0 there need be none; browsers send one
        if not _is_known(host, allowed) and not _is_one_label(host):
            return ForbiddenError(_refused("Host", host), code="host_not_allowed")
    for origin in request.headers.getall("Origin", ()):
        if not _is_known_origin(origin, allowed):
            return ForbiddenError(_refused("Origin", origin), code="origin_not_allowed")
    return None


def _refused(header: str, value: str) -> str:
    return (
        f"the {header} header is {value[:MAX_SHOWN_CHARS]!r}: without API keys this server is for loopback names, such "
        "as localhost and 127.0.0.1, and for those that --allowed-host gives"
    )


def _is_known_origin(origin: str, allowed: frozenset[str]) -> bool:
    """ "null" may be anybody's page. A scheme that is not the web's, as of a browser's extension, is that of a program
    which somebody has installed here."""
    web_origin = _WEB_ORIGIN.fullmatch(origin)
    return origin != "null" if web_origin is None else _is_known(web_origin["host"], allowed)


def _is_one_label(host: str) -> bool:
    name = host_name(host)
    return name is not None and len(name) <= MAX_LABEL_CHARS and "." not in name and ":" not in name


def _is_known(host: str, allowed: frozenset[str]) -> bool:
    name = host_name(host)
    return name is not None and (is_loopback(name) or name in allowed)
