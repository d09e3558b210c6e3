"""Rows and their memory: how a request takes a slot and pages, shares what it computed, and gives everything back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from asyncengine.config import PAGE_SIZE
from gpu_runner.kvcache.pages import PagePool, require
from gpu_runner.kvcache.pins import Pins
from gpu_runner.kvcache.radix import Match, Node, RadixTree
from gpu_runner.kvcache.sessions import Sessions
from gpu_runner.schedule.host_tier import HostTier
from gpu_runner.schedule.plan import Int32
from gpu_runner.schedule.request import Request
from gpu_runner.schedule.running import DecodeRows
from gpu_runner.schedule.slots import Slots, State

EVICT_AHEAD_PAGES = 128
EVICT_AHEAD_DIVISOR = 128
"""Pages that are evicted beyond what is needed now, and at most which part of all: in a full cache every row that joins
or grows has to evict, and many pages at once cost hardly more than one."""


class Rows:
    """Slots, page pool and prefix tree, and the tier in host memory if there is one, changed together.

    A row holds a lock on the tree node that ends its cached prefix, which keeps the tree's pages, and one reference on
    each of its pages behind that:

        pages of the row    0 .. num_locked | num_locked .. num_pages
        referenced by       the tree        | the row; maybe the tree too, behind another row's pages for equal tokens

    Whatever it gives up carries the row's last step as its epoch: pages become free when that step is done on the
    device.
    `caching` False: what a row computed is forgotten when it ends (while it runs, its namespace still shares it), and
    no session is kept.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_model_len: int,
        num_pages: int,
        caching: bool,
        session_pin_share: float,
        host_pages: int,
        page_load_ns: int,
        prefill_ns: Callable[[int, int], float],
        clock: Callable[[], int],
    ) -> None:
        """session_pin_share: as in `EngineConfig`. host_pages, page_load_ns, prefill_ns: as of `HostTier`. clock: in
        ns."""
        self.slots = Slots(num_slots, max_model_len)
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(self.pool)
        self.tier = (
            HostTier(
                self.slots,
                self.pool,
                self.tree,
                caching=caching,
                host_pages=host_pages,
                page_load_ns=page_load_ns,
                prefill_ns=prefill_ns,
            )
            if host_pages
            else None
        )
        self.sessions = Sessions(
            Pins(self.tree, num_pages=num_pages - 1, tenant_share=session_pin_share),
            host_pins=Pins(self.tier.tree, num_pages=host_pages, tenant_share=session_pin_share) if self.tier else None,
            clock=clock,
        )
        self.caching = caching
        self._evict_ahead = min(EVICT_AHEAD_PAGES, num_pages // EVICT_AHEAD_DIVISOR)

    @property
    def usable_tokens(self) -> int:
        """Tokens the whole KV cache holds."""
        return (self.pool.num_pages - 1) * PAGE_SIZE

    def missing_pages(self, count: int) -> int:
        """How many of `count` pages cannot be had now, after evicting cached prefixes as far as needed, and a few pages
        more: the next ones to ask then find some."""
        if count > self.pool.num_free:
            self.sessions.expire()
            self.tree.evict(count - self.pool.num_free + self._evict_ahead)
            if count > self.pool.num_free:
                self.unpin_for(count, None, copied_only=True)
                self.tree.evict(count - self.pool.num_free)
        return max(0, count - self.pool.num_free)

    def has_pages(self, count: int) -> bool:
        """Whether there would be so many if all cached prefixes were evicted."""
        return count <= self.pool.num_free + self.tree.num_evictable

    def has_room(self, num_tokens: int, *, watermark: int) -> bool:
        """Whether a request of `num_tokens` would find pages, though it found none of its prefix in the cache."""
        return self.has_pages(-(-num_tokens // PAGE_SIZE) + watermark)

    def unpin_for(self, count: int, tenant: str | None, *, copied_only: bool = False) -> None:
        """Have sessions give up pins on the device until `tenant` can have `count` pages once no step is in flight.
        copied_only: only what is pinned in host memory as well."""
        self.sessions.give_way(
            tenant,
            lambda: count <= self.pool.num_free + self.pool.num_deferred + self.tree.num_evictable,
            copied_only=copied_only,
        )

    def start(self, request: Request, *, watermark: int, alone: bool) -> bool:
        """Give a waiting request a slot and pages for all its known tokens, the cached prefix's among them.
        What is cached in host memory only is loaded, where that is quicker than to compute it.

        False when it has to wait: no slot, fewer than `watermark` pages would be left, its own last step is still on
        the device, or it could lose its pages again though it must not. alone: nothing runs, so that what it waits for
        may be pinned, in host memory or not.
        """
        slots = self.slots
        retracted = request.slot >= 0
        if retracted and slots.last_step[request.slot] > self.pool.completed_epoch:
            return False
        if not retracted and not slots.num_free:
            return False
        if request.keeps_pages and not self._lasts(request):
            return False
        tree, pool = self.tree, self.pool
        tokens = self._tokens(request)
        reusable = tokens[: self._reusable(request, len(tokens))]
        match = tree.match(request.namespace, reusable)
        cached = len(match.pages)
        needed = -(-len(tokens) // PAGE_SIZE) - cached
        tree.lock(match.node)
        if not self.has_pages(needed + watermark):
            self.sessions.expire()
            self.unpin_for(needed + watermark, request.terms.tenant, copied_only=not alone)
        fits = self.has_pages(needed + watermark)
        if not fits or (needed > pool.num_free and self.missing_pages(needed)):
            tree.unlock(match.node, pool.completed_epoch)
            return False
        slot = request.slot if retracted else slots.take(request)
        pages = pool.allocate(needed)
        if cached:
            pages = np.concatenate((match.pages, pages))
        slots.page_table[slot, : len(pages)] = pages
        slots.num_pages[slot] = len(pages)
        slots.num_locked[slot] = cached
        slots.node[slot] = match.node
        ticket = 0
        if self.tier is not None:
            found = self.tier.find(request.namespace, reusable, cached)  # after what may change that tree
            if found is not None:
                self._load(slot, found, cached)
                cached += len(found.pages)
            self.tier.begins(slot)
            ticket = self.tier.loaded_by(pages[:cached])
        slots.admit(slot, request, cached * PAGE_SIZE)
        if ticket:
            slots.load_ticket[slot] = ticket
            slots.state[slot] = State.LOADING
        if not retracted:
            slots.cached_tokens[slot] = min(cached * PAGE_SIZE, request.prompt_len)
            if request.terms.session:
                compared = self.sessions.compare(request.terms, request.namespace, request.prompt)
                request.session_tokens, request.session_common = compared
        return True

    def lacking_pages(self, request: Request, *, watermark: int) -> int:
        """How many pages short of its start a waiting request is."""
        tokens = self._tokens(request)
        match = self.tree.match(request.namespace, tokens[: self._reusable(request, len(tokens))])
        self.tree.lock(match.node)  # what it would hold cannot be evicted for it
        available = self.pool.num_free + self.tree.num_evictable
        self.tree.unlock(match.node, self.pool.completed_epoch)
        return -(-len(tokens) // PAGE_SIZE) - len(match.pages) + watermark - available

    def _tokens(self, request: Request) -> Int32:
        slots, slot = self.slots, request.slot
        return slots.tokens[slot, : slots.known[slot]] if slot >= 0 else request.tokens

    def _lasts(self, request: Request) -> bool:
        """Whether the rows that keep their pages, and this one, have enough of them to their ends: all others give way
        to them, so that none of them ever has to give up its own."""
        slots = self.slots
        kept = slots.limit[slots.keeps_pages & (slots.num_pages > 0)]
        pages = int((-(-kept // PAGE_SIZE)).sum()) + -(-request.limit // PAGE_SIZE)
        return pages < self.pool.num_pages or not len(kept)

    def _load(self, slot: int, found: Match, cached: int) -> None:
        """Have the row's pages behind the `cached` first ones filled with what was found in host memory. They are in
        the tree from now on."""
        assert self.tier is not None
        end = cached + len(found.pages)
        node = self._extend(slot, end)
        assert node is not None, "the device had not all that it has of the prefix"
        self.tier.load(found, self.slots.page_table[slot, cached:end].copy(), node)

    def _reusable(self, request: Request, num_tokens: int) -> int:
        """How many of its tokens need not be computed if they are cached: the last must be, to sample after it, and
        those whose next one is yet to be scored."""
        slots, slot = self.slots, request.slot
        if not request.scores_prompt or (slot >= 0 and slots.scored[slot] == slots.score_end[slot]):
            return num_tokens - 1
        return int(slots.scored[slot]) if slot >= 0 else 0

    def grow(self, decoding: DecodeRows, place: NDArray[np.intp]) -> tuple[Int32, Int32, Int32]:
        """Give each of the rows at these places, [G] ascending, one more page, which must be free. Returns their slots,
        and of the new pages the places in the page tables and the ids, [G] each."""
        slots, index = self.slots, decoding.index[place]
        page_index = slots.num_pages[index]
        pages = self.pool.allocate(len(place))
        slots.page_cells[index * slots.pages_per_seq + page_index] = pages
        slots.num_pages[index] = page_index + np.int32(1)
        decoding.grown(place)
        return decoding.slot[place], page_index, pages

    def share(self, slot: int) -> None:
        """Put the row's computed full pages into the prefix tree, and hold them there.

        Where the tree has pages of another row for the same tokens, those are not held: a row that holds more than the
        pages of its own tokens might never have room for all of them.
        """
        slots = self.slots
        # While a row decodes, the K/V of its newest token may not be there yet (or never, if it has just ended).
        decodes = slots.state.item(slot) != State.PREFILL
        full = min(slots.computed.item(slot), slots.known.item(slot) - decodes) // PAGE_SIZE
        if full <= slots.num_locked.item(slot) or self._extend(slot, full) is not None:
            return
        request = slots.request[slot]
        assert request is not None
        tokens = slots.tokens[slot, : full * PAGE_SIZE]
        self.tree.insert(request.namespace, tokens, slots.page_table[slot, :full])

    def _extend(self, slot: int, end: int) -> Node | None:
        """Have the tree keep the row's first `end` pages, more than it does. None if it has others for their tokens."""
        slots = self.slots
        node, locked = slots.node[slot], slots.num_locked.item(slot)
        assert node is not None
        tokens = slots.tokens[slot, locked * PAGE_SIZE : end * PAGE_SIZE]
        longer = self.tree.extend(node, tokens, slots.page_table[slot, locked:end])
        if longer is not None:
            slots.node[slot] = longer
            slots.num_locked[slot] = end
        return longer

    def give_up_pages(self, slot: int) -> Node:
        """Drop the row's pages; what `share` put into the tree stays there until it is evicted. Returns its end."""
        slots = self.slots
        node = slots.node[slot]
        assert node is not None
        epoch = slots.last_step.item(slot)
        node = self.tree.unlock(node, epoch)
        self.pool.decref(slots.own_pages(slot), epoch)
        slots.node[slot] = None
        slots.num_pages[slot] = slots.num_locked[slot] = slots.computed[slot] = 0
        return node

    def retract(self, slot: int) -> Request:
        """Take the row's pages away but not its slot; its request can be started again and continues exactly."""
        request = self.slots.request[slot]
        assert request is not None
        self.share(slot)
        node = self.give_up_pages(slot)
        if self.tier is not None:
            self.tier.ended(node)
        self.slots.state[slot] = State.RETRACTED
        return request

    def end(self, slot: int) -> None:
        """The row is over: cache what it computed, for its session if it has one, and give everything back."""
        slots = self.slots
        request = slots.request[slot]
        assert request is not None
        has_begun = slots.state[slot] == State.RETRACTED or slots.computed[slot] > 0
        node = None
        if slots.state[slot] != State.RETRACTED:
            if self.caching:
                self.share(slot)
            node = self.give_up_pages(slot)
        if not self.caching:
            self.tree.drop_namespace(request.namespace)
            if self.tier is not None:
                self.tier.tree.drop_namespace(request.namespace)
        elif request.terms.session and has_begun:
            self._keep(request, slots.tokens[slot, : slots.known[slot]])
        elif node is not None and self.tier is not None:
            self.tier.ended(node)
        slots.release(slot)

    def check_at_rest(self) -> None:
        """Whether every page is free or cached, once, while no row has any, no step is in flight and nothing is copied.
        Raises `IntegrityError`. Takes a moment: O(pages + nodes)."""
        self.tree.check_at_rest()
        if self.tier is not None:
            self.tier.tree.check_at_rest()

    def start_over(self) -> None:
        """Forget all that is cached, on the device and in host memory, and every session. As `check_at_rest`, only
        while nothing runs."""
        self.sessions.start_over()
        self.tree.start_over()
        self.pool.start_over()
        if self.tier is not None:
            self.tier.start_over()

    def _keep(self, request: Request, tokens: Int32) -> None:
        """For the request's session; what of it is not in host memory is to be pinned there once it is."""
        terms = request.terms
        self.sessions.keep(terms, request.namespace, tokens)
        if self.tier is not None:
            node = self.tree.match(request.namespace, tokens).node
            self.tier.ended(node, partial(self.sessions.copied, terms.tenant, terms.session))

    def check_integrity(self) -> None:
        self.slots.check_integrity()
        self.tree.check_integrity()
        self.sessions.check_integrity()
        held = []
        for slot, node in enumerate(self.slots.node):
            held.append(self.slots.own_pages(slot))
            if node is not None:
                _, kept = self.tree.content(node)
                locked = self.slots.pages(slot)[: self.slots.num_locked[slot]]
                require(np.array_equal(kept, locked), f"the pages that slot {slot} has locked are not its first ones")
                require(node.lock_count > 0, f"slot {slot} has not locked its prefix")
        if self.tier is not None:
            self.tier.check_integrity()
            held.append(self.tier.pages_held())
            for slot in np.flatnonzero(self.slots.state > State.FREE).tolist():
                computed = self.slots.pages(slot)[: self.slots.computed[slot] // PAGE_SIZE]
                waits = self.slots.state[slot] == State.LOADING
                assert waits or not self.tier.loaded_by(computed), "a row runs on pages that are being loaded"
                assert not waits or self.slots.load_ticket[slot] > self.tier.done_ticket, "a row waits for nothing"
        self.pool.check_integrity(np.concatenate([*held, self.tree.pages_held()]))
