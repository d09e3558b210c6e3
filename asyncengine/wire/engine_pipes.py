"""The pipes to the API processes, and which of them a rid belongs to.

    bits 56 .. 62   the API worker that minted it     40 .. 55   how many were lost in its place before it
    bits  0 .. 39   count

So nothing that was meant for a lost worker reaches its successor, whose pipe has another name; and what comes of a lost
one's requests after the `Relink` that tells of it is known by its rid.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from asyncengine.config import API_WORKER_SHIFT
from asyncengine.errors import StartupError
from asyncengine.wire.pipes import Pipes, Sender, pipe_name

LIFE_SHIFT = 40
MAX_LIFE = (1 << API_WORKER_SHIFT - LIFE_SHIFT) - 1


class ApiProcess(NamedTuple):
    """An API worker's process; number `life` in its place."""

    worker: int
    life: int = 0

    @property
    def pipe(self) -> str:
        """The name of the pipe that it reads."""
        return pipe_name(f"engine.{self.worker}", self.life)

    @property
    def first_rid(self) -> int:
        """Of those that it mints. Raises `StartupError` when too many were lost for it to have any."""
        if self.life > MAX_LIFE:
            raise StartupError(f"API worker {self.worker} was lost {self.life} times, which is as often as can be told")
        return self.worker << API_WORKER_SHIFT | self.life << LIFE_SHIFT


def minter(rid: int) -> ApiProcess:
    """The process that minted `rid`."""
    return ApiProcess(rid >> API_WORKER_SHIFT, rid >> LIFE_SHIFT & MAX_LIFE)


class EnginePipes:
    """The pipes to API processes that there has been something to tell."""

    def __init__(self, pipes: Pipes) -> None:
        self._pipes = pipes
        self._lives: dict[int, int] = {}
        self._senders: dict[ApiProcess, Sender] = {}

    def send(self, rid: int, message: msgspec.Struct) -> None:
        """To the process that minted `rid`; if that was lost, to nobody."""
        if not self.lost(rid):
            self._sender(minter(rid)).send(message)

    def send_to(self, worker: int, message: msgspec.Struct) -> None:
        """To the process that is in this worker's place, as far as is known."""
        self._sender(ApiProcess(worker, self._lives.get(worker, 0))).send(message)

    def lost(self, rid: int) -> bool:
        """Whether the process that minted `rid` is known to be lost."""
        process = minter(rid)
        return process.life < self._lives.get(process.worker, 0)

    def relink(self, worker: int, life: int) -> bool:
        """The worker was lost, and number `life` is in its place. What waits for those before is dropped. False if
        that is no news."""
        if life <= self._lives.get(worker, 0):
            return False
        self._lives[worker] = life
        for process in [each for each in self._senders if each.worker == worker and each.life < life]:
            self._pipes.drop(self._senders.pop(process))
        return True

    def flush(self) -> bool:
        """Push on what found a pipe full; True when none is left."""
        flushed = [sender.flush() for sender in self._senders.values()]
        return all(flushed)

    def _sender(self, process: ApiProcess) -> Sender:
        if process not in self._senders:
            self._senders[process] = self._pipes.sender(process.pipe)
        return self._senders[process]
