"""The requests of one API process that are somewhere in the ring."""

from __future__ import annotations

from collections.abc import Iterator

from asyncengine.streams import RequestStream
from asyncengine.tokenizer_links import TokenizerLink


class OpenRequest:
    """An open request: its stream, its tokenizer, and the bytes of its prompt while they are unacknowledged. name: what
    its caller calls it, "" for nothing. refused: it never ran."""

    __slots__ = ("name", "refused", "stream", "tokenizer", "unacked_bytes")

    def __init__(self, stream: RequestStream, tokenizer: TokenizerLink, prompt_bytes: int, name: str) -> None:
        self.stream = stream
        self.tokenizer = tokenizer
        self.unacked_bytes = prompt_bytes
        self.name = name
        self.refused = False
        tokenizer.unacked_bytes += prompt_bytes

    def acknowledge(self) -> None:
        self.tokenizer.unacked_bytes -= self.unacked_bytes
        self.unacked_bytes = 0


class OpenRequests:
    """Found by the rid of any of their choices, or by name, which several may share."""

    def __init__(self) -> None:
        self._by_rid: dict[int, OpenRequest] = {}
        self._by_name: dict[str, dict[OpenRequest, None]] = {}
        self.get = self._by_rid.get
        self.count = 0

    def __iter__(self) -> Iterator[OpenRequest]:
        """Each request once."""
        return iter(dict.fromkeys(self._by_rid.values()))

    def named(self, name: str) -> list[OpenRequest]:
        return list(self._by_name.get(name, ()))

    def add(self, request: OpenRequest) -> None:
        for rid in request.stream.rids:
            self._by_rid[rid] = request
        if request.name:
            self._by_name.setdefault(request.name, {})[request] = None
        self.count += 1

    def remove(self, request: OpenRequest) -> None:
        for rid in request.stream.rids:
            del self._by_rid[rid]
        if request.name:
            same = self._by_name[request.name]
            del same[request]
            if not same:
                del self._by_name[request.name]
        self.count -= 1
