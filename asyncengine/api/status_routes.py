"""The routes for whoever operates the server. None of them makes the engine do anything."""

from __future__ import annotations

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from asyncengine import __version__
from asyncengine.api.backend import Backend
from asyncengine.api.endpoints import Endpoint
from asyncengine.api.exposition import CONTENT_TYPE
from asyncengine.api.metric_families import metrics_text
from asyncengine.api.request_body import json_response


class StatusJson(msgspec.Struct, frozen=True, kw_only=True):
    """reason: of a status that is not good."""

    status: str
    reason: str | UnsetType = UNSET


class VersionJson(msgspec.Struct, frozen=True, kw_only=True):
    version: str


class StatusRoutes:
    """/health: may this process go on living; /ready: should it be sent requests. Both fail while a process of the
    engine has not been heard of for too long or is being replaced, and when the engine has failed or was closed. A
    server that is shutting down is not ready, but should live to the end of its requests."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._version = __version__

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                method="GET",
                path="/health",
                name="health",
                summary="Whether the server should go on living",
                handler=self.health,
                answer=StatusJson,
                others={503: StatusJson},
            ),
            Endpoint(
                method="GET",
                path="/ready",
                name="ready",
                summary="Whether the server should be sent requests",
                handler=self.ready,
                answer=StatusJson,
                others={503: StatusJson},
            ),
            Endpoint(
                method="GET",
                path="/version",
                name="version",
                summary="The server's version",
                handler=self.version,
                answer=VersionJson,
            ),
            Endpoint(
                method="GET",
                path="/metrics",
                name="metrics",
                summary="Metrics in Prometheus's text format",
                handler=self.metrics,
                answer=str,
            ),
        ]

    async def health(self, request: web.Request) -> web.Response:
        return self._status("ok", if_draining=200)

    async def ready(self, request: web.Request) -> web.Response:
        return self._status("ready", if_draining=503)

    async def version(self, request: web.Request) -> web.Response:
        return json_response(VersionJson(version=self._version))

    async def metrics(self, request: web.Request) -> web.Response:
        backend = self._backend
        text = metrics_text(
            model=backend.info.model, health=backend.health, gauges=backend.gauges(), totals=backend.totals()
        )
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    def _status(self, good: str, *, if_draining: int) -> web.Response:
        health = self._backend.health
        if health.state == "ready":
            return json_response(StatusJson(status=good))
        status = if_draining if health.state == "draining" else 503
        return json_response(StatusJson(status=health.state, reason=health.detail), status=status)
