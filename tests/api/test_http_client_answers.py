"""What `AsyncClient` makes of answers as a proxy changes them, or as another kind of server gives them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from asyncengine.client import AsyncClient, RetryPolicy
from asyncengine.errors import EngineError, InvalidRequestError
from asyncengine.outputs import collect

CHUNK = (
    b'{"choices":[{"index":0,"text":"a","token_ids":[1],"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":1,"completion_tokens":1}}'
)
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
PLAIN = b"data: " + CHUNK + b"\n\ndata: [DONE]\n\n"


@asynccontextmanager
async def answering(*pieces: bytes) -> AsyncIterator[AsyncClient]:
    """A client of a server that answers whatever it is asked with those bytes, and closes the connection."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, AsyncClient(url, retry=RetryPolicy(attempts=1)) as client:
        yield client


@pytest.mark.parametrize(
    "pieces",
    [
        (PLAIN,),
        tuple(bytes([byte]) for byte in PLAIN),
        (PLAIN.replace(b"\n", b"\r\n"),),
        tuple(bytes([byte]) for byte in PLAIN.replace(b"\n", b"\r\n")),
        (b": processing\n\n", PLAIN, b": keep-alive\n\n"),
        (PLAIN.replace(b"data: ", b"event: completion\nid: 5\ndata: "),),
        (PLAIN.replace(b"data: ", b"data:"),),
    ],
)
async def test_a_stream_is_understood_however_its_lines_end_and_whatever_stands_between_its_events(
    pieces: tuple[bytes, ...],
) -> None:
    async with answering(STREAM, *pieces) as client:
        (output,) = (await collect(client.generate("x"))).outputs
    assert (output.text, output.token_ids, output.finish_reason) == ("a", [1], "stop")


def whole(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nConte",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\ndata: ",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nabcde",
        whole("200 OK", b"<html>"),
        whole("200 OK", b"[1]"),
        whole("200 OK", b'data: {"choices":[{"index":"0"}]}\n\n'),
        whole("500 Oops", b'{"error":null}'),
        whole("502 Bad Gateway", b"<html>"),
    ],
)
async def test_whatever_a_server_answers_it_is_an_error_of_ours(answer: bytes) -> None:
    async with answering(answer) as client:
        for ask in (lambda: collect(client.generate("x")), client.models, client.health):
            with pytest.raises(EngineError):
                await ask()


async def test_a_refusal_is_the_servers_own_whatever_was_asked() -> None:
    body = b'{"error":{"message":"no key","type":"invalid_request_error","param":null,"code":"invalid_api_key"}}'
    async with answering(whole("401 Unauthorized", body)) as client:
        for ask in (lambda: collect(client.generate("x")), client.models, client.health):
            with pytest.raises(InvalidRequestError, match="no key"):
                await ask()
