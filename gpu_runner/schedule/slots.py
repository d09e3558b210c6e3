"""Everything the scheduler knows about rows, as arrays indexed by slot."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from asyncengine.config import PAGE_SIZE
from gpu_runner.kvcache.radix import Node
from gpu_runner.schedule.plan import Int32
from gpu_runner.schedule.request import Request


class State:
    """A slot's life, as plain integers, since numpy takes microseconds to compare with a member of an enumeration:
    FREE -> (LOADING ->) PREFILL -> DECODE -> DRAINING -> FREE.

    DRAINING: its last token is being computed, so no further step will hold it. RETRACTED: it lost its pages while it
    prefilled or decoded, and waits to prefill again. HELD: it decodes, but within a structure, and which tokens that
    allows next is not known yet: its last one is in flight, or the mask is being computed. LOADING: it has its pages,
    but the first of them, which count as computed, are still being copied from host memory.
    """

    FREE = 0
    PREFILL = 1
    DECODE = 2
    DRAINING = 3
    RETRACTED = 4
    HELD = 5
    LOADING = 6


class Slots:
    """Structure of arrays over `num_slots` rows.

    Token counts of a row (its sequence is prompt + output):
        prompt_len <= known      ids the host knows: prompt, output it came with and that of collected steps
        computed                 positions whose K/V the launched steps leave in the cache
        known - 1 <= computed    once decoding; computed runs ahead of known by the steps in flight

    Of rows that decode, `tokens`, `known`, `computed` and `last_step` are behind until `DecodeRows.store`, which is at
    the latest when one of them ends or another joins. `charged` may be ahead of `known` for as long.
    """

    def __init__(self, num_slots: int, max_model_len: int) -> None:
        self.num_slots = num_slots
        self.max_model_len = max_model_len
        self.pages_per_seq = -(-max_model_len // PAGE_SIZE)
        self.state = np.zeros(num_slots, np.uint8)
        self.gen: Int32 = np.zeros(num_slots, np.int32)
        self.prompt_len: Int32 = np.zeros(num_slots, np.int32)
        self.known: Int32 = np.zeros(num_slots, np.int32)
        self.computed: Int32 = np.zeros(num_slots, np.int32)
        self.limit: Int32 = np.zeros(num_slots, np.int32)
        self.cached_tokens: Int32 = np.zeros(num_slots, np.int32)
        self.score_end: Int32 = np.zeros(num_slots, np.int32)  # tokens of the prompt whose next one is scored
        self.scored: Int32 = np.zeros(num_slots, np.int32)  # how many of them steps up to now score
        self.num_pages: Int32 = np.zeros(num_slots, np.int32)
        self.num_locked: Int32 = np.zeros(num_slots, np.int32)  # of the row's pages, how many `node` keeps for it
        self.opened = np.zeros(num_slots, np.bool_)
        self.announced = np.zeros(num_slots, np.bool_)  # a plan has told the device of the row's parameters and pages
        self.constrained = np.zeros(num_slots, np.bool_)  # its text has a structure
        self.num_constrained = 0  # slots of such requests
        self.mask_ready = np.zeros(num_slots, np.bool_)  # of a constrained row: the mask of its next token is there
        self.priority: Int32 = np.zeros(num_slots, np.int32)
        self.background = np.zeros(num_slots, np.bool_)
        self.num_background = 0  # slots of such requests
        self.account: Int32 = np.zeros(num_slots, np.int32)  # its tenant's, in `Tenants`
        self.begun: Int32 = np.zeros(num_slots, np.int32)  # `charged` when it was admitted
        self.charged: Int32 = np.zeros(num_slots, np.int32)  # positions that its account knows of; see `Charges`
        self.keeps_place = np.zeros(num_slots, np.bool_)  # as in `Request`, since it was admitted
        self.keeps_pages = np.zeros(num_slots, np.bool_)
        self.admitted = np.zeros(num_slots, np.int64)  # order of (re-)admission
        self.last_step = np.zeros(num_slots, np.int64)  # the latest step that holds the row
        self.load_ticket = np.zeros(num_slots, np.int64)  # of the copies that a row in state LOADING waits for
        # Read-only, [num_slots]: what rows that decode have in common, so that nobody makes such arrays of their own.
        self.ones: Int32 = np.ones(num_slots, np.int32)
        self.trues = np.ones(num_slots, np.bool_)
        self.ones.flags.writeable = self.trues.flags.writeable = False
        # Virtual memory until used: a row costs what it holds, not max_model_len.
        self.tokens: Int32 = np.zeros((num_slots, max_model_len), np.int32)
        self.page_table: Int32 = np.zeros((num_slots, self.pages_per_seq), np.int32)
        # The same as one dimension: one index per cell is much quicker than two.
        self.token_cells: Int32 = self.tokens.reshape(-1)  # [slot * max_model_len + position]
        self.page_cells: Int32 = self.page_table.reshape(-1)  # [slot * pages_per_seq + page index]
        self.request: list[Request | None] = [None] * num_slots
        self.slot_of: dict[int, int] = {}  # by rid, of every request that holds one
        self.node: list[Node | None] = [None] * num_slots  # the locked radix node that ends the row's cached prefix
        self.latest_rid: list[int] | memoryview[int] = [-1] * num_slots  # as in `RowNotes`
        # A heap, of which the lowest is next: detokenizers have the slots that are congruent to their number, and so
        # have equally many rows soon after the load has changed.
        self._free = list(range(num_slots))
        self._admissions = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, request: Request) -> int:
        """Give a request that never ran here a slot and copy its tokens in."""
        slot = heappop(self._free)
        rid, background = request.rid, request.background
        prompt_len, num_tokens = request.prompt_len, len(request.tokens)
        request.slot = self.slot_of[rid] = slot
        self.latest_rid[slot] = rid
        self.request[slot] = request
        self.prompt_len[slot] = prompt_len
        self.known[slot] = num_tokens
        self.charged[slot] = num_tokens - 1 if num_tokens > prompt_len else 0
        self.tokens[slot, :num_tokens] = request.tokens
        self.limit[slot] = request.limit
        self.background[slot] = background
        self.num_background += background
        self.account[slot] = request.account
        self.cached_tokens[slot] = 0
        self.score_end[slot] = prompt_len - 1 if request.scores_prompt else 0
        self.scored[slot] = 0
        self.opened[slot] = False
        self.constrained[slot] = constrained = request.params.structured is not None
        self.num_constrained += constrained
        self.mask_ready[slot] = False
        return slot

    def admit(self, slot: int, request: Request, computed: int) -> None:
        """The row starts, for the first time or again, with `computed` of its tokens found in the cache."""
        self.state[slot] = State.PREFILL
        self.computed[slot] = computed
        self.begun[slot] = self.charged[slot] = max(self.charged.item(slot), computed)
        self.priority[slot] = request.priority
        self.keeps_place[slot] = request.keeps_place
        self.keeps_pages[slot] = request.keeps_pages
        self.announced[slot] = False
        self.admitted[slot] = self._admissions
        self._admissions += 1

    def release(self, slot: int) -> None:
        """Free the slot; its generation moves on, so whatever still arrives for the old one is recognised."""
        request = self.request[slot]
        assert request is not None
        del self.slot_of[request.rid]
        self.num_background -= request.background
        self.num_constrained -= request.params.structured is not None
        self.state[slot] = State.FREE
        self.gen[slot] += 1
        self.num_pages[slot] = self.num_locked[slot] = 0
        self.request[slot] = None
        self.node[slot] = None
        heappush(self._free, slot)

    def runs_of_tokens(self, length: int) -> Int32:
        """`token_cells` as all runs of `length` in it, by the cell that a run begins with: a view. To write runs takes
        half as long as to write their cells."""
        cells = self.token_cells
        return np.ndarray((len(cells) - length + 1, length), cells.dtype, cells, strides=2 * cells.strides)

    def pages(self, slot: int) -> NDArray[np.int32]:
        """The row's page ids in order, a view."""
        return self.page_table[slot, : self.num_pages[slot]]

    def own_pages(self, slot: int) -> NDArray[np.int32]:
        """Those behind what its lock keeps, a view."""
        return self.page_table[slot, self.num_locked[slot] : self.num_pages[slot]]

    def check_integrity(self) -> None:
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is on the free list twice"
        assert len(self.slot_of) == self.num_slots - len(free)
        for slot in range(self.num_slots):
            state = self.state[slot]
            assert (slot in free) == (state == State.FREE), f"slot {slot} is in state {state}"
            assert (self.request[slot] is None) == (state == State.FREE)
            if state == State.FREE:
                assert self.num_pages[slot] == self.num_locked[slot] == self.computed[slot] == 0
                continue
            request = self.request[slot]
            assert request is not None
            assert request.slot == slot == self.slot_of[request.rid]
            assert self.latest_rid[slot] == request.rid
            assert self.prompt_len[slot] == request.prompt_len
            assert request.prompt_len <= len(request.tokens) <= self.known[slot] <= self.limit[slot]
            assert self.scored[slot] <= self.score_end[slot] < self.prompt_len[slot]
            assert min(self.computed[slot], self.score_end[slot]) <= self.scored[slot], f"slot {slot} is not scored"
            assert np.array_equal(self.tokens[slot, : len(request.tokens)], request.tokens)
            assert self.computed[slot] <= self.num_pages[slot] * PAGE_SIZE, f"slot {slot} computed beyond its pages"
            assert self.background[slot] == request.background
            assert self.account[slot] == request.account
            if state == State.RETRACTED:
                assert self.num_pages[slot] == self.num_locked[slot] == self.computed[slot] == 0
            else:
                assert self.begun[slot] <= self.charged[slot]
            assert state == State.DECODE or self.charged[slot] <= self.known[slot]
        requests = [request for request in self.request if request is not None]
        assert self.num_background == sum(request.background for request in requests)
        assert self.num_constrained == sum(request.params.structured is not None for request in requests)
