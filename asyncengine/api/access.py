"""Who may call what: with keys, every route is closed but for those that are listed here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web
from aiohttp.typedefs import Middleware

from asyncengine.api.errors import UnauthorizedError, last_error_response
from asyncengine.api_keys import is_known

OPEN_ROUTES = frozenset({"health", "ready"})
"""Names of routes that whoever keeps the server alive asks, without a key."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def key_check(digests: Sequence[bytes]) -> Middleware:
    """A middleware that wants `Authorization: Bearer KEY`, one of those keys, for all but `OPEN_ROUTES`.

    It goes by the route that was matched, never by the path's text, which the same route may be reached by in several
    ways; what matches no route is closed too.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.match_info.route.name in OPEN_ROUTES or _shows_key(request, digests):
            return await handler(request)
        error = UnauthorizedError("this server wants an API key: Authorization: Bearer KEY", code="invalid_api_key")
        response = last_error_response(error, request)  # the body of a stranger is not read
        response.headers["WWW-Authenticate"] = "Bearer"
        return response

    return check


def _shows_key(request: web.Request, digests: Sequence[bytes]) -> bool:
    given = request.headers.getall("Authorization", [])
    if len(given) != 1:
        return False
    scheme, _, key = given[0].partition(" ")
    return scheme.lower() == "bearer" and is_known(key.strip(), digests)
