"""A route and what is promised of it, in one place: the application serves these, the OpenAPI document lists them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Literal

import msgspec
from aiohttp import web

from asyncengine.api.errors import BodyTimeoutError, ErrorJson, ForbiddenError, NotFoundError, UnauthorizedError
from asyncengine.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    QueueFullError,
    RequestTimeoutError,
)

ANY_ROUTE = (InvalidRequestError.status, UnauthorizedError.status, ForbiddenError.status, EngineDeadError.status)
"""Statuses that no route is safe from: what is sent may not be HTTP, a server with keys wants one (see `access`), one
without them refuses other sites' pages (see `hosts`), and a fault of ours may show anywhere."""
ROUTE_WITH_BODY = (BodyTimeoutError.status, web.HTTPRequestEntityTooLarge.status_code)
ENGINE_CALL = (QueueFullError.status, OverloadedError.status, RequestTimeoutError.status)
NAMED_THING = (NotFoundError.status,)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """A header with a meaning here. kind: the type of its text."""

    name: str
    kind: Any
    description: str


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One route.

    path: aiohttp's, so that a variable may have a pattern. kinds below are types that msgspec knows.
    body: of the request, None for none. no_effect: fields of it that are known and not acted on, each with the values,
    besides null, that are accepted since they change nothing.
    answer: of status 200; str is text/plain, all others are JSON. event: of a stream's events, None where none is to be
    had. errors: statuses with the error object, besides `ANY_ROUTE` and those of a body. others: further JSON answers.
    """

    method: Literal["GET", "POST"]
    path: str
    name: str
    summary: str
    handler: Handler
    headers: tuple[Header, ...] = ()
    body: Any = None
    no_effect: Mapping[str, tuple[Any, ...]] = {}
    answer: Any
    answer_headers: tuple[Header, ...] = ()
    event: Any = None
    errors: tuple[int, ...] = ()
    others: Mapping[int, Any] = {}

    @property
    def template(self) -> str:
        """The path as OpenAPI writes it."""
        return re.sub(r"\{(\w+):[^}]*\}", r"{\1}", self.path)

    @property
    def variables(self) -> list[str]:
        """Names in the path."""
        return re.findall(r"\{(\w+)\}", self.template)

    def answers(self) -> dict[int, Any]:
        """Status -> kind of JSON, for all but 200."""
        statuses = {*ANY_ROUTE, *self.errors, *(ROUTE_WITH_BODY if self.body is not None else ())}
        return {status: self.others.get(status, ErrorJson) for status in sorted({*statuses, *self.others})}


def serve(endpoints: Iterable[Endpoint], app: web.Application) -> None:
    for endpoint in endpoints:
        add = app.router.add_get if endpoint.method == "GET" else app.router.add_post
        add(endpoint.path, endpoint.handler, name=endpoint.name)
