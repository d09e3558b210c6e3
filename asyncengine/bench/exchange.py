"""One streamed answer over a raw socket: of its bytes only what is measured is looked at."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import msgspec

DETAIL_BYTES = 300


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """0 where the server says nothing of it."""
        details = self.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0


class Chunk(msgspec.Struct, frozen=True):
    """What is read of the last event of an answer."""

    choices: list[msgspec.Raw] = []
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


class Exchange(asyncio.Protocol):
    """One streamed answer. `done` is set when the answer is complete or the connection is gone."""

    def __init__(self) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self.status = 0
        self.arrivals: list[float] = []
        self.last_event = b""
        self.events_in_last_arrival = 0
        self.complete = False
        self.text = b""  # not yet an event; the body of an answer that is no stream
        self._head = b""
        self._chunked = False
        self._chunks = bytearray()

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if not self.status:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            self.status = int(head.split(b" ", 2)[1])
            self._chunked = b"transfer-encoding: chunked" in head.lower()
        self._read_events(b"".join(self._unchunk(data)) if self._chunked else data, now)

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def _unchunk(self, data: bytes) -> Iterator[bytes]:
        """The content of the HTTP chunks that are complete."""
        self._chunks += data
        begin = 0
        while (line_end := self._chunks.find(b"\r\n", begin)) >= 0:
            end = line_end + 2 + int(self._chunks[begin:line_end].partition(b";")[0], 16)
            if len(self._chunks) < end + 2:
                break
            yield bytes(self._chunks[line_end + 2 : end])
            begin = end + 2
        del self._chunks[:begin]

    def _read_events(self, text: bytes, now: float) -> None:
        text = self.text + text
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        *events, self.text = text.split(b"\n\n")
        count = 0
        for event in events:
            if event == b"data: [DONE]":
                self.complete = True
            elif event.startswith(b"data:"):
                self.last_event = event
                count += 1
        if count:
            self.arrivals.append(now)
            self.events_in_last_arrival = count
        if self.complete:
            self._end()

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


def judge(exchange: Exchange) -> tuple[str, str, Chunk]:
    """What went wrong and the beginning of what the server said of it ("" for nothing), and the last event."""
    said = (exchange.last_event or exchange.text)[:DETAIL_BYTES].decode(errors="replace")
    if exchange.status != 200:
        return (f"HTTP {exchange.status}" if exchange.status else "no answer"), said, Chunk()
    try:
        chunk = msgspec.json.decode(exchange.last_event[5:], type=Chunk)
    except msgspec.DecodeError:
        return "no event that can be read", said, Chunk()
    if chunk.error:
        return "error within the stream", said, chunk
    if not exchange.complete:
        return "ended early", said, chunk
    return ("", "", chunk) if chunk.usage is not None else ("no usage", said, chunk)
