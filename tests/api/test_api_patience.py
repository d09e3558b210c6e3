"""No wait lasts for ever: for the first token, for the rest, for a client that does not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from api_server import CHAT, COMPLETIONS, Server, eventually, serving
from fake_backend import FakeBackend

from asyncengine.api import connections, relay
from asyncengine.chat_prompt import ChatPrompt
from asyncengine.errors import QueueFullError
from asyncengine.prompt_messages import TokenizedPrompt

BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": ["a", "b"], "n": 2},
    CHAT: {"messages": [{"role": "user", "content": "a"}]},
}


class SilentBackend(FakeBackend):
    """Answers no question."""

    async def tokenize(
        self, prompt: str | ChatPrompt, *, add_special_tokens: bool = True, texts: bool = False
    ) -> TokenizedPrompt:
        await asyncio.Event().wait()
        raise AssertionError

    async def detokenize(self, ids: Any) -> str:
        await asyncio.Event().wait()
        raise AssertionError


def limit(backend: FakeBackend, **seconds: float) -> None:
    backend.info = msgspec.structs.replace(backend.info, **seconds)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_request_whose_turn_does_not_come_is_a_503_with_a_reason(
    server: Server, backend: FakeBackend, path: str, stream: bool
) -> None:
    limit(backend, queue_timeout_seconds=0.05)
    backend.hold_after = 0
    async with server.session.post(server.url + path, json={**BODIES[path], "stream": stream}) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["type"]) == (503, "queue_timeout", "overloaded_error")
        assert error["message"] == "nothing of the answer was there after 0.05 s"
        assert response.headers["Retry-After"] == "1"
    await eventually(lambda: backend.open == 0)
    assert backend.left_early == len(backend.calls)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_request_that_runs_too_long_ends_with_a_reason(server: Server, backend: FakeBackend, path: str) -> None:
    limit(backend, request_timeout_seconds=0.2)
    backend.hold_after = 1
    *news, last = await _events(server, path)
    assert news
    assert last["error"]["code"] == "request_timeout"
    assert last["error"]["message"] == "the answer was not complete after 0.2 s"
    async with server.session.post(server.url + path, json=BODIES[path]) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (504, "request_timeout")
    await eventually(lambda: backend.open == 0)
    assert (await server.post("/detokenize", {"tokens": [65]}))[0] == 200


async def _events(server: Server, path: str) -> list[Any]:
    async with server.session.post(server.url + path, json={**BODIES[path], "stream": True}) as response:
        assert response.status == 200
        text = (await response.read()).decode()
    return [json.loads(line.removeprefix("data: ")) for line in text.strip().split("\n\n")]


async def test_limits_that_are_kept_change_nothing(server: Server, backend: FakeBackend) -> None:
    limit(backend, queue_timeout_seconds=600.0, request_timeout_seconds=600.0)
    assert (await server.events(COMPLETIONS, BODIES[COMPLETIONS]))[-1] == "[DONE]"
    assert (await server.post(COMPLETIONS, BODIES[COMPLETIONS]))[0] == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        (COMPLETIONS, {"prompt": [1], "echo": True}),
    ],
)
async def test_a_question_that_nobody_answers_is_a_503(path: str, body: dict[str, Any]) -> None:
    backend = SilentBackend()
    limit(backend, queue_timeout_seconds=0.05)
    async with serving(backend) as server:
        status, answer = await server.post(path, body)
    assert (status, answer["error"]["code"]) == (503, "queue_timeout")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_a_429_that_says_when_to_come_again(
    server: Server, backend: FakeBackend, stream: bool
) -> None:
    backend.refusal = QueueFullError("8 requests wait already", code="queue_full")
    async with server.session.post(server.url + CHAT, json={**BODIES[CHAT], "stream": stream}) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["type"]) == (429, "queue_full", "overloaded_error")
        assert response.headers["Retry-After"] == "1"


@pytest.fixture
async def slow_reader(server: Server) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client that has asked for a stream and reads none of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]), limit=2**10)
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 10**6}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    yield reader, writer
    writer.close()


async def test_a_client_that_never_reads_counts_as_gone(
    server: Server,
    backend: FakeBackend,
    slow_reader: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "SLOW_CLIENT_SECONDS", 0.2)
    backend.pieces = ["x" * 50_000] * 2000
    await eventually(lambda: bool(backend.calls))
    await eventually(lambda: backend.open == 0)
    assert backend.left_early == 1


async def test_what_waits_for_a_client_that_never_reads_is_bounded_and_it_hears_why(
    server: Server,
    backend: FakeBackend,
    slow_reader: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay, "MAX_PENDING_BYTES", 30_000)
    backend.pieces = ["x" * 50_000] * 2000
    await eventually(lambda: bool(backend.calls))
    await eventually(lambda: backend.open == 0)  # freed before anything more is read
    assert backend.left_early == 1
    reader, _ = slow_reader
    text = b""
    while b"slow_reader" not in text:
        text = text[-1000:] + await reader.read(2**16)
    assert b"the client reads too slowly: more than 30000 bytes waited for it" in text
