"""What a stranger's connection may cost: no work for its bytes, no wait without an end, not the last open file."""

from __future__ import annotations

import asyncio
import gzip
import resource

import msgspec
import pytest
from aiohttp import http_parser
from api_server import COMPLETIONS, JSON, Server, eventually, serving
from fake_backend import FakeBackend

from asyncengine.api import app, connections
from asyncengine.api.app import MIN_BODY_BYTES, bound_port, run_app
from asyncengine.api.reception import RECEPTION
from asyncengine.api_keys import digest_of
from asyncengine.config import ApiKey, HttpOptions

BOMB = gzip.compress(bytes(10_000_000))
HEAD = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
KEY = ApiKey(digest=digest_of("the-only-key"), tenant="a")


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))


@pytest.mark.parametrize(
    ("keys", "statuses"),
    [
        ((), {COMPLETIONS: 400, "/tokenize": 400, "/nowhere": 404, "/health": 405}),
        ((KEY,), dict.fromkeys((COMPLETIONS, "/tokenize", "/nowhere", "/health"), 401)),
    ],
)
async def test_nobodys_body_is_decompressed(
    backend: FakeBackend, keys: tuple[ApiKey, ...], statuses: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    inflated: list[object] = []
    monkeypatch.setattr(http_parser.DeflateBuffer, "feed_data", lambda *args: inflated.append(args))
    runner = await run_app(backend, "127.0.0.1", 0, HttpOptions(api_keys=keys))
    try:
        for path, status in statuses.items():
            reader, writer = await connect(f":{bound_port(runner)}")
            writer.write(HEAD % (path.encode(), len(BOMB)) + b"Content-Encoding: gzip\r\n\r\n" + BOMB)
            assert (await reader.readline()).startswith(b"HTTP/1.1 %d " % status), path
            writer.close()
    finally:
        await runner.cleanup()
    assert inflated == []
    assert backend.calls == []


async def test_a_compressed_body_is_refused_by_name_and_the_connection_goes_on(server: Server) -> None:
    for coding in ("gzip", "GZIP", "deflate", "br", "zstd", "identity, gzip", ""):
        headers = {**JSON, "Content-Encoding": coding}
        async with server.session.post(server.url + COMPLETIONS, data=b'{"prompt":"a"}', headers=headers) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (400, "invalid_content_encoding"), coding
    headers = {**JSON, "Content-Encoding": "Identity"}
    async with server.session.post(server.url + COMPLETIONS, data=b'{"prompt":"a"}', headers=headers) as response:
        assert response.status == 200


async def test_a_client_that_never_reads_its_whole_answer_counts_as_gone(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "SLOW_CLIENT_SECONDS", 0.2)
    backend.pieces = ["x" * 1_000_000] * 30
    runner = await run_app(backend, "127.0.0.1", 0)
    assert runner.server is not None
    _, writer = await connect(f":{bound_port(runner)}")
    body = b'{"prompt": "a", "max_tokens": 30}'
    writer.write(HEAD % (COMPLETIONS.encode(), len(body)) + b"\r\n" + body)
    await eventually(lambda: backend.completed == 1)
    await eventually(lambda: not runner.server.connections)
    writer.close()
    await runner.cleanup()
    assert caplog.records == []


async def test_bodies_that_are_being_received_have_a_bound_together(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "TOTAL_BODY_BYTES", 0)  # so it is twice the largest
    runner = await run_app(backend, "127.0.0.1", 0)
    reception = runner.app[RECEPTION]

    async def begin(size: int, sent: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A request with a body of `size`, of which all but its end is sent."""
        reader, writer = await connect(f":{bound_port(runner)}")
        body = b'{"prompt": "a"}'.ljust(size)
        writer.write(HEAD % (COMPLETIONS.encode(), size) + b"Connection: close\r\n\r\n" + body[:sent])
        return reader, writer

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[bytes, bytes]:
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")  # to the end: the server closes
        writer.close()
        return head, body

    async def status_of(size: int) -> int:
        head, _ = await answer(*await begin(size, size))
        return int(head.split()[1])

    largest = MIN_BODY_BYTES
    slow = [await begin(largest, largest - 20) for _ in range(2)]
    await eventually(lambda: reception.num_bytes == 2 * (largest - 20))
    head, body = await answer(*await begin(41, 41))
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nRetry-After: 1\r\n" in head
    assert msgspec.json.decode(body)["error"] == {
        "message": "the server is receiving too many large bodies now",
        "type": "overloaded_error",
        "param": None,
        "code": "overloaded",
    }
    assert await status_of(40) == 200
    slow.pop()[1].close()  # and its room is there for others
    await eventually(lambda: reception.num_bytes == largest - 20)
    assert await status_of(41) == 200
    assert await status_of(largest + 1) == 413
    reader, writer = slow.pop()
    writer.write(b" " * 20)
    head, _ = await answer(reader, writer)
    assert head.startswith(b"HTTP/1.1 200 ")
    assert reception.num_bytes == 0
    assert len(backend.calls) == 3
    await runner.cleanup()


async def test_connections_leave_files_to_the_rest_of_the_process(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "most_connections", lambda: 3)
    async with serving(backend) as server:
        idle = [await connect(server.url) for _ in range(3)]
        reader, writer = await connect(server.url)
        assert await reader.read() == connections.NO_ROOM  # to the end: the server closes
        writer.close()
        idle.pop()[1].close()
        while True:
            reader, writer = await connect(server.url)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            if answer.startswith(b"HTTP/1.1 200 "):
                break
            assert answer == connections.NO_ROOM
        for _, writer in idle:
            writer.close()


@pytest.mark.parametrize(("files", "most"), [(256, 128), (1024, 832), (65536, 65344)])
def test_most_of_the_open_files_may_be_connections(files: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert connections.most_connections() == most
