"""What a stranger's connection may cost: no work for its bytes, no wait without an end, not the last open file."""

from __future__ import annotations

import asyncio
import gzip
import resource

import pytest
from aiohttp import http_parser
from api_server import COMPLETIONS, JSON, Server, eventually, serving
from fake_backend import FakeBackend

from asyncengine.api import connections
from asyncengine.api.app import bound_port, run_app
from asyncengine.api_keys import digest_of
from asyncengine.config import ApiKey

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
    runner = await run_app(backend, "127.0.0.1", 0, api_keys=keys)
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
