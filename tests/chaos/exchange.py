"""One HTTP request over a connection of its own, as a good client makes it or a bad one. Nothing is interpreted here.

plain   | connect | send | read ..................... to the end
slow    | connect | send | read a little, pause, ...  to the end, with a small receive buffer
leaver  | connect | send | read ...... close (FIN), or reset (RST)
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from chaos.terms import OPERATOR, Key

Manner = Literal["plain", "slow", "close", "reset"]

SLOW_BUFFER_BYTES = 4096
SLOW_READ_BYTES = 2048
SLOW_PAUSE_SECONDS = 0.1
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with no time: closing such a socket resets its connection."""


@dataclass
class Reply:
    """What came back. complete: to its end. broken: why it is not, "" for a client's own leaving, and where the
    connection was `cut` with the process that held it."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = False
    broken: str = ""
    left: bool = False
    cut: bool = False


Heard = Callable[[float, float], None]
"""Called with the times of two pieces of an answer that came one after the other."""


Cut = Callable[[int, float], bool]
"""Whether a connection from this port, made after that time, was cut."""


@dataclass(frozen=True)
class Client:
    """Asks the server at 127.0.0.1:`port`. limit: seconds after which an exchange counts as hanging."""

    port: int
    limit: float = 120.0
    heard: Heard = lambda before, now: None
    cut: Cut = lambda port, since: False

    async def post(
        self, path: str, body: Any, *, key: Key = OPERATOR, manner: Manner = "plain", leave_after: float = 0.0
    ) -> Reply:
        """leave_after: seconds from the request's sending at which a client that leaves does so."""
        request = request_bytes(path, json.dumps(body).encode(), key=key.text)
        return await self.send(request, manner=manner, leave_after=leave_after)

    async def get(self, path: str) -> Reply:
        return await self.send(f"GET {path} HTTP/1.1\r\n{_headers(OPERATOR.text)}\r\n".encode())

    async def send(self, request: bytes, *, manner: Manner = "plain", leave_after: float = 0.0) -> Reply:
        """Send raw bytes and read what comes back until the server closes the connection."""
        reply, received = Reply(), bytearray()
        connection = socket.socket()
        connection.setblocking(False)
        if manner == "slow":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER_BYTES)
        leaves, begun, port, ends = manner in ("close", "reset"), time.monotonic(), 0, True
        try:
            async with asyncio.timeout(self.limit):
                await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.port))
                port = connection.getsockname()[1]
                await asyncio.get_running_loop().sock_sendall(connection, request)
                async with asyncio.timeout(leave_after if leaves else None) as staying:
                    await self._read(connection, received, slow=manner == "slow")
        except TimeoutError:
            ends = False
            reply.left = leaves and staying.expired()
            reply.broken = "" if reply.left else f"no end after {self.limit:g} s"
        except OSError as error:
            reply.broken = f"the connection failed: {error!r}"
        finally:
            if manner == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            connection.close()
        _parse(bytes(received), reply)
        if reply.broken and ends and self.cut(port, begun):
            reply.cut, reply.broken = True, ""
        return reply

    async def _read(self, connection: socket.socket, received: bytearray, *, slow: bool) -> None:
        loop, last = asyncio.get_running_loop(), 0.0
        while data := await loop.sock_recv(connection, SLOW_READ_BYTES if slow else 65536):
            received += data
            now = time.monotonic()
            if slow:
                await asyncio.sleep(SLOW_PAUSE_SECONDS)
            elif last:
                self.heard(last, now)
            last = now


def request_bytes(path: str, body: bytes, *, key: str = OPERATOR.text) -> bytes:
    head = f"POST {path} HTTP/1.1\r\n{_headers(key)}Content-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _headers(key: str) -> str:
    return f"Host: localhost\r\nConnection: close\r\nAuthorization: Bearer {key}\r\n"


def _parse(received: bytes, reply: Reply) -> None:
    """Take apart all that has come of a response."""
    head, found, rest = received.partition(b"\r\n\r\n")
    if not found:
        reply.broken = reply.broken or ("" if reply.left else "the connection ended before an answer")
        return
    first, *lines = head.decode("latin-1").split("\r\n")
    reply.status = int(first.split()[1])
    reply.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if reply.headers.get("transfer-encoding") == "chunked":
        reply.body, reply.complete = _unchunked(rest)
    else:
        reply.body, reply.complete = rest, len(rest) == int(reply.headers["content-length"])
    if not (reply.complete or reply.left or reply.broken):
        reply.broken = "the connection ended within the answer"


def _unchunked(rest: bytes) -> tuple[bytes, bool]:
    """The content of a chunked body, and whether its end is there."""
    parts: list[bytes] = []
    at = 0
    while (line_end := rest.find(b"\r\n", at)) >= 0:
        size = int(rest[at:line_end], 16)
        begin = line_end + 2
        if size == 0:
            return b"".join(parts), rest[begin:] == b"\r\n"
        parts.append(rest[begin : begin + size])
        at = begin + size + 2
    return b"".join(parts), False
