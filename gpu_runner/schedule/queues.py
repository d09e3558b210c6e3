"""Requests that wait to run, in the order of a policy."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncengine.config import SchedulingPolicy
from asyncengine.sampling import INT32_MAX, SamplingParams
from asyncengine.terms import DEFAULT_TERMS, Terms

Key = tuple[int, int, int]

MAX_OVERTAKES = 16
"""Requests that may start before the oldest one that waits."""
AGED_PRIORITY = -INT32_MAX - 1
"""Before every priority that a request may ask for."""


@dataclass(slots=True, eq=False)
class Request:
    """One choice of one request.

    group: the request's first rid, shared by its choices. tokens: its prompt and, where it goes on after a loss, the
    output that it has; shown: as in `Resume`. arrival: order of arrival, unique. slot: -1 until the request has run; a
    retracted request keeps its slot, its tokens so far and its place in the detokenizer. queued_ns, started_ns: when it
    came and when it was first planned, by the scheduler's clock; 0 = not yet. ticket: tells its stays in the queue
    apart. aged: it was overtaken as often as may be, so that its turn came before the policy's. session_tokens,
    session_common: as in `Open`, from when it started.
    """

    rid: int
    group: int
    tokens: NDArray[np.int32]  # [prompt_len + output it has]
    prompt_len: int
    params: SamplingParams
    seed: int
    limit: int  # total tokens, prompt included, at which it ends with LENGTH
    detok: bytes
    namespace: str
    arrival: int
    terms: Terms = DEFAULT_TERMS
    shown: int = 0
    slot: int = -1
    preemptions: int = 0
    queued_ns: int = 0
    started_ns: int = 0
    ticket: int = 0
    aged: bool = False
    session_tokens: int = -1
    session_common: int = 0

    @property
    def priority(self) -> int:
        """An aged one is not sent back for a more important one: it would never end."""
        return AGED_PRIORITY if self.aged else self.params.priority

    @property
    def fresh(self) -> bool:
        """It has not run, neither here nor in a process that was lost."""
        return self.slot < 0 and len(self.tokens) == self.prompt_len

    @property
    def prompt(self) -> NDArray[np.int32]:
        return self.tokens[: self.prompt_len]

    @property
    def resumed(self) -> NDArray[np.int32]:
        """The output that it came with."""
        return self.tokens[self.prompt_len :]

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of its prompt are wanted; what has output has reported them."""
        return self.params.prompt_logprobs is not None and len(self.tokens) == self.prompt_len


class WaitingQueue:
    """Requests by policy, with removal by rid. Policies order by

    fcfs: arrival; priority: smaller number, then arrival; shortest / longest: prompt length, then arrival.
    What has run, a retracted request or one that came with output, goes before all that have not (of its own priority).

    Whatever the policy, nobody waits for ever: of `MAX_OVERTAKES + 1` requests that start, one is the oldest of those
    that have not run. So a request before which `m` others came starts at the latest as number
    `(m + 1) * (MAX_OVERTAKES + 1)`, however many come after it.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._waiting: dict[int, Request] = {}
        self._wanted = _Order(_KEYS[policy], self._waiting)
        self._fresh: OrderedDict[int, Request] = OrderedDict()  # by arrival, which is the order they are pushed in
        self._shortest = _Order(_length, self._waiting)
        self._overtakes = 0  # requests that have started before the oldest that waits
        self._tickets = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, rid: int) -> bool:
        return rid in self._waiting

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())

    def push(self, request: Request) -> None:
        self._tickets += 1
        request.ticket = self._tickets
        self._waiting[request.rid] = request
        self.num_tokens += len(request.tokens)
        self._wanted.push(request)
        if request.fresh:
            self._fresh[request.rid] = request
            self._shortest.push(request)

    def head(self) -> Request | None:
        """The request that runs next; it stays in the queue."""
        wanted = self._wanted.first()
        if wanted is None or not wanted.fresh or self._overtakes < MAX_OVERTAKES:
            return wanted
        oldest = self._oldest()
        assert oldest is not None
        oldest.aged = oldest.aged or oldest is not wanted
        return oldest

    def wanted(self) -> Request | None:
        """The first by policy alone."""
        return self._wanted.first()

    def filler(self, head: Request) -> Request | None:
        """A request that may start though `head`, which lacks pages, cannot: the shortest, if it is shorter, and none
        while `head` has been overtaken as often as it may, or has run before."""
        if not head.fresh or self._overtakes >= MAX_OVERTAKES:
            return None
        shortest = self._shortest.first()
        return shortest if shortest is not None and shortest.prompt_len < head.prompt_len else None

    def take(self, request: Request, *, resumed: bool) -> None:
        """Take out a request that starts, for the first time or again."""
        if not resumed:
            self._overtakes = 0 if request is self._oldest() else self._overtakes + 1
        self._forget(request)

    def remove(self, rid: int) -> Request | None:
        """Take `rid` out wherever it stands; None if it does not wait."""
        request = self._waiting.get(rid)
        if request is not None:
            self._forget(request)
        return request

    def check_integrity(self) -> None:
        fresh = sorted(rid for rid, request in self._waiting.items() if request.fresh)
        arrivals = [request.arrival for request in self._fresh.values()]
        assert self._wanted.live() == sorted(self._waiting), "every waiting request has exactly one live heap entry"
        assert sorted(self._fresh) == self._shortest.live() == fresh
        assert arrivals == sorted(arrivals)
        assert self._overtakes <= MAX_OVERTAKES
        assert self.num_tokens == sum(len(request.tokens) for request in self._waiting.values())

    def _oldest(self) -> Request | None:
        """Of those that have not run."""
        return next(iter(self._fresh.values()), None)

    def _forget(self, request: Request) -> None:
        del self._waiting[request.rid]
        self._fresh.pop(request.rid, None)
        self.num_tokens -= len(request.tokens)


class _Order:
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
        while self._heap and not self._is_live(*self._heap[0][1:]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def live(self) -> list[int]:
        entries = [*(entry[1:] for entry in self._heap), *self._unsorted]
        return sorted(request.rid for ticket, request in entries if self._is_live(ticket, request))

    def _is_live(self, ticket: int, request: Request) -> bool:
        return request.ticket == ticket and self._waiting.get(request.rid) is request


def _length(request: Request) -> Key:
    return (0, request.prompt_len, request.arrival)


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


_KEYS: dict[SchedulingPolicy, Callable[[Request], Key]] = {
    "fcfs": _fcfs,
    "priority": _priority,
    "shortest": _shortest,
    "longest": _longest,
}
