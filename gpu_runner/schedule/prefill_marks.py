"""When each row's chunks of prefill were planned and when it was retracted, on the way out with its next token."""

from __future__ import annotations

from array import array

import numpy as np

from asyncengine.wire.frames import MARK_RETRACTED, MARK_TOKEN, RowMarks
from gpu_runner.schedule.plan import Bool, Int32

MAX_MARKS = 128
"""Chunks of a row between two tokens that have a mark of their own; further ones are added to the last."""


class PrefillMarks:
    """By slot. Only rows that prefill or are retracted get marks, so a step in which all rows decode knows of none.
    `waiting`: rows that have some, [num_slots]."""

    def __init__(self, num_slots: int) -> None:
        self.waiting: Bool = np.zeros(num_slots, np.bool_)
        self._marks: dict[int, list[int]] = {}

    def chunk(self, slot: int, tokens: int, now: int) -> None:
        marks = self._marks.get(slot)
        if marks is None:
            self._begin(slot, now, tokens)
        elif len(marks) >= 2 * MAX_MARKS and marks[-1] > 0:
            marks[-1] += tokens
        else:
            marks += (now, tokens)

    def retracted(self, slot: int, now: int) -> None:
        if (marks := self._marks.get(slot)) is None:
            self._begin(slot, now, MARK_RETRACTED)
        else:
            marks += (now, MARK_RETRACTED)

    def take(self, slots: Int32, now: int) -> tuple[RowMarks, ...]:
        """What these rows, which have marks and a token since `now`, have not told yet."""
        self.waiting[slots] = False
        taken = []
        for slot in slots.tolist():
            marks = array("q", (*self._marks.pop(slot), now, MARK_TOKEN))
            taken.append(RowMarks(slot, marks.tobytes()))
        return tuple(taken)

    def forget(self, slot: int) -> None:
        """The row has ended."""
        self.waiting[slot] = False
        self._marks.pop(slot, None)

    def _begin(self, slot: int, now: int, mark: int) -> None:
        self.waiting[slot] = True
        self._marks[slot] = [now, mark]
