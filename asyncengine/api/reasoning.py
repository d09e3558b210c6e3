"""Tells a model's reasoning, which it writes between `<think>` and `</think>`, from the rest of its answer."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from asyncengine.api.markup import TagSearch, Words

THINK, THINK_END = "<think>", "</think>"


class ReasoningParser:
    """One answer's. Only the first block counts, and none behind the beginning of a tool call: what is between tags
    there is something that the answer speaks of. A block that is not closed lasts to the answer's end."""

    class _In(Enum):
        BEFORE = auto()
        THINKING = auto()
        AFTER = auto()

    def __init__(self, content: Words, rest: Callable[[str], None], engaged: Callable[[], bool]) -> None:
        """content: where the answer goes in the end. rest: takes what is no reasoning. engaged: whether a tool call has
        begun in what `rest` has been given."""
        self._content = content
        self._rest = rest
        self._engaged = engaged
        self._words = Words()
        self._words.border()
        self._in = self._In.BEFORE
        self._search = TagSearch(THINK)

    @property
    def over(self) -> bool:
        """No reasoning can come any more, and none is left to take."""
        return self._in is self._In.AFTER

    def push(self, text: str) -> None:
        if self._in is self._In.BEFORE:
            before, text = self._search.push(text)
            self._rest(before)
            if self._engaged():
                self._rest(self._search.found or self._search.flush())
                self._in = self._In.AFTER
            elif self._search.found:
                self._content.border()
                self._in, self._search = self._In.THINKING, TagSearch(THINK_END)
        if self._in is self._In.THINKING:
            thought, text = self._search.push(text)
            self._words.add(thought)
            if self._search.found:
                self._words.border()
                self._words.flush()
                self._in = self._In.AFTER
        if text:
            self._rest(text)

    def flush(self) -> None:
        if self._in is self._In.BEFORE:
            self._rest(self._search.flush())
        elif self._in is self._In.THINKING:
            self._words.add(self._search.flush())
            self._words.flush()

    def take(self) -> str:
        """Reasoning since the last call of this."""
        return self._words.take()
