"""Find ways of several kernels that are fast together, where one kernel's other way alone gains nothing.

Kernels that wait for their turn (PDL) overlap as far as all of them find room on the multiprocessors at once: one that
takes little is no faster while its neighbours take much. So whole sets are drawn first, of which most are of kernels
that are about equally small; from the best of them, and from the set that one has, coordinate descent goes on; and then
two ways at a time are changed in the best set, until the time is over.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from heapq import nsmallest
from typing import Generic, NamedTuple, TypeVar

DRAW_UNTIL = 0.75
"""Share of the time that is left when no more sets are drawn."""
DESCEND_UNTIL = (0.5, 0.4, 0.3)
"""When the descents end at the latest: those from the best sets drawn, then that from the set to begin with."""

W = TypeVar("W", bound=Hashable)


class Size(NamedTuple):
    """What a program takes of a multiprocessor."""

    num_warps: int
    held_bytes: int  # in registers or shared memory

    def within(self, limit: Size) -> bool:
        return self.num_warps <= limit.num_warps and self.held_bytes <= limit.held_bytes


class TogetherSearch(Generic[W]):
    """Sets of one way for each name, and how long each takes that was tried."""

    def __init__(
        self,
        space: Mapping[str, Sequence[W]],
        *,
        size_of: Callable[[W], Size],
        time: Callable[[dict[str, W]], float],
        left: Callable[[], float],
    ) -> None:
        """space: the ways of each name. time: of a set, in any unit. left: the share of the search's own time that is
        left, from 1 down to 0 and below; what is drawn depends on nothing else."""
        self._space = {name: list(ways) for name, ways in space.items()}
        self._time = time
        self._left = left
        self._random = random.Random(0)
        self._times: dict[tuple[W, ...], float] = {}
        limits = sorted({size_of(way) for ways in self._space.values() for way in ways})
        self._within = [
            {
                name: [way for way in ways if size_of(way).within(limit)] or [min(ways, key=size_of)]
                for name, ways in self._space.items()
            }
            for limit in limits
        ]

    @property
    def tried(self) -> int:
        return len(self._times)

    def run(self, start: Mapping[str, W]) -> None:
        """start: a set to begin with, whose ways `space` has."""
        first = {name: start[name] for name in self._space}
        self.time(first)
        while self._left() > DRAW_UNTIL:
            self.time(self._draw())
        begins = [*self.best(len(DESCEND_UNTIL) - 1), first]
        for ways, until in zip(begins, DESCEND_UNTIL[-len(begins) :], strict=True):
            self._descend(ways, until)
        while self._left() > 0:
            self.time(self._change_two(self.best(1)[0]))

    def best(self, count: int) -> list[dict[str, W]]:
        """The fastest sets so far, the fastest first."""
        keys = nsmallest(count, self._times, key=self._times.__getitem__)
        return [dict(zip(self._space, key, strict=True)) for key in keys]

    def time(self, ways: dict[str, W]) -> float:
        """Timed once; but twice if it seems to be the fastest, which luck makes many seem to be."""
        key = tuple(ways[name] for name in self._space)
        if key not in self._times:
            found = self._time(ways)
            if found < min(self._times.values(), default=found):
                found = max(found, self._time(ways))
            self._times[key] = found
        return self._times[key]

    def _draw(self) -> dict[str, W]:
        """Any ways of kernels that keep to one limit, or the smallest of those that cannot."""
        return {name: self._random.choice(ways) for name, ways in self._random.choice(self._within).items()}

    def _descend(self, ways: dict[str, W], until: float) -> None:
        """Until no other way of any one name makes the set faster, if time allows."""
        last = None
        while ways != last:
            last = ways
            for name in self._random.sample(list(self._space), len(self._space)):
                for way in self._space[name]:
                    if self._left() <= until:
                        return
                    ways = min(ways, ways | {name: way}, key=self.time)

    def _change_two(self, ways: dict[str, W]) -> dict[str, W]:
        names = self._random.sample(list(self._space), min(2, len(self._space)))
        return ways | {name: self._random.choice(self._space[name]) for name in names}
