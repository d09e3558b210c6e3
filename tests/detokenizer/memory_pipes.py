"""A detokenizer worker's pipes without sockets: thousands of workers may live and die in a second."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import msgspec

from asyncengine.wire.frames import StepFrame
from asyncengine.wire.pipes import Pipes


class MemorySender:
    """`sent`: what has left. While not `open`, the pipe is full."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.open = True
        self.backlog = 0

    def writable(self) -> bool:
        return self.open

    def try_send(self, message: msgspec.Struct) -> bool:
        if self.open:
            self.sent.append(message)
        return self.open

    def send(self, message: msgspec.Struct) -> None:
        self.sent.append(message)

    def flush(self) -> bool:
        return True


class MemoryReceiver:
    malformed = 0

    def __init__(self) -> None:
        self.arrived: list[StepFrame] = []

    def wait(self, timeout_ms: int) -> bool:
        return bool(self.arrived)

    def drain(self, limit: int) -> Iterator[StepFrame]:
        for _ in range(min(limit, len(self.arrived))):
            yield self.arrived.pop(0)


class MemoryPipes:
    """senders, receivers: by the pipe's name; a name's sender is made anew after it was dropped."""

    def __init__(self) -> None:
        self.senders: dict[str, MemorySender] = {}
        self.receivers: dict[str, MemoryReceiver] = {}

    def as_pipes(self) -> Pipes:
        return cast(Pipes, self)

    def receiver(self, name: str, types: Any) -> MemoryReceiver:
        return self.receivers.setdefault(name, MemoryReceiver())

    def sender(self, name: str, *, high_water_mark: int = 0) -> MemorySender:
        return self.senders.setdefault(name, MemorySender())

    def drop(self, sender: MemorySender) -> None:
        (name,) = [name for name, known in self.senders.items() if known is sender]
        del self.senders[name]


class NoRing:
    """Takes the place of a `RingWriter`."""

    def write(self, record: tuple[int, ...]) -> None:
        pass
