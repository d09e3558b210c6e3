"""Who may call what: with keys, every route is closed but for those that are listed here; and on what terms."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web
from aiohttp.typedefs import Middleware

from asyncengine.api.console_routes import PAGE_ROUTES
from asyncengine.api.errors import ForbiddenError, UnauthorizedError, error_response
from asyncengine.api_keys import known_key
from asyncengine.config import ApiKey, ServiceClass

OPEN_ROUTES = PAGE_ROUTES | {"health", "ready"}
"""Names of routes that are asked without a key: by whoever keeps the server alive, and by a browser, whose page then
asks for one. They read no body, wait for nothing and tell nothing of requests."""
_SHOWN_KEY = web.RequestKey("api_key", ApiKey)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def key_check(keys: Sequence[ApiKey]) -> Middleware:
    """A middleware that wants `Authorization: Bearer KEY`, one of those keys, for all but `OPEN_ROUTES`.

    It goes by the route that was matched, never by the path's text, which the same route may be reached by in several
    ways; what matches no route is closed too.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        key = _shown_key(request, keys)
        if key is not None:
            request[_SHOWN_KEY] = key
        if key is not None or request.match_info.route.name in OPEN_ROUTES:
            return await handler(request)
        error = UnauthorizedError("this server wants an API key: Authorization: Bearer KEY", code="invalid_api_key")
        response = error_response(error)
        response.force_close()  # the body of a stranger is not read, and thrown away for `LINGER_SECONDS` at most
        response.headers["WWW-Authenticate"] = "Bearer"
        return response

    return check


def tenant_of(request: web.Request) -> str:
    """Whose key the caller has shown; "" on a server without keys."""
    key = request.get(_SHOWN_KEY)
    return "" if key is None else key.tenant


def service_class_of(request: web.Request, asked: ServiceClass | None) -> ServiceClass | None:
    """The class of a request that asks for `asked`, None for the engine's default. Raises `ForbiddenError` where its
    key is for less than it asks for."""
    key = request.get(_SHOWN_KEY)
    if key is None or key.service_class is None:
        return asked
    if key.service_class == "background" and asked == "interactive":
        raise ForbiddenError(
            "this API key is for background requests only", code="service_class_not_allowed", param="service_class"
        )
    return asked or key.service_class


def _shown_key(request: web.Request, keys: Sequence[ApiKey]) -> ApiKey | None:
    given = request.headers.getall("Authorization", [])
    if len(given) != 1:
        return None
    scheme, _, key = given[0].partition(" ")
    return known_key(key.strip(), keys) if scheme.lower() == "bearer" else None
