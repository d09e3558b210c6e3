"""The host-memory tier of the KV cache: what is copied there, what is fetched back, and what must not be touched while
it is copied.

Everything that rows compute is copied out in the background, a bounded number of pages a step, so that giving up a page
of the device costs nothing at that moment: what is needed again comes back by a load, or is computed again where that
is cheaper. The two trees are independent (`HostTree`); here are the copies between them.

    plan N     ... take() -> batch 7: stores, loads | plan N + 1 | ...              | done(7)
    device     stores' pages: referenced -----------------------------------------> | released
               loads' pages: in the tree at once, their node locked --------------> | unlocked
    host       both's pages: epoch 7 ---------------------------------------------> | may be read, and evicted
    rows       on pages that a load of batch 7 fills: State.LOADING -------------->  | prefill the rest

A load's pages stand in the device's tree from the begin, so a second request for the same prefix shares them, waits for
the same ticket, and nothing is loaded twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from asyncengine.config import PAGE_SIZE
from gpu_runner.kvcache.host_pages import HostPool, HostTree
from gpu_runner.kvcache.pages import PagePool, require
from gpu_runner.kvcache.radix import Match, Node, RadixTree
from gpu_runner.schedule.plan import Int32
from gpu_runner.schedule.slots import Slots
from gpu_runner.schedule.transfers import Transfers

STORES_PER_BATCH = 256
"""Pages copied to host memory after one plan, at most; and an eighth of the device's."""
STORES_IN_FLIGHT = 2
"""No more are begun while so many batches' worth of them is under way: they hold pages of the device."""
PREFIXES_PER_BATCH = 4
"""Ended prefixes looked at for a batch, whether they turn out to be stored already or not."""
STEPS_BETWEEN_LOOKS = 8
"""Steps until the decoding rows are looked at again when none of them had enough to store."""
PAGES_TO_STORE = 32
"""A row that decodes is looked at when it has so many full pages that are not stored; in small caches sooner."""
MAX_QUEUED = 4096
"""Ended prefixes that wait to be stored; the oldest are given up when stores cannot keep up."""
RECOMPUTE_NS = 10_000
"""What a token of a prompt is taken to cost where nobody has measured it."""

NO_HOST_GAUGES = dict.fromkeys(
    ("host_hit_tokens", "host_pages_pinned", "host_pages_total", "host_pages_used", "kv_loads", "kv_stores"), 0
)
PAGE_SHIFT = PAGE_SIZE.bit_length() - 1
_NO_PAGES: Int32 = np.empty(0, np.int32)


def recompute_ns(tokens: int, context: int) -> int:
    return tokens * RECOMPUTE_NS


class _Ended(NamedTuple):
    """A prefix to store. written: the latest step that may write its pages. node: of the device's tree, its end.
    copied: called whenever host memory has more of it."""

    written: int
    node: Node
    copied: Callable[[], None] | None


class _Batch(NamedTuple):
    ticket: int
    stored: Int32  # pages of the device, one reference each
    loaded: list[Node]  # locked in the device's tree


