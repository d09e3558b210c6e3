"""A fleet of replicas under a trace: which is there when, and who gets which request.

    replica 0  |======= takes requests ==========================================|
    replica 1        ordered |---- cold start ----|==== takes requests ====| drains | off
                     ^ more work than wanted                               ^ less, for all of the hold

Nothing runs here: what replicas have to do is the router's estimate.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from simulation.router import Router
from simulation.traffic import Traffic

_CHUNK = 1 << 16


class Scaling(NamedTuple):
    """How many replicas there are: always `most`, unless is_reactive. Then, at the end of each window, so many that
    the work that came in it, and what is outstanding, would take `utilisation` of a window, from `least` to `most`.
    More are ordered at once and come after the cold start; fewer are kept when fewer would have done in all windows of
    the last `hold_ns`. At the begin there are those that the first window's requests need."""

    most: int
    is_reactive: bool = False
    least: int = 1
    utilisation: float = 0.8
    window_ns: int = 30 * 10**9
    hold_ns: int = 300 * 10**9
    cold_start_ns: int = 0


class Autoscaler:
    def __init__(self, scaling: Scaling) -> None:
        self._scaling = scaling
        self._needed: deque[tuple[int, int]] = deque()  # (ns, replicas) of the windows of the last hold

    def needed(self, work_ns: int) -> int:
        """Replicas for so much work in a window."""
        scaling = self._scaling
        if not scaling.is_reactive:
            return scaling.most
        wanted = math.ceil(work_ns / (scaling.window_ns * scaling.utilisation))
        return min(scaling.most, max(scaling.least, wanted))

    def decide(self, now_ns: int, count: int, work_ns: int) -> int:
        """How many there should be, where `count` are there or ordered. work_ns: of the window that ends, with what is
        outstanding."""
        needed = self.needed(work_ns)
        self._needed.append((now_ns, needed))
        while self._needed[0][0] <= now_ns - self._scaling.hold_ns:
            self._needed.popleft()
        held = max(needed for _, needed in self._needed)
        # that there were too many for all of a hold is known when one has passed
        return max(needed, min(count, held)) if now_ns >= self._scaling.hold_ns else max(needed, count)


@dataclass(slots=True)
class Life:
    """Of a replica, in ns; it is paid for from `ordered` to `off`."""

    ordered: int
    up: int
    off: int = -1


class Moment(NamedTuple):
    """The end of a window: replicas that take requests and that are yet to come, after the decision; work that is
    outstanding and that came in the window, before it."""

    at_ns: int
    up: int
    coming: int
    outstanding_ns: int
    came_ns: int


@dataclass(slots=True)
class Played:
    """replica: of each request. lives: of each replica. end_ns: when the fleet is done, by the estimate."""

    replica: NDArray[np.int32]
    lives: list[Life]
    moments: list[Moment]
    end_ns: int
    work_ns: int

    @property
    def peak(self) -> int:
        """The most that there were at a time, with those in cold start."""
        return max((moment.up + moment.coming for moment in self.moments), default=len(self.lives))

    @property
    def gpu_hours(self) -> float:
        return sum(life.off - life.ordered for life in self.lives) / 3.6e12


@dataclass(slots=True)
class _Fleet:
    router: Router
    scaling: Scaling
    lives: list[Life] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    coming: deque[int] = field(default_factory=deque)

    def order(self, now_ns: int, cold_start_ns: int) -> None:
        self.coming.append(len(self.lives))
        self.lives.append(Life(now_ns, now_ns + cold_start_ns))

    def come_up(self, now_ns: int) -> None:
        while self.coming and self.lives[self.coming[0]].up <= now_ns:
            replica = self.coming.popleft()
            self.router.add(replica, self.lives[replica].up)

    def let_go(self, count: int, now_ns: int) -> None:
        """The latest, of which least is known; one stays."""
        replicas = self.router.replicas
        for replica in replicas[max(1, len(replicas) - count) :]:
            self.lives[replica].off = max(now_ns, self.router.remove(replica))


def play(traffic: Traffic, router: Router, scaling: Scaling, *, first_ns: int) -> Played:
    """first_ns: work of the requests of the first window."""
    fleet = _Fleet(router, scaling)
    autoscaler = Autoscaler(scaling)
    for _ in range(autoscaler.needed(first_ns)):
        fleet.order(0, 0)
    fleet.come_up(0)
    replica = np.empty(len(traffic), np.int32)
    window_end, came_before = scaling.window_ns, 0
    next_ns = window_end
    for at, (now, source, copy) in enumerate(_rows(traffic)):
        while now >= next_ns:
            fleet.come_up(next_ns)
            if next_ns == window_end:
                came, outstanding = router.routed_ns - came_before, router.outstanding_ns(next_ns)
                up, coming = len(router.replicas), len(fleet.coming)
                change = autoscaler.decide(next_ns, up + coming, came + outstanding) - up - coming
                for _ in range(change):
                    fleet.order(next_ns, scaling.cold_start_ns)
                fleet.let_go(max(0, -change), next_ns)
                up, coming = len(router.replicas), len(fleet.coming)
                fleet.moments.append(Moment(next_ns, up, coming, outstanding, came))
                window_end, came_before = window_end + scaling.window_ns, router.routed_ns
            next_ns = min([window_end, *(fleet.lives[each].up for each in fleet.coming)])
        request = traffic.requests[source]
        blocks = traffic.blocks(source, copy) if request.blocks else ()
        replica[at] = router.route(now, request.prompt_tokens, request.output_tokens, blocks)
    end = max(int(traffic.at_ns[-1]), router.last_done_ns())
    for life in fleet.lives:
        if life.off < 0:
            life.off = end
    return Played(replica, fleet.lives, fleet.moments, end, router.routed_ns)


def _rows(traffic: Traffic) -> Iterator[tuple[int, int, int]]:
    """(ns, source, copy) of each request, as Python's numbers."""
    for begin in range(0, len(traffic), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        yield from zip(
            traffic.at_ns[part].tolist(), traffic.source[part].tolist(), traffic.copy[part].tolist(), strict=True
        )
