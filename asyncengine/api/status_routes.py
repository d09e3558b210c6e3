"""The routes for whoever operates the server. None of them makes the engine do anything."""

from __future__ import annotations

from importlib.metadata import version

from aiohttp import web

from asyncengine.api.backend import Backend
from asyncengine.api.exposition import CONTENT_TYPE
from asyncengine.api.metric_families import metrics_text
from asyncengine.api.request_body import json_response


class StatusRoutes:
    """/health: may this process go on living; /ready: should it be sent requests. Both fail while a process of the
    engine has not been heard of for too long, and when the engine has failed or was closed."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._version = version("asyncengine")

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/health", self.health, name="health")
        app.router.add_get("/ready", self.ready, name="ready")
        app.router.add_get("/version", self.version, name="version")
        app.router.add_get("/metrics", self.metrics, name="metrics")

    async def health(self, request: web.Request) -> web.Response:
        return self._status("ok")

    async def ready(self, request: web.Request) -> web.Response:
        return self._status("ready")

    async def version(self, request: web.Request) -> web.Response:
        return json_response({"version": self._version})

    async def metrics(self, request: web.Request) -> web.Response:
        backend = self._backend
        text = metrics_text(
            model=backend.info.model, health=backend.health, gauges=backend.gauges(), totals=backend.totals()
        )
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    def _status(self, good: str) -> web.Response:
        health = self._backend.health
        if health.state == "ready":
            return json_response({"status": good})
        return json_response({"status": health.state, "reason": health.detail}, status=503)
