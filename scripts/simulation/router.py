"""Which replica a request goes to: where its prefix is, unless that one has too much to do."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from simulation.work import WorkModel


class Router:
    """Knows of each replica when it is done with its work, by the estimate of `WorkModel`, and which prefixes it was
    sent lately: as many blocks as its KV cache holds, the latest used.

    A request goes to the replica that has the longest known prefix of it, of several to the one that is done first; but
    to the one with the least outstanding work if none has any, or if that one has more, by over `bound` times the work
    that the prefix saves. Of several without work it is the one that has had none for the longest.

    O(log replicas + blocks) a request, and O(replicas that have its longest prefix).
    """

    def __init__(self, work: WorkModel, *, bound: float, block_tokens: int, cache_blocks: int) -> None:
        self._work = work
        self._bound = bound
        self._block_tokens = block_tokens
        self._cache_blocks = cache_blocks
        self._done_ns: dict[int, int] = {}  # of the replicas that take requests
        self._heap: list[tuple[int, int]] = []  # (done, replica); out of date where `_done_ns` says otherwise
        self._blocks: dict[int, OrderedDict[int, None]] = {}  # of each replica, the latest used last
        self._holders: dict[int, tuple[int, ...]] = {}  # block -> replicas; tuples, of which millions cost gc nothing
        self.routed_ns = 0
        """Work of all requests so far."""

    @property
    def replicas(self) -> list[int]:
        """In the order in which they were added."""
        return list(self._done_ns)

    def add(self, replica: int, now_ns: int) -> None:
        self._done_ns[replica] = now_ns
        self._blocks[replica] = OrderedDict()
        heapq.heappush(self._heap, (now_ns, replica))

    def remove(self, replica: int) -> int:
        """It gets no more requests; when it will be done with those it has."""
        for block in self._blocks.pop(replica):
            self._lose(block, replica)
        return self._done_ns.pop(replica)

    def outstanding_ns(self, now_ns: int) -> int:
        """Work of all replicas."""
        return sum(done - now_ns for done in self._done_ns.values() if done > now_ns)

    def last_done_ns(self) -> int:
        return max(self._done_ns.values())

    def route(self, now_ns: int, prompt: int, output: int, blocks: Sequence[int] = ()) -> int:
        """blocks: names of the prompt's blocks, each of all of the prompt up to its end."""
        chosen = self._least()
        work = self._work.ns(prompt, output)
        if blocks:
            least, chosen, known = chosen, *self._longest(chosen, blocks)
            cheaper = self._with_known(known, prompt, output)
            if max(self._done_ns[chosen], now_ns) - max(self._done_ns[least], now_ns) > self._bound * (work - cheaper):
                chosen, known = least, self._known(least, blocks, known)
                cheaper = self._with_known(known, prompt, output)
            work = cheaper
            self._keep(chosen, blocks)
        self.routed_ns += work
        done = self._done_ns[chosen] = max(self._done_ns[chosen], now_ns) + work
        if self._heap[0][1] == chosen:
            heapq.heapreplace(self._heap, (done, chosen))
        else:
            heapq.heappush(self._heap, (done, chosen))
        return chosen

    def _least(self) -> int:
        """The replica that is done first."""
        heap = self._heap
        while self._done_ns.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][1]

    def _longest(self, least: int, blocks: Sequence[int]) -> tuple[int, int]:
        """Who has the most of these blocks, and how many; `least` if nobody has any."""
        known = len(blocks)
        while known and blocks[known - 1] not in self._holders:
            known -= 1
        if not known:
            return least, 0
        done = self._done_ns
        return min(self._holders[blocks[known - 1]], key=lambda replica: (done[replica], replica)), known

    def _known(self, replica: int, blocks: Sequence[int], most: int) -> int:
        """How many of the first `most` blocks it has."""
        own = self._blocks[replica]
        while most and blocks[most - 1] not in own:
            most -= 1
        return most

    def _with_known(self, blocks: int, prompt: int, output: int) -> int:
        return self._work.ns(prompt, output, min(blocks * self._block_tokens, prompt - 1))

    def _keep(self, replica: int, blocks: Sequence[int]) -> None:
        """The first block last, so that the ends of prompts are forgotten before their beginnings."""
        own = self._blocks[replica]
        for block in reversed(blocks):
            if block in own:
                own.move_to_end(block)
            else:
                own[block] = None
                self._holders[block] = (*self._holders.get(block, ()), replica)
        while len(own) > self._cache_blocks:
            self._lose(own.popitem(last=False)[0], replica)

    def _lose(self, block: int, replica: int) -> None:
        left = tuple([holder for holder in self._holders[block] if holder != replica])
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]