class HostTier:
    """Pages of rows, by slot and by prefix, on their ways to host memory and back."""

    def __init__(
        self,
        slots: Slots,
        pool: PagePool,
        tree: RadixTree,
        *,
        caching: bool,
        host_pages: int,
        page_load_ns: int,
        prefill_ns: Callable[[int, int], float],
    ) -> None:
        """caching: as of `Rows`; where it is off, only what a retracted row has computed is stored.

        page_load_ns: what a page takes to come back. prefill_ns: what computing (tokens, behind a context) takes.
        """
        self.tree = HostTree(HostPool(host_pages))
        self.ticket = 1  # of the next batch
        self.done_ticket = 0
        self.num_loads = self.num_stores = 0  # pages, since the start
        self._caching = caching
        self._slots = slots
        self._device_pool = pool
        self._device_tree = tree
        self._page_load_ns = page_load_ns
        self._prefill_ns = prefill_ns
        self._stored: Int32 = np.zeros(slots.num_slots, np.int32)  # full pages of a decoding row that were seen to
        self._loaded_by = np.zeros(pool.num_pages, np.int64)  # ticket of the latest load into a page of the device
        self._max_stores = min(STORES_PER_BATCH, -(-pool.num_pages // 8))
        self._pages_to_store = min(PAGES_TO_STORE, -(-pool.num_pages // 64))
        self._next_look = 0  # the step after which the decoding rows are looked at
        self._ended: list[tuple[Node, Callable[[], None] | None]] = []  # since the last batch
        self._queue: deque[_Ended] = deque(maxlen=MAX_QUEUED)
        self._load_from: list[Int32] = []
        self._load_to: list[Int32] = []
        self._loading: list[Node] = []
        self._in_flight: deque[_Batch] = deque()
        self._storing = 0  # pages in flight

    @property
    def busy(self) -> bool:
        """Whether there are copies in flight, or prefixes to store."""
        return bool(self._in_flight or self._loading or self._ended or self._queue)

    # -------------------------------------------------------------------------------------------------------- loads

    def find(self, namespace: str, tokens: Int32, cached: int) -> Match | None:
        """What to load for `tokens` of which the device has `cached` pages: its pages, and the node of the host's tree
        that ends them; None if there is nothing, or computing it takes no longer."""
        node, pages = self.tree.find(namespace, tokens)
        count = len(pages) - cached
        if count <= 0 or self._prefill_ns(count * PAGE_SIZE, cached * PAGE_SIZE) <= count * self._page_load_ns:
            return None
        return Match(node, pages[cached:])

    def load(self, found: Match, pages: Int32, node: Node) -> None:
        """Copy what was found into `pages` of the device with the next batch. node: of the device's tree, which ends
        with them."""
        self.tree.hold(found.node, self.ticket)
        self._device_tree.lock(node)
        self._loaded_by[pages] = self.ticket
        self._load_from.append(found.pages)
        self._load_to.append(pages)
        self._loading.append(node)
        self.num_loads += len(pages)

    def loaded_by(self, pages: Int32) -> int:
        """The ticket after which all these pages of the device may be read; 0 if that is now."""
        ticket = int(self._loaded_by[pages].max(initial=0))
        return ticket if ticket > self.done_ticket else 0

    # ------------------------------------------------------------------------------------------------------- stores

    def begins(self, slot: int) -> None:
        """The row's pages are not all computed yet."""
        self._stored[slot] = np.iinfo(np.int32).max

    def decode(self, slots: Int32) -> None:
        """These rows have a token since they began to prefill: what they are known to have is computed."""
        self._stored[slots] = 0

    def ended(self, node: Node, copied: Callable[[], None] | None = None) -> None:
        """A row has let go of what ends with this node of the device's tree. copied: called whenever host memory has
        more of it, or is about to."""
        self._ended.append((node, copied))

    def take(self, planned: int, decoding: Int32) -> Transfers | None:
        """The next batch, if there is anything to copy. planned: the latest step; decoding: slots of decoding rows."""
        if self._ended:
            self._queue.extend(_Ended(planned, *ended) for ended in self._ended)
            self._ended.clear()
        stores: list[tuple[Int32, Int32]] = []
        if self._storing < STORES_IN_FLIGHT * self._max_stores:
            room, looks = self._store_ended(self._max_stores, stores)
            if room and looks and self._caching and planned >= self._next_look:
                self._store_decoding(decoding, planned, room, stores)
        if not stores and not self._loading:
            return None
        store_from, store_to = (np.concatenate(ends) for ends in zip(*stores, strict=True)) if stores else _NOTHING
        load_from, load_to = (_joined(self._load_from), _joined(self._load_to))
        self._in_flight.append(_Batch(self.ticket, store_from, self._loading))
        self._storing += len(store_from)
        self.num_stores += len(store_from)
        self._load_from, self._load_to, self._loading = [], [], []
        self.ticket += 1
        return Transfers(self.ticket - 1, store_from, store_to - np.int32(1), load_from - np.int32(1), load_to)

    def done(self, ticket: int) -> None:
        """All batches up to `ticket` are done."""
        self.done_ticket = ticket
        while self._in_flight and self._in_flight[0].ticket <= ticket:
            batch = self._in_flight.popleft()
            self._device_pool.decref(batch.stored, 0)
            self._storing -= len(batch.stored)
            for node in batch.loaded:
                self._device_tree.unlock(node, 0)
                if not self._caching and node.lock_count == 0:  # whom it was loaded for has ended
                    self._device_tree.drop_namespace(node.namespace)
                    self.tree.drop_namespace(node.namespace)
        self.tree.pool.complete(ticket)

    def _store_ended(self, room: int, stores: list[tuple[Int32, Int32]]) -> tuple[int, int]:
        """Begin to store prefixes that have ended. Returns what is left of the room, and of the looks."""
        looks = PREFIXES_PER_BATCH
        while room and looks and self._queue and self._queue[0].written <= self._device_pool.completed_epoch:
            ended = self._queue.popleft()
            node = ended.node
            tokens, pages = self._device_tree.content(node)
            pages = self._readable(pages)
            depth, room = self._store(node.namespace, tokens[: len(pages) * PAGE_SIZE], pages, room, stores)
            looks -= 1
            if depth < len(pages) and not room:
                self._queue.appendleft(ended)
            if ended.copied is not None:
                ended.copied()
        return room, looks

    def _store_decoding(self, decoding: Int32, planned: int, room: int, stores: list[tuple[Int32, Int32]]) -> None:
        """Begin to store what that row has which decodes and has most to store: one a step keeps up, however many
        decode, for each has more of it the longer it takes."""
        slots = self._slots
        unstored = ((slots.known[decoding] - np.int32(1)) >> PAGE_SHIFT) - self._stored[decoding]
        if unstored.max(initial=0) < self._pages_to_store:
            self._next_look = planned + STEPS_BETWEEN_LOOKS
            return
        slot = int(decoding[unstored.argmax()])
        request = slots.request[slot]
        assert request is not None
        full = int(slots.known[slot] - 1) >> PAGE_SHIFT
        tokens, pages = slots.tokens[slot, : full * PAGE_SIZE], slots.page_table[slot, :full]
        depth, room = self._store(request.namespace, tokens, pages, room, stores)
        self._stored[slot] = full if room else depth  # what finds no place in host memory now finds none soon

    def _store(
        self, namespace: str, tokens: Int32, pages: Int32, room: int, stores: list[tuple[Int32, Int32]]
    ) -> tuple[int, int]:
        """Begin to store up to `room` pages of a prefix. Returns how many of its pages are stored then, and what is
        left of the room."""
        depth, new = self.tree.add(namespace, tokens, room, self.ticket)
        if len(new):
            source = pages[depth : depth + len(new)].copy()
            self._device_pool.incref(source)
            stores.append((source, new))
        return depth + len(new), room - len(new)

    def _readable(self, pages: Int32) -> Int32:
        """The first of these pages of the device, up to one that is being loaded."""
        late = self._loaded_by[pages] > self.done_ticket
        return pages[: int(late.argmax())] if late.any() else pages

    def start_over(self) -> None:
        """Forget what host memory has. There are no copies under way, nor any rows."""
        assert not self.busy
        self.tree.start_over()
        self.tree.pool.start_over()

    # -------------------------------------------------------------------------------------------------- observation

    def gauges(self) -> dict[str, int]:
        """host_hit_tokens, kv_loads, kv_stores: since the start, the last two in pages."""
        pool, tree = self.tree.pool, self.tree
        return {
            "host_hit_tokens": self.num_loads * PAGE_SIZE,
            "host_pages_pinned": tree.num_pages - tree.num_evictable,  # sessions alone lock any for longer than a call
            "host_pages_total": pool.num_pages - 1,
            "host_pages_used": pool.num_pages - 1 - pool.num_free,
            "kv_loads": self.num_loads,
            "kv_stores": self.num_stores,
        }

    def pages_held(self) -> Int32:
        """Every reference to a page of the device that copies hold."""
        return _joined([batch.stored for batch in self._in_flight])

    def check_integrity(self) -> None:
        self.tree.check_integrity()
        self.tree.pool.check_integrity(self.tree.pages_held())
        storing = sum(len(batch.stored) for batch in self._in_flight)
        require(storing == self._storing, f"{storing} pages are in stores that are in flight, not {self._storing}")
        nodes = [node for batch in self._in_flight for node in batch.loaded] + self._loading
        require(all(node.lock_count > 0 for node in nodes), "a prefix that is being loaded is not locked")
        tickets, done, following = [batch.ticket for batch in self._in_flight], self.done_ticket, self.ticket
        expected = list(range(done + 1, following))
        require(tickets == expected, f"batches {tickets} are in flight; {done} is done, {following} is next")


def _joined(runs: list[Int32]) -> Int32:
    return np.concatenate(runs) if runs else _NO_PAGES


_NOTHING = (_NO_PAGES, _NO_PAGES)
