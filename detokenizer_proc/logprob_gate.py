"""Which of a row's log-probabilities are shown, and when: those of tokens whose text is.

Each token starts at an offset in the row's text: the number of characters complete before it. A token that only adds
bytes to an unfinished character, or no text, starts where the next character will. The rule:

- a token's entry leaves with the delta whose text first reaches beyond the token's start;
- when a row ends, the entries still held leave with its last delta;
- unless it ends with a stop string: then those of tokens that start at or beyond the end of the shown text are dropped.
  That end is the beginning of the match, or its end where the stop string is part of the text;
- the token that ends a row (end of sequence or a stop token) has an entry only where its text is shown on request.

So the entries belong to the row's first tokens, without a gap, and do not depend on how frames or deltas merged.
"""

from __future__ import annotations

from collections import deque

from detokenizer_proc.deltas import PendingDelta
from detokenizer_proc.logprob_columns import Entry, ShownLogprobs
from detokenizer_proc.stop_strings import StopSearch


class LogprobGate:
    """Takes the place of a row's `StopSearch`, and has one where the row has stop strings.

    stop "END"   token 1 "a"       token 2 " EN"              token 3 "D" | "d!"
    shown        "a" and entry 1   " " and entry 2, as the    stop: entry 3 is dropped | "ENd!" and entry 3
                                   token starts before "EN"
    """

    __slots__ = ("_delta", "_held", "_pushed_chars", "_search", "_shown_chars", "_staged")

    def __init__(self, search: StopSearch | None, delta: PendingDelta) -> None:
        """delta: takes the entries that are shown."""
        self._search = search
        self._delta = delta
        self._staged: Entry | None = None
        self._held: deque[tuple[int, Entry]] = deque()  # with the offset where its token starts, ascending
        self._pushed_chars = 0
        self._shown_chars = 0

    @property
    def hit(self) -> int:
        """As `StopSearch.hit`."""
        return -1 if self._search is None else self._search.hit

    def stage(self, entry: Entry) -> None:
        """The entry of the token whose text is pushed next."""
        self._staged = entry

    def unstage(self) -> None:
        """That token's text is not shown after all."""
        self._staged = None

    def push(self, text: str) -> str:
        """As `StopSearch.push`."""
        if self._staged is not None:
            self._held.append((self._pushed_chars, self._staged))
            self._staged = None
        self._pushed_chars += len(text)
        shown = text if self._search is None else self._search.push(text)
        self._shown_chars += len(shown)
        while self._held and self._held[0][0] < self._shown_chars:
            self._show(*self._held.popleft())
        if self.hit >= 0:
            self._held.clear()
        return shown

    def flush(self) -> str:
        """As `StopSearch.flush`."""
        while self._held:
            self._show(*self._held.popleft())
        return "" if self._search is None else self._search.flush()

    def _show(self, text_offset: int, entry: Entry) -> None:
        delta = self._delta
        if delta.logprobs is None:
            delta.logprobs = ShownLogprobs()
        delta.logprobs.add(text_offset, entry)
