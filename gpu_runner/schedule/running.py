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
_ONE: Int32 = np.array(1, np.int32)
_PAGE: Int32 = np.array(PAGE_SIZE, np.int32)
_ONE.flags.writeable = _PAGE.flags.writeable = False


class DecodeRows:
    """R slots that decode, in order of admission, what stays the same of them for as long as they do, and how far they
    are, so that a step looks nothing up by slot. `Slots` learns of it with `store`, many steps at once.

    When a row joins or leaves, a new one is made. So the plans of a steady state share these arrays, which are
    read-only, and who works through plans may take the same `slot` array for the same rows.
    """

    __slots__ = (
        *("_page_end", "_slots", "_tokens", "any_constrained", "any_interactive", "gen", "index", "length", "limit"),
        *("samples", "slot", "start", "steps_before_growth", "steps_before_last"),
    )

    def __init__(self, slots: Slots, slot: Int32) -> None:
        self._slots = slots
        self._tokens: list[Int32] = []  # [R] each, sampled by steps one after the other
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
        self._page_end: Int32 = slots.num_pages[self.index] * _PAGE  # [R], first position that none of its pages holds
        self.steps_before_growth = self._least_room()  # steps until one for which a row has no page
        for array in (self.slot, self.index, self.gen, self.limit):
            array.flags.writeable = False

    def __len__(self) -> int:
        return len(self.slot)

    def short_of_pages(self, steps: int) -> NDArray[np.intp]:
        """Which rows, ascending, need another page to be in all of the next `steps`, PAGE_SIZE at most, or in those
        until they end."""
        last = self.limit - _ONE  # where a row's last token will be, which no step computes
        short: Bool = self._page_end < np.minimum(self.start + np.int32(steps), last)
        return short.nonzero()[0]

    def grown(self, place: NDArray[np.intp]) -> None:
        """These of the rows, each named once, have a page more; `Slots` knows."""
        self._page_end[place] += _PAGE
        self.steps_before_growth = self._least_room()

    def _least_room(self) -> int:
        """The fewest tokens that a row has room for. One that ends sooner does so with room left."""
        room = self._page_end - self.start
        return int(room[room.argmin()]) if len(room) else INT32_MAX

    def advance(self) -> None:
        """Each row is one token further; `start` is a new array, for plans keep the old one."""
        self.start = np.add(self.start, _ONE)
        self.steps_before_growth -= 1
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
            known, count = slots.known[index], len(self._tokens)
            slots.runs_of_tokens(count)[index * slots.max_model_len + known] = np.array(self._tokens).T
            slots.known[index] = known + count
            self._tokens.clear()

    def check_integrity(self) -> None:
        slots, index = self._slots, self.index
        assert len(np.unique(self.start - slots.computed[index])) <= 1, "rows advanced, but not all of them"
        assert np.all(slots.known[index] + len(self._tokens) <= self.start + 1)
        ahead = slots.num_pages[index] - -(-self.start // PAGE_SIZE)
        assert np.all((ahead == 0) | (ahead == 1)), "a row's pages are not those of its tokens, nor one more"
        assert np.all(slots.num_pages[index] <= -(-(self.limit - 1) // PAGE_SIZE)), "a row has a page it will not need"
        assert np.array_equal(self._page_end, slots.num_pages[index] * PAGE_SIZE)
        if len(self):
            assert self.steps_before_last == (self.limit - self.start).min() - 2
            assert self.steps_before_growth == (self._page_end - self.start).min()

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
