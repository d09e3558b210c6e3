"""When what happened to one choice of a request, as the processes of the ring have stamped it."""

from __future__ import annotations

from itertools import pairwise

import msgspec

from asyncengine.wire.frames import MARK_RETRACTED


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """`tokens` of a choice were prefilled; end: the next of them were planned, or the choice had its token."""

    begin: int
    end: int
    tokens: int


class Preemption(msgspec.Struct, frozen=True, gc=False):
    """A choice lost its pages to others; end: the first chunk of what it computes again was planned."""

    begin: int
    end: int


class Timeline(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """All in ns of CLOCK_MONOTONIC, one clock for all processes of a machine; 0 = it did not come to that.

        arrived   submitted to the engine                        seen      its first delta is in this process
        encoded   left the tokenizer for gpu_runner              finished  so is its last
        queued    gpu_runner took it in                          started   gpu_runner first planned it
        computed  gpu_runner had its first token

    Nearly in this order: arrived, encoded, queued, started, computed, seen, finished. `encoded` and `queued` are
    stamped by two processes within microseconds, and what is told last may be missing at a quick end.
    marks: int64 [M, 2], as in `wire.frames.RowMarks`.
    """

    arrived: int
    encoded: int
    queued: int
    started: int
    computed: int
    seen: int
    finished: int
    marks: bytes = b""

    @property
    def chunks(self) -> list[Chunk]:
        """All that was prefilled, in order; behind a preemption that is what the choice had lost."""
        return [Chunk(begin, end, tokens) for (begin, tokens), (end, _) in pairwise(self._pairs()) if tokens > 0]

    @property
    def preemptions(self) -> list[Preemption]:
        """Those after which the choice has had a token."""
        preemptions, begin = [], 0
        for at, mark in self._pairs():
            if mark == MARK_RETRACTED:
                begin = at
            elif mark > 0 and begin:
                preemptions.append(Preemption(begin, at))
                begin = 0
        return preemptions

    def _pairs(self) -> list[tuple[int, int]]:
        marks = memoryview(self.marks).cast("q").tolist()
        return list(zip(marks[::2], marks[1::2], strict=True))
