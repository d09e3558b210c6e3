"""Plain HTTP access to a server under test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp

from asyncengine.api.app import bound_port, run_app
from asyncengine.api.backend import Backend

if TYPE_CHECKING:
    from asyncengine.api.tracing import Tracing

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


class Server:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and decoded JSON; `body` is encoded unless it is bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, headers=JSON) as response:
            return response.status, json.loads(await response.read())

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All events of a stream: decoded JSON, and "[DONE]" as it is."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            text = (await response.read()).decode()
        assert text.endswith("\n\n")
        lines = text[:-2].split("\n\n")
        assert all(line.startswith("data: ") and "\n" not in line for line in lines)
        return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


async def eventually(condition: Callable[[], bool]) -> None:
    """Returns once `condition` holds; fails after 5 seconds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def serving(backend: Backend, *, tracing: Tracing | None = None) -> AsyncIterator[Server]:
    """The real application over `backend`, on a free port."""
    runner = await run_app(backend, "127.0.0.1", 0, tracing=tracing)
    try:
        async with aiohttp.ClientSession() as session:
            yield Server(f"http://127.0.0.1:{bound_port(runner)}", session)
    finally:
        await runner.cleanup()
