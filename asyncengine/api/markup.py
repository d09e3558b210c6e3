"""Finding tags in text that arrives in pieces, and deciding to which part of an answer white space belongs."""

from __future__ import annotations

from collections.abc import Sequence

BLANK = " \t\r\n"


class TagSearch:
    """Looks for the first of `tags`, none of which is part of another. Holds back only what may become one."""

    __slots__ = ("_held", "_tags", "found")

    def __init__(self, *tags: str) -> None:
        self._tags = tags
        self._held = ""
        self.found = ""
        """The tag that the last `push` found, "" for none."""

    def push(self, text: str) -> tuple[str, str]:
        """What comes before a tag, and what follows it. Without a tag: what can be none, and ""."""
        text = self._held + text
        self._held = self.found = ""
        place = len(text)
        for tag in self._tags:
            at = text.find(tag)
            if 0 <= at < place:
                place, self.found = at, tag
        if self.found:
            return text[:place], text[place + len(self.found) :]
        cut = len(text) - held_back(text, self._tags)
        self._held = text[cut:]
        return text[:cut], ""

    def flush(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held


def held_back(text: str, tags: Sequence[str]) -> int:
    """The length of the longest end of `text` that a tag begins with."""
    for size in range(min(len(text), max(map(len, tags)) - 1), 0, -1):
        end = text[-size:]
        if any(tag.startswith(end) for tag in tags):
            return size
    return 0


class Words:
    """One part of an answer (its content, its reasoning), without the white space that only sets it off from markup.

    White space is held back until something follows it. Beside markup (`border`) it is dropped at either end of the
    part, and kept in the middle; elsewhere all of it is kept.
    """

    __slots__ = ("_blank", "_border", "_new", "begun")

    def __init__(self) -> None:
        self.begun = False
        """Something of it has been shown."""
        self._new: list[str] = []
        self._blank: list[str] = []
        self._border = False

    @property
    def free(self) -> bool:
        """Whatever is added is shown as it is, as long as no markup comes."""
        return self.begun and not (self._border or self._blank or self._new)

    def add(self, text: str) -> None:
        solid = text.rstrip(BLANK)
        if not solid:
            if text:
                self._blank.append(text)
            return
        if self._border and not self.begun:
            self._blank.clear()
            solid = solid.lstrip(BLANK)
        self._new += self._blank
        self._new.append(solid)
        self._blank.clear()
        if len(solid) < len(text) and (blank := text[len(text.rstrip(BLANK)) :]):
            self._blank.append(blank)
        self.begun, self._border = True, False

    def border(self) -> None:
        """There is markup here."""
        self._border = True

    def flush(self) -> None:
        """The part is over."""
        if not self._border:
            self._new += self._blank
        self._blank.clear()

    def take(self) -> str:
        """What can be shown since the last call of this."""
        if not self._new:
            return ""
        text = "".join(self._new)
        self._new.clear()
        return text
