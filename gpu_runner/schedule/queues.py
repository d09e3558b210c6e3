"""Requests that wait to run, in the order of a policy."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncengine.config import SchedulingPolicy
from asyncengine.sampling import SamplingParams

Key = tuple[int, int, int]


@dataclass(slots=True, eq=False)
class Request:
    """One choice of one request.

    group: the request's first rid, shared by its choices. tokens: its prompt and, where it goes on after a loss, the
    output that it has; shown: as in `Resume`. arrival: order of arrival, unique. slot: -1 until the request has run; a
    retracted request keeps its slot, its tokens so far and its place in the detokenizer. queued_ns, started_ns: when it
    came and when it was first planned, by the scheduler's clock; 0 = not yet.
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
    shown: int = 0
    slot: int = -1
    preemptions: int = 0
    queued_ns: int = 0
    started_ns: int = 0

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
    """A heap by policy with removal by rid. Policies order by

    fcfs: arrival; priority: smaller number, then arrival; shortest / longest: prompt length, then arrival.
    What has run, a retracted request or one that came with output, goes before all that have not (of its own priority).
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[Key, Request]] = []
        self._waiting: dict[int, Request] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, rid: int) -> bool:
        return rid in self._waiting

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())

    def push(self, request: Request) -> None:
        self._waiting[request.rid] = request
        self.num_tokens += len(request.tokens)
        heapq.heappush(self._heap, (self._key(request), request))

    def head(self) -> Request | None:
        """The request that runs next; it stays in the queue."""
        while self._heap and self._waiting.get(self._heap[0][1].rid) is not self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        request = self.head()
        if request is None:
            raise IndexError("pop from an empty queue")
        heapq.heappop(self._heap)
        self._forget(request)
        return request

    def remove(self, rid: int) -> Request | None:
        """Take `rid` out wherever it stands; None if it does not wait. Its heap entry is dropped when it surfaces."""
        request = self._waiting.get(rid)
        if request is not None:
            self._forget(request)
            if len(self._heap) > 64 and len(self._heap) > 2 * len(self._waiting):
                self._heap = [entry for entry in self._heap if self._waiting.get(entry[1].rid) is entry[1]]
                heapq.heapify(self._heap)
        return request

    def check_integrity(self) -> None:
        live = [entry[1].rid for entry in self._heap if self._waiting.get(entry[1].rid) is entry[1]]
        assert sorted(live) == sorted(self._waiting), "every waiting request has exactly one live heap entry"
        assert self.num_tokens == sum(len(request.tokens) for request in self._waiting.values())

    def _forget(self, request: Request) -> None:
        del self._waiting[request.rid]
        self.num_tokens -= len(request.tokens)

    def _key(self, request: Request) -> Key:
        fresh = int(request.slot < 0 and len(request.tokens) == request.prompt_len)
        if self._policy == "priority":
            return (request.params.priority, fresh, request.arrival)
        if self._policy == "shortest":
            return (fresh, request.prompt_len if fresh else 0, request.arrival)
        if self._policy == "longest":
            return (fresh, -request.prompt_len if fresh else 0, request.arrival)
        return (fresh, 0, request.arrival)
