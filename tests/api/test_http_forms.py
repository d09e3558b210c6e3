"""The forms that HTTP has for the same request: each is answered, and the connection is good for the next one."""

from __future__ import annotations

import asyncio
import json

import pytest
from api_server import COMPLETIONS, Server

BODY = b'{"prompt": "a", "max_tokens": 4}'
CHUNKED = b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (5, BODY[:5], len(BODY) - 5, BODY[5:])
LENGTH = f"Content-Length: {len(BODY)}"


def request(
    *headers: str, method: str = "POST", path: str = COMPLETIONS, version: str = "1.1", body: bytes = BODY
) -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "Host: localhost", *headers]
    if not any(header.startswith("Content-Type") for header in headers):
        lines.append("Content-Type: application/json")
    return "\r\n".join([*lines, "", ""]).encode() + body


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, server: Server) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1])))

    async def ask(self, data: bytes, *, body: bool = True) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (their names in lower case) and body of the answer."""
        self.writer.write(data)
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        status, *lines = head.splitlines()
        headers = {line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in lines if line}
        size = int(headers.get("content-length", 0)) if body else 0
        return int(status.split()[1]), headers, await self.reader.readexactly(size)


@pytest.mark.parametrize(
    "data",
    [
        request(LENGTH),
        request("Transfer-Encoding: chunked", body=CHUNKED),
        request(LENGTH, path=COMPLETIONS + "?api-version=1"),
        request(LENGTH, path="http://elsewhere" + COMPLETIONS),
        request(LENGTH, "Content-Type: Application/JSON; charset=utf-8"),
        request(LENGTH, "Connection: keep-alive", version="1.0"),
        request(LENGTH, "Accept-Encoding: gzip", "Origin: http://localhost:3000"),
    ],
)
async def test_every_form_of_a_request_is_answered(server: Server, data: bytes) -> None:
    connection = await Connection.to(server)
    for _ in range(2):
        status, headers, body = await connection.ask(data)
        assert (status, json.loads(body)["choices"][0]["finish_reason"]) == (200, "length")
        assert not [name for name in headers if name.startswith("access-control")]
    connection.writer.close()


async def test_a_client_that_waits_to_be_told_to_go_on_is_told(server: Server) -> None:
    connection = await Connection.to(server)
    assert (await connection.ask(request(LENGTH, "Expect: 100-continue", body=b"")))[0] == 100
    assert (await connection.ask(BODY))[0] == 200
    connection.writer.close()


async def test_http_1_0_ends_with_the_answer_streamed_or_not(server: Server) -> None:
    streamed = BODY.replace(b"}", b', "stream": true}')
    for body in (BODY, streamed):
        connection = await Connection.to(server)
        connection.writer.write(request(f"Content-Length: {len(body)}", version="1.0", body=body))
        head, _, text = (await connection.reader.read()).partition(b"\r\n\r\n")  # to the end
        assert head.startswith(b"HTTP/1.0 200 ")
        assert b"chunked" not in head
        assert text.endswith(b"data: [DONE]\n\n" if body is streamed else b"}")
        connection.writer.close()


async def test_a_connection_goes_on_behind_every_refusal(server: Server) -> None:
    connection = await Connection.to(server)
    refusals = [
        (request("Content-Length: 1", body=b"{"), 400),
        (request(LENGTH, "Content-Type: text/plain"), 400),
        (request(LENGTH, "Content-Encoding: br"), 400),
        (request(LENGTH, path="/v1/nothing"), 404),
        (request(LENGTH, path=COMPLETIONS + "/"), 404),
        (request(LENGTH, path="/" + COMPLETIONS), 404),
        (request(LENGTH, method="PUT"), 405),
        (request(method="OPTIONS", body=b""), 405),
        (request(method="GET", body=b""), 405),
        (request(LENGTH, path="/v1/requests/none/cancel"), 404),
    ]
    for data, expected in refusals:
        status, headers, body = await connection.ask(data)
        assert (status, json.loads(body)["error"]["type"]) == (expected, "invalid_request_error")
        assert headers.get("allow") == ("POST" if expected == 405 else None)
        assert (await connection.ask(request(LENGTH)))[0] == 200
    connection.writer.close()


async def test_what_can_be_got_has_its_head_alone_too(server: Server) -> None:
    connection = await Connection.to(server)
    for path in ("/health", "/ready", "/version", "/v1/models", "/openapi.json"):
        status, headers, body = await connection.ask(request(method="GET", path=path, body=b""))
        assert (status, len(body)) == (200, int(headers["content-length"]))
        alone = await connection.ask(request(method="HEAD", path=path, body=b""), body=False)
        assert (alone[0], alone[1]["content-length"]) == (200, headers["content-length"])
    connection.writer.close()
