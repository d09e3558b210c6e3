"""Requests that no server should take, as bytes. Each must be refused with a status from 400 to 499, or by closing the
connection where it is no HTTP at all."""

from __future__ import annotations

from chaos.cases import CHAT, COMPLETIONS
from chaos.exchange import Reply, request_bytes
from chaos.terms import BACKGROUND_ONLY

MALFORMED: tuple[bytes, ...] = (
    request_bytes(COMPLETIONS, b""),
    request_bytes(COMPLETIONS, b'{"prompt": "never closed'),
    request_bytes(COMPLETIONS, b'{"prompt": "\xff\xfe\xc3"}'),
    request_bytes(COMPLETIONS, b"[" * 20_000),
    request_bytes(COMPLETIONS, b'{"prompt": [5, -1]}'),
    request_bytes(COMPLETIONS, b'{"prompt": [4294967296]}'),
    request_bytes(COMPLETIONS, b'{"prompt": [[1], []]}'),
    request_bytes(COMPLETIONS, b'{"prompt": "x", "max_tokens": 1e400}'),
    request_bytes(COMPLETIONS, b'{"prompt": "x", "temperature": "hot"}'),
    request_bytes(COMPLETIONS, b'{"prompt": "x", "n": 1000000}'),
    request_bytes(COMPLETIONS, b'{"prompt": "' + b"y " * 100_000 + b'", "max_tokens": 4}'),
    request_bytes(COMPLETIONS, b'{"prompt": "x", "model": "another"}'),
    request_bytes(CHAT, b'{"messages": []}'),
    request_bytes(CHAT, b'{"messages": [{"role": "ghost", "content": "x"}]}'),
    request_bytes(CHAT, b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}'),
    request_bytes(COMPLETIONS, b'{"prompt": "x", "service_class": "urgent"}'),
    request_bytes(COMPLETIONS, b'{"prompt": "x", "session": "' + b"s" * 129 + b'"}'),
    request_bytes(COMPLETIONS, b'{"prompt": ["x", "y"], "session": "s"}'),
    request_bytes(COMPLETIONS, b'{"prompt": "x", "session_ttl_seconds": 5}'),
    request_bytes(
        CHAT, b'{"messages": [{"role": "user", "content": "x"}], "session": "s", "session_ttl_seconds": 1e9}'
    ),
    request_bytes("/v1/sessions/" + "s" * 129 + "/release", b""),
    request_bytes("/v1/nothing", b"{}"),
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: many\r\n\r\n{}",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64) + b"\r\n\r\n",
)
REFUSED: tuple[bytes, ...] = (
    *MALFORMED,
    request_bytes(COMPLETIONS, b'{"prompt": "x"}', key="chaos-key-of-nobody"),
    request_bytes("/v1/sessions/s/release", b"", key="chaos-key-of-nobody"),
    request_bytes(COMPLETIONS, b'{"prompt": "x", "service_class": "interactive"}', key=BACKGROUND_ONLY.text),
)
"""These and some that only their key is wrong for."""


def refused(reply: Reply) -> bool:
    """Whether the server did what it should."""
    return 400 <= reply.status < 500 if reply.status else "ended before an answer" in reply.broken
