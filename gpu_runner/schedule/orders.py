"""Orders of waiting requests: a policy's, and a tenant's, in which prompts that begin alike follow one another."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Mapping

from asyncengine.config import PAGE_SIZE, SchedulingPolicy
from gpu_runner.schedule.request import Family, Request

Key = tuple[int, int, int]

FAMILY_TOKENS = 4 * PAGE_SIZE
"""Prompts that are equal so far begin alike; shorter ones have nothing to share that would be worth it."""
MAX_FAMILY_RUN = 8
"""Requests that start before the policy's first one because they begin like one that started."""


class Lane:
    """The waiting requests of one tenant in one class, by policy; among those that have not run and whose places are by
    arrival, the ones that begin like the last that started come next, while its prefix is still cached."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.waiting: dict[int, Request] = {}
        self._order = Order(KEYS[policy], self.waiting)
        self._groups = policy in ("fcfs", "priority")
        self._families: dict[Family, OrderedDict[int, Request]] = {}  # each by arrival
        self._following: Family | None = None  # of the last that started
        self._run = 0  # requests that have started before the policy's first

    def push(self, request: Request) -> None:
        self.waiting[request.rid] = request
        self._order.push(request)
        request.family = None
        if self._groups and request.fresh and request.prompt_len >= FAMILY_TOKENS:
            priority = request.params.priority
            request.family = (priority, request.namespace, request.tokens[:FAMILY_TOKENS].tobytes())
            self._families.setdefault(request.family, OrderedDict())[request.rid] = request

    def first(self) -> Request | None:
        wanted = self._order.first()
        if wanted is None or not wanted.fresh or self._following is None or self._run >= MAX_FAMILY_RUN:
            return wanted
        family = self._families.get(self._following)
        if family is None or self._following[0] != wanted.params.priority:
            return wanted
        return next(iter(family.values()))

    def started(self, request: Request) -> None:
        """Of one that waits here; it is to be forgotten next."""
        self._run = 0 if request is self._order.first() else self._run + 1
        if request.family is not None:
            self._following = request.family

    def forget(self, request: Request) -> None:
        del self.waiting[request.rid]
        if request.family is not None:
            family = self._families[request.family]
            del family[request.rid]
            if not family:
                del self._families[request.family]

    def check_integrity(self) -> None:
        assert self._order.live() == sorted(self.waiting), "every waiting request has exactly one live heap entry"
        assert all(self._families.values()), "a family without members is forgotten"
        members = sorted(rid for family in self._families.values() for rid in family)
        assert members == sorted(rid for rid, request in self.waiting.items() if request.family is not None)


class Order:
    """A heap over the requests that wait. The entries of those that have left are dropped when they surface; a request
    that comes again has a new ticket, so that its old entry is known for what it is. Sorted when it is asked: one that
    nobody asks costs next to nothing."""

    def __init__(self, key: Callable[[Request], Key], waiting: Mapping[int, Request]) -> None:
        self._key = key
        self._waiting = waiting
        self._heap: list[tuple[Key, int, Request]] = []
        self._unsorted: list[tuple[int, Request]] = []

    def push(self, request: Request) -> None:
        size = len(self._heap) + len(self._unsorted)
        if size > 64 and size > 2 * len(self._waiting):
            self._heap = [entry for entry in self._heap if self._is_live(*entry[1:])]
            heapq.heapify(self._heap)
            self._unsorted = [entry for entry in self._unsorted if self._is_live(*entry)]
        self._unsorted.append((request.ticket, request))

    def first(self) -> Request | None:
        if self._unsorted:
            for ticket, request in self._unsorted:
                if self._is_live(ticket, request):
                    heapq.heappush(self._heap, (self._key(request), ticket, request))
            self._unsorted.clear()
        heap = self._heap
        while heap:
            _, ticket, request = heap[0]
            if self._is_live(ticket, request):
                return request
            heapq.heappop(heap)
        return None

    def live(self) -> list[int]:
        entries = [*(entry[1:] for entry in self._heap), *self._unsorted]
        return sorted(request.rid for ticket, request in entries if self._is_live(ticket, request))

    def _is_live(self, ticket: int, request: Request) -> bool:
        return request.ticket == ticket and self._waiting.get(request.rid) is request


def by_length(request: Request) -> Key:
    return (0, request.prompt_len, request.arrival)


def by_arrival(request: Request) -> Key:
    return (0, 0, request.arrival)


def _fcfs(request: Request) -> Key:
    return (int(request.fresh), 0, request.arrival)


def _priority(request: Request) -> Key:
    return (request.priority, int(request.fresh), request.arrival)


def _shortest(request: Request) -> Key:
    fresh = request.fresh
    return (int(fresh), request.prompt_len if fresh else 0, request.arrival)


def _longest(request: Request) -> Key:
    fresh = request.fresh
    return (int(fresh), -request.prompt_len if fresh else 0, request.arrival)


KEYS: dict[SchedulingPolicy, Callable[[Request], Key]] = {
    "fcfs": _fcfs,
    "priority": _priority,
    "shortest": _shortest,
    "longest": _longest,
}
