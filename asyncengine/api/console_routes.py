"""The routes of the console: its page, and what it shows of the engine. None of them makes the engine do anything.

The page's files are the package's, for whoever asks. What it shows of the engine (counts and times, of all tenants
together, and nobody's text) it asks for with a key, as any other client does.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from importlib import resources

import msgspec
from aiohttp import web

from asyncengine.api.backend import Backend
from asyncengine.console.timeline import LaneJson, LiveLanes, parse_cursor
from asyncengine.errors import OverloadedError

MODULES = (
    "console",
    "chat",
    "answer",
    "settings",
    "stream",
    "elements",
    "figures",
    "lanes",
    "painter",
    "slices",
    "phases",
    "key",
)
FILES = {
    "/": ("index.html", "text/html"),
    "/console/console.css": ("console.css", "text/css"),
    "/console/icon.svg": ("icon.svg", "image/svg+xml"),
    **{f"/console/{name}.js": (f"{name}.js", "text/javascript") for name in MODULES},
}
PAGE_ROUTES = frozenset(f"console.{name}" for name, _ in FILES.values())
"""Names of the routes of the page's files."""
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
MAX_ANSWERS_A_SECOND = 32
"""Of the timeline, by this process, whoever asks. A page asks four times a second, which takes half a percent of the
process; one that is told to wait asks less often, so that many share what there is."""


class TimelineJson(msgspec.Struct, frozen=True):
    """now_ms: by the clock of the lanes. gauges: see `AsyncEngine.gauges`. generated, prompted: tokens since the
    engine's start."""

    now_ms: float
    model: str
    device: str
    state: str
    detail: str
    gauges: dict[str, int]
    generated: int
    prompted: int
    lanes: list[LaneJson]


class ConsoleRoutes:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lanes: LiveLanes | None = None
        self._allowance = Allowance(MAX_ANSWERS_A_SECOND)

    def add_to(self, app: web.Application) -> None:
        for path, (name, content_type) in FILES.items():
            app.router.add_get(path, _file(name, content_type), name=f"console.{name}")
        app.router.add_get("/console/timeline", self.timeline, name="timeline")
        app.on_cleanup.append(self._close)

    async def timeline(self, request: web.Request) -> web.Response:
        cursor = parse_cursor(request.query.get("since", ""))
        if not self._allowance.take(time.monotonic()):
            raise OverloadedError("too many look at the console; ask less often")
        backend = self._backend
        if self._lanes is None and backend.run_dir is not None:
            self._lanes = LiveLanes(backend.run_dir)
        now, totals, health = time.monotonic_ns(), backend.totals(), backend.health
        answer = TimelineJson(
            now_ms=now / 1e6,
            model=backend.info.model,
            device=backend.info.device,
            state=health.state,
            detail=health.detail,
            gauges=backend.gauges(),
            generated=totals.counters["generation_tokens"],
            prompted=totals.counters["prompt_tokens"],
            lanes=self._lanes.read(cursor, now) if self._lanes is not None else [],
        )
        return web.Response(
            body=msgspec.json.encode(answer),
            content_type="application/json",
            headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"},
        )

    async def _close(self, app: web.Application) -> None:
        if self._lanes is not None:
            self._lanes.close()


class Allowance:
    """So many a second, and as many at once after a rest."""

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._left = float(per_second)
        self._at = 0.0

    def take(self, now: float) -> bool:
        """Whether there is one left. now: in seconds."""
        self._left = min(self._per_second, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


def _file(name: str, content_type: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """A handler that answers with a file of the package."""
    body = resources.files("asyncengine.console").joinpath(name).read_bytes()

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type=content_type, charset="utf-8", headers=HEADERS)

    return handler
