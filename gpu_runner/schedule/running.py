"""The rows that run, by what they do next."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncengine.config import PAGE_SIZE
from asyncengine.sampling import INT32_MAX
from gpu_runner.schedule.plan import Bool, Int32
from gpu_runner.schedule.slots import Slots, State

STEPS_BETWEEN_STORES = 16
"""A row's tokens lie far from the next row's, on another page of memory: as many as fill a cache line are written at
once."""
_NO_SLOTS: Int32 = np.empty(0, np.int32)
# numpy adds a scalar by making such an array of it first, which takes longer than the sum.
_ONE: Int32 = np.ones((), np.int32)
_ONE_CELL = np.ones((), np.intp)
_ONE.flags.writeable = _ONE_CELL.flags.writeable = False


class GrowingRows:
    """G rows that begin a page with the same token: while they decode, with each PAGE_SIZE-th one again."""

    __slots__ = ("cell", "index", "num_pages", "place", "slot")

    def __init__(self, slots: Slots, decoding: DecodeRows, place: NDArray[np.intp]) -> None:
        self.place = place  # [G], of these rows among those that decode; ascending
        self.slot: Int32 = decoding.slot[place]  # [G]
        self.index: NDArray[np.intp] = decoding.index[place]  # [G], the same
        self.num_pages: Int32 = slots.num_pages[self.index]  # [G], as of `Slots`
        self.cell: NDArray[np.intp] = self.index * slots.pages_per_seq + self.num_pages  # [G], of the next page
        self.slot.flags.writeable = False

    def grown(self) -> None:
        """Each has one page more; new arrays, for plans keep the old ones."""
        self.num_pages = np.add(self.num_pages, _ONE)
        np.add(self.cell, _ONE_CELL, out=self.cell)


class DecodeRows:
    """R slots that decode, in order of admission, what stays the same of them for as long as they do, and how far they
    are, so that a step looks nothing up by slot. `Slots` learns of it with `store`, many steps at once.

    When a row joins or leaves, a new one is made. So the plans of a steady state share these arrays, which are
    read-only, and who works through plans may take the same `slot` array for the same rows.
    """

    __slots__ = (
        *("_growing", "_slots", "_step", "_tokens", "any_constrained", "any_interactive", "gen", "index", "length"),
        *("limit", "samples", "slot", "start", "steps_before_last"),
    )

    def __init__(self, slots: Slots, slot: Int32) -> None:
        self._slots = slots
        self._tokens: list[Int32] = []  # [R] each, sampled by steps one after the other
        self._step = 0  # of the page: how often they advanced, modulo PAGE_SIZE
        self._growing: list[GrowingRows | None] = [None] * PAGE_SIZE  # by `_step`; None = not asked for yet
        self.slot = slot  # [R]
        self.index: NDArray[np.intp] = slot.astype(
            np.intp
        )  # [R], the same: numpy looks int32 indices up three times slower
        self.gen: Int32 = slots.gen[self.index]  # [R]
        self.limit: Int32 = slots.limit[self.index]  # [R]
        self.length: Int32 = slots.ones[: len(slot)]  # [R], tokens of each row in a step
        self.samples: Bool = slots.trues[: len(slot)]  # [R]
        self.any_constrained = bool(slots.num_constrained and slots.constrained[self.index].any())
        self.any_interactive = bool(len(slot)) and not (slots.num_background and slots.background[self.index].all())
        self.start: Int32 = slots.computed[self.index]  # [R], positions of the next step's tokens
        left = self.limit - self.start
        least = left.item(left.argmin()) if len(slot) else INT32_MAX
        self.steps_before_last = least - 2  # steps until one in which a row samples its last token
        for array in (self.slot, self.index, self.gen, self.limit):
            array.flags.writeable = False

    def __len__(self) -> int:
        return len(self.slot)

    @property
    def growing(self) -> GrowingRows:
        """Those that need a page for their next token: a row's pages hold what is computed, no more."""
        growing = self._growing[self._step]
        if growing is None:
            place = ((self.start & (PAGE_SIZE - 1)) == 0).nonzero()[0]
            growing = self._growing[self._step] = GrowingRows(self._slots, self, place)
        return growing

    def advance(self) -> None:
        """Each row is one token further; `start` is a new array, for plans keep the old one."""
        self.start = np.add(self.start, _ONE)
        self._step = (self._step + 1) % PAGE_SIZE
        self.steps_before_last -= 1

    def sampled(self, tokens: Int32) -> None:
        """A step of these rows is done. tokens: [R], which become the rows' known ones."""
        self._tokens.append(tokens)
        if len(self._tokens) == STEPS_BETWEEN_STORES:
            self.store()

    def store(self) -> None:
        """Write to `Slots` what it does not know yet."""
        slots, index = self._slots, self.index
        slots.computed[index] = self.start
        if self._tokens:
            known = slots.known[index]
            cells = index * slots.max_model_len + known
            slots.token_cells[cells[:, None] + np.arange(len(self._tokens))] = np.array(self._tokens).T
            slots.known[index] = known + len(self._tokens)
            self._tokens.clear()

    def check_integrity(self) -> None:
        slots, index = self._slots, self.index
        assert len(np.unique(self.start - slots.computed[index])) <= 1, "rows advanced, but not all of them"
        assert np.all(slots.known[index] + len(self._tokens) <= self.start + 1)
        assert np.all(-(-self.start // PAGE_SIZE) == slots.num_pages[index]), (
            "a row's pages are not those of its tokens"
        )
        assert not len(self) or self.steps_before_last == (self.limit - self.start).min() - 2
        for step, growing in enumerate(self._growing):
            if growing is not None:
                begins_page = (self.start + (step - self._step)) % PAGE_SIZE == 0
                assert growing.place.tolist() == np.flatnonzero(begins_page).tolist(), "other rows begin a page"
                assert np.array_equal(growing.slot, self.slot[growing.place])
                assert np.array_equal(growing.index, growing.slot)
                assert np.array_equal(growing.num_pages, slots.num_pages[growing.index])
                assert np.array_equal(growing.cell, growing.index * slots.pages_per_seq + growing.num_pages)

    @property
    def known(self) -> Int32:
        """[R], as of `Slots`, but never behind."""
        known: Int32 = self._slots.known[self.index] + np.int32(len(self._tokens))
        return known

    @property
    def ends(self) -> Bool | None:
        """Whose last token the last `advance` planned: [R], None if nobody's."""
        return None if self.steps_before_last >= 0 else self.start + _ONE >= self.limit


class Running:
    """Rows that decode, prefill (slots in the order in which they get chunks), load, are held or drain; `Slots.state`
    says the same of each slot.

    A constrained row that sampled is held until its mask arrives, so that it is in one step at a time:

        step           N            N + 1        N + 2
        held           R                         R ...
        row R          samples      (in flight)  samples with the mask that N's token led to
        other rows     sample       sample       sample
    """

    def __init__(self, slots: Slots) -> None:
        self.prefill: list[int] = []
        self.loading: list[int] = []
        self._slots = slots
        self._decode: Int32 = _NO_SLOTS
        self._decode_rows: DecodeRows | None = DecodeRows(slots, _NO_SLOTS)  # of `_decode`; None = to be made
        self._held: set[int] = set()
        self._num_draining = 0
        self._last_step = 0

    def __len__(self) -> int:
        return self.num_active + self._num_draining

    @property
    def num_active(self) -> int:
        """Rows that later steps will hold: all but the draining."""
        return len(self._decode) + len(self.prefill) + len(self._held) + len(self.loading)

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def holds_interactive(self) -> bool:
        return bool(self._held) and not self._slots.background[list(self._held)].all()

    @property
    def decode(self) -> DecodeRows:
        if self._decode_rows is None:
            self._decode_rows = DecodeRows(self._slots, self._decode)
        return self._decode_rows

    @property
    def decoding(self) -> Int32:
        """Slots of the rows that decode; what `Slots` knows of them may be behind."""
        return self._decode

    def unchanged(self, slot: Int32) -> DecodeRows | None:
        """The rows that decode, if they are still those of the plan with this `row_slot`, none more, none less, and
        none is constrained."""
        rows = self._decode_rows if slot is self._decode else None
        return None if rows is None or rows.any_constrained else rows

    def store(self) -> None:
        """Let `Slots` know how far the decoding rows are; it is behind until one joins or leaves."""
        if self._decode_rows is not None:
            self._decode_rows.store()

    def leave(self, slot: int) -> None:
        """Take the row off the list of its state, which is about to change; `Slots` knows all of the row then."""
        state = self._slots.state[slot]
        if state == State.DECODE:
            self._slots.last_step[slot] = self._last_step
            self._set_decode(self._decode[self._decode != slot])
        elif state == State.PREFILL:
            self.prefill.remove(slot)
        elif state == State.LOADING:
            self.loading.remove(slot)
        elif state == State.HELD:
            self._held.remove(slot)
        elif state == State.DRAINING:
            self._num_draining -= 1

    def loaded(self, ticket: int) -> list[int]:
        """Copies up to `ticket` are done: returns the rows that waited for them, for the caller to put into the order
        of those that prefill."""
        slots = self._slots
        done = [slot for slot in self.loading if slots.load_ticket[slot] <= ticket]
        if done:
            slots.state[done] = State.PREFILL
            self.loading = [slot for slot in self.loading if slots.load_ticket[slot] > ticket]
        return done

    def release(self, slots: Int32) -> None:
        """The masks of these held rows are there: they decode on, in order of admission."""
        self._slots.state[slots] = State.DECODE
        self._held.difference_update(slots.tolist())
        rows = np.concatenate([self._decode, slots])
        self._set_decode(rows[np.argsort(self._slots.admitted[rows])])

    def advance(self, step: int, decoding: DecodeRows, prefilled: list[int]) -> None:
        """Account for a planned step: rows drain if the token they sample in it is their last, else decode next.

        decoding: the step's decode rows, which have advanced. prefilled: slots of the prefill rows that sample in it.
        """
        slots = self._slots
        self._last_step = step
        if decoding is not self._decode_rows:  # some rows skipped the step
            self._decode_rows = None
            decoding.store()
        if (last := decoding.ends) is not None:
            draining = decoding.index[last]
            slots.last_step[draining] = step
            slots.state[draining] = State.DRAINING
            self._num_draining += len(draining)
            self._set_decode(self._decode[slots.state[self._decode] == State.DECODE])
        if prefilled:
            self._end_prefill(prefilled)
        if slots.num_constrained and (decoding.any_constrained or slots.constrained[prefilled].any()):
            self._hold(decoding, prefilled)

    def _end_prefill(self, prefilled: list[int]) -> None:
        slots, going_on = self._slots, []
        for slot in prefilled:
            if slots.computed.item(slot) + 1 >= slots.limit.item(slot):
                slots.state[slot] = State.DRAINING
                self._num_draining += 1
            else:
                slots.state[slot] = State.DECODE
                going_on.append(slot)
        self.prefill = [slot for slot in self.prefill if slots.state.item(slot) == State.PREFILL]
        if going_on:
            self._set_decode(np.concatenate([self._decode, np.array(going_on, np.int32)]))

    def _hold(self, decoding: DecodeRows, prefilled: list[int]) -> None:
        """Account for the masks that the step uses up: some of its rows are constrained."""
        slots = self._slots
        sampling = np.concatenate([decoding.slot, np.array(prefilled, np.int32)])
        constrained = sampling[slots.constrained[sampling]]
        slots.mask_ready[constrained] = False
        held = constrained[slots.state[constrained] == State.DECODE]
        slots.last_step[held] = self._last_step
        slots.state[held] = State.HELD
        self._held.update(held.tolist())
        self._set_decode(self._decode[slots.state[self._decode] == State.DECODE])

    @property
    def active(self) -> Int32:
        """Slots of the rows that later steps will hold, in no order."""
        return np.concatenate([self._decode, np.array([*self.prefill, *self.loading, *self._held], np.int32)])

    def check_integrity(self) -> None:
        state = self._slots.state
        decode = self.decode
        assert sorted(self._decode.tolist()) == np.flatnonzero(state == State.DECODE).tolist()
        assert sorted(self.prefill) == np.flatnonzero(state == State.PREFILL).tolist()
        assert sorted(self.loading) == np.flatnonzero(state == State.LOADING).tolist()
        assert sorted(self._held) == np.flatnonzero(state == State.HELD).tolist()
        assert self._slots.constrained[list(self._held)].all()
        assert not self._slots.mask_ready[list(self._held)].any()
        decoding = self._decode[self._slots.constrained[self._decode]]
        assert self._slots.mask_ready[decoding].all(), "a constrained row decodes without a mask"
        assert self._num_draining == np.count_nonzero(state == State.DRAINING)
        assert decode.slot is self._decode
        assert np.array_equal(decode.gen, self._slots.gen[self._decode])
        assert np.array_equal(decode.limit, self._slots.limit[self._decode])
        decode.check_integrity()

    def _set_decode(self, slots: Int32) -> None:
        self.store()
        self._decode = slots
        self._decode_rows = None  # made when it is asked for: many rows may leave in one step
