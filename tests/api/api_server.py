"""Plain HTTP access to a server under test."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
from support.eventually import eventually as eventually

from asyncengine.api.app import bound_port, run_app
from asyncengine.api.backend import Backend
from asyncengine.api.errors import ErrorJson
from asyncengine.api.shapes import ChatCompletionJson, CompletionJson
from asyncengine.api.stream_events import ChatCompletionChunkJson, CompletionChunkJson
from asyncengine.config import HTTP_DEFAULTS, HttpOptions

if TYPE_CHECKING:
    from asyncengine.api.tracing import Tracing

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
ANSWERS = {COMPLETIONS: CompletionJson, CHAT: ChatCompletionJson}
EVENTS = {COMPLETIONS: CompletionChunkJson, CHAT: ChatCompletionChunkJson}


class Server:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and decoded JSON; `body` is encoded unless it is bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, headers=JSON) as response:
            return response.status, as_promised(await response.read(), ANSWERS.get(path))

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All events of a stream: decoded JSON, and "[DONE]" as it is."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            text = (await response.read()).decode()
        assert text.endswith("\n\n")
        lines = text[:-2].split("\n\n")
        assert all(line.startswith("data: ") and "\n" not in line for line in lines)
        data = [line.removeprefix("data: ") for line in lines]
        return [text if text == "[DONE]" else as_promised(text, EVENTS[path]) for text in data]


def as_promised(text: str | bytes, kind: Any) -> Any:
    """The JSON `text`, which has what `kind`, and with it the OpenAPI document, says, and nothing else."""
    value = json.loads(text)
    if "error" in value:
        kind = ErrorJson
    if kind is not None:
        assert json.loads(msgspec.json.encode(msgspec.json.decode(text, type=kind))) == value
    return value


@asynccontextmanager
async def serving(
    backend: Backend, http: HttpOptions = HTTP_DEFAULTS, *, tracing: Tracing | None = None
) -> AsyncIterator[Server]:
    """The real application over `backend`, on a free port."""
    runner = await run_app(backend, "127.0.0.1", 0, http, tracing=tracing)
    try:
        async with aiohttp.ClientSession() as session:
            yield Server(f"http://127.0.0.1:{bound_port(runner)}", session)
    finally:
        await runner.cleanup()
