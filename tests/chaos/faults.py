"""What is done to the server's processes: killed at any moment, or stopped for a while and let go on.

kill -9   tokenizer_proc | detokenizer_proc | gpu_runner | api_worker where there are several, one drawn; it may still
          be loading, or be a stopped one
SIGSTOP   any process, the server itself and API workers included ... 0.2 to 2 s ... SIGCONT
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from chaos.processes import SIDECARS, clients_of, family, look_at

MIN_STOP_SECONDS, MAX_STOP_SECONDS = 0.2, 2.0


@dataclass(frozen=True, order=True)
class Fault:
    """at: seconds from the run's beginning. pick: from 0 to 1, which of the processes there are then. seconds: of a
    stop."""

    at: float
    kind: Literal["kill", "stop"]
    pick: float
    seconds: float = 0.0


@dataclass
class Kill:
    """silences: of each stream that was open, the seconds from its last bytes before the kill to its first ones after;
    other faults that came meanwhile are in them. clients: own ports of those whose connections went with it."""

    at: float
    role: str
    clients: frozenset[int] = frozenset()
    silences: list[float] = field(default_factory=list)


def draw_faults(rng: random.Random, *, kills_per_second: float, stops_per_second: float) -> Iterator[Fault]:
    """In order, for ever; none where both rates are 0."""
    kills, stops = random.Random(rng.random()), random.Random(rng.random())
    return heapq.merge(
        (Fault(at, "kill", kills.random()) for at in _times(kills, kills_per_second)),
        (
            Fault(at, "stop", stops.random(), stops.uniform(MIN_STOP_SECONDS, MAX_STOP_SECONDS))
            for at in _times(stops, stops_per_second)
        ),
    )


def _times(rng: random.Random, per_second: float) -> Iterator[float]:
    at = 0.0
    while per_second:
        at += rng.expovariate(per_second)
        yield at


class Saboteur:
    """Does faults to the family of process `root`. `kills` and `stops` are those done."""

    def __init__(self, root: int, *, port: int = 0, roles: Sequence[str] = SIDECARS) -> None:
        """port: where it serves. roles: of the processes that are killed."""
        self._root = root
        self._port = port
        self._roles = roles
        self._stopped: dict[int, asyncio.TimerHandle] = {}
        self.kills: list[Kill] = []
        self.stops = 0

    async def run(self, faults: Iterator[Fault], seconds: float) -> None:
        """Do what comes within `seconds`."""
        begin = time.monotonic()
        for fault in faults:
            if fault.at >= seconds:
                return
            await asyncio.sleep(begin + fault.at - time.monotonic())
            self._do(fault)

    def heard(self, before: float, now: float) -> None:
        """Some stream was silent from `before` until `now`."""
        for kill in reversed(self.kills):
            if kill.at < before:
                return
            if kill.at <= now:
                kill.silences.append(now - before)

    def cut(self, client: int, since: float) -> bool:
        """Whether the connection that a client has had from its port `client` since then went with a process."""
        return any(kill.at >= since and client in kill.clients for kill in self.kills)

    def let_go(self) -> None:
        """Let everything that is stopped go on."""
        for pid, timer in list(self._stopped.items()):
            timer.cancel()
            self._continue(pid)

    def _do(self, fault: Fault) -> None:
        processes = family(self._root)
        if fault.kind == "stop":
            pids = [process.pid for process in processes if process.pid not in self._stopped and process.state != "Z"]
            if pids:
                self._stop(pids[int(fault.pick * len(pids))], fault.seconds)
            return
        # as many kills for each role, however many processes it has; its last bits decide between those
        place, within = divmod(fault.pick * len(self._roles), 1)
        role = self._roles[int(place)]
        pids = [process.pid for process in processes if process.role == role]
        if pids:  # it may just be missing
            self._kill(role, pids[int(within * len(pids))])

    def _kill(self, role: str, pid: int) -> None:
        clients: set[int] = set()
        with contextlib.suppress(ProcessLookupError):
            if role == "api_worker":
                os.kill(pid, signal.SIGSTOP)  # so that it accepts nobody while one looks
                while (process := look_at(pid)) is not None and process.state not in "TZ":
                    time.sleep(0.001)
                clients = clients_of(pid, self._port)
            os.kill(pid, signal.SIGKILL)
        self.kills.append(Kill(time.monotonic(), role, frozenset(clients)))

    def _stop(self, pid: int, seconds: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self.stops += 1
            self._stopped[pid] = asyncio.get_running_loop().call_later(seconds, self._continue, pid)

    def _continue(self, pid: int) -> None:
        del self._stopped[pid]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
