"""Reads one call as a model writes it, `{"name": ..., "arguments": {...}}`, while it is being written.

The arguments are an exact slice of the model's text: they are passed on as they come, never parsed and written anew.
One state per character at most, whatever the pieces in which the text arrives; runs inside of strings and of values are
skipped by one regular expression each.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

_BLANK = " \t\r\n"
_IN_STRING = re.compile(r'[^"\\]*')
_IN_VALUE = re.compile(r"[-+.0-9A-Za-z:,\s]*")
_BARE = re.compile(r"[-+.0-9A-Za-z]*")
_CLOSER = {"{": "}", "[": "]"}
NO_ARGUMENTS = "{}"


class _At(Enum):
    """What comes next, of the call's own object."""

    OBJECT = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()
    END = auto()


class CallObject:
    """One call. `push` text until `done` or `broken`.

    name: "" until it and the beginning of the arguments are known, from when on the call cannot be taken back.
    done: the object is complete. broken: the next character cannot belong to it, or what it says is no call.
    in_arguments: its arguments have begun and are not complete.
    """

    __slots__ = (
        "_arguments",
        "_at",
        "_closers",
        "_empty",
        "_escaped",
        "_in_string",
        "_key",
        "_keys",
        "_name",
        "_need_arguments",
        "_new",
        "_token",
        "_whole",
        "broken",
        "done",
        "name",
    )

    def __init__(self, *, argument_keys: frozenset[str], keys: frozenset[str] | None, need_arguments: bool) -> None:
        """argument_keys: members that hold the arguments. keys: all that a call may have before its arguments, None for
        any. need_arguments: an object without arguments is no call, rather than one that needs none."""
        self.name = ""
        self.done = False
        self.broken = False
        self._arguments = argument_keys
        self._keys = keys
        self._need_arguments = need_arguments
        self._at = _At.OBJECT
        self._empty = True
        self._key = ""
        self._name = ""
        self._whole: str | None = None  # arguments that are complete before the name is known
        self._new: list[str] = []  # of the arguments, not yet taken
        self._token: list[str] = []  # of the key or value that is being read
        self._in_string = False
        self._escaped = False
        self._closers: list[str] = []  # of the value that is being read

    @property
    def in_arguments(self) -> bool:
        return self.name != "" and self._at is _At.VALUE and self._key in self._arguments and self._whole is None

    def take(self) -> str:
        """The arguments' text since the last call of this."""
        text = "".join(self._new)
        self._new.clear()
        return text

    def push(self, text: str, start: int = 0) -> int:
        """Read from `start`; returns where it stopped: the end of `text`, behind the object, or at what breaks it."""
        place, size = start, len(text)
        while place < size and not (self.done or self.broken):
            if self._at is _At.VALUE and (self._token or text[place] not in _BLANK):
                place = self._value(text, place)
            elif self._at is _At.KEY and self._token:
                place = self._read_key(text, place)
            elif text[place] in _BLANK:
                place += 1
            else:
                place = self._punctuation(text[place], place)
        return place

    def _punctuation(self, char: str, place: int) -> int:
        match self._at, char:
            case _At.OBJECT, "{":
                self._at = _At.KEY
            case _At.KEY, '"':
                self._token.append(char)
                self._in_string = True
            case (_At.KEY, "}") if self._empty:
                self._finish()
            case _At.COLON, ":":
                self._at = _At.VALUE
            case _At.COMMA, ",":
                self._at = _At.KEY
            case _At.COMMA, "}":
                self._finish()
            case _:
                self.broken = True
                return place
        return place if self.broken else place + 1

    def _finish(self) -> None:
        if self.name:
            self.done = True
        elif self._name and (self._whole is not None or not self._need_arguments):
            self._begin(self._whole or NO_ARGUMENTS)
            self.done = True
        else:
            self.broken = True

    def _begin(self, arguments: str) -> None:
        self.name = self._name
        self._new.append(arguments)

    # ---------------------------------------------------------------------------------------------- keys and values

    def _read_key(self, text: str, place: int) -> int:
        end = self._string(text, place)
        self._token.append(text[place:end])
        if not self._in_string:
            key = _decoded("".join(self._token))
            self._token.clear()
            if key is None or (self._keys is not None and not self.name and key not in self._keys):
                self.broken = True
                return end - 1
            self._key, self._at, self._empty = key, _At.COLON, False
        return end

    def _value(self, text: str, place: int) -> int:
        """Read on in the member's value; it is streamed if it is the arguments' object and the name is known."""
        streamed = bool(self.name) and self._key in self._arguments and self._whole is None
        if not self._token and not streamed and self._starts_arguments(text[place]):
            streamed = True
            self._begin("")
        first = not self._token
        if first:
            self._token.append("")
        end, complete = self._value_end(text, place, first=first)
        piece = text[place:end]
        if streamed:
            self._new.append(piece)
        elif not self.name:
            self._token.append(piece)
        if complete:
            self._value_read(streamed=streamed)
        return end

    def _starts_arguments(self, char: str) -> bool:
        return char == "{" and self._key in self._arguments and self._name != "" and self._whole is None

    def _value_end(self, text: str, place: int, *, first: bool) -> tuple[int, bool]:
        """Where the value, or what there is of it, ends; whether it does end there. Sets `broken` where it cannot."""
        if first and text[place] not in '"{[' and not _BARE.match(text, place).group():  # type: ignore[union-attr]
            self.broken = True
            return place, False
        size = len(text)
        while place < size:
            if self._in_string:
                place = self._string(text, place)
                if not self._in_string and not self._closers:
                    return place, True
                continue
            if not self._closers and not first:  # a number or a word
                place = _BARE.match(text, place).end()  # type: ignore[union-attr]
                return place, place < size
            char = text[place]
            if char == '"':
                self._in_string = True
            elif char in _CLOSER:
                self._closers.append(_CLOSER[char])
            elif self._closers and char == self._closers[-1]:
                self._closers.pop()
                if not self._closers:
                    return place + 1, True
            elif first:
                place = _BARE.match(text, place).end()  # type: ignore[union-attr]
                return place, place < size
            else:
                end = _IN_VALUE.match(text, place).end()  # type: ignore[union-attr]
                if end == place:
                    self.broken = True
                    return place, False
                place = end
                continue
            first = False
            place += 1
        return place, False

    def _string(self, text: str, place: int) -> int:
        """Behind the string's closing quote, or the end of `text`."""
        size = len(text)
        while place < size:
            if self._escaped:
                self._escaped = False
                place += 1
                continue
            place = _IN_STRING.match(text, place).end()  # type: ignore[union-attr]
            if place == size:
                break
            if text[place] == '"':
                self._in_string = False
                return place + 1
            self._escaped = True
            place += 1
        return place

    def _value_read(self, *, streamed: bool) -> None:
        raw = "".join(self._token)
        self._token.clear()
        self._at = _At.COMMA
        if streamed:
            self._whole = NO_ARGUMENTS  # a second object of the same key is no arguments
        elif self.name:
            return
        elif self._key == "name":
            self._name = _decoded(raw) or ""
            self.broken = not self._name
            if self._whole is not None:
                self._begin(self._whole)
        elif self._key in self._arguments:
            self._whole = _as_arguments(raw)
            self.broken = self._whole is None
            if self._name and not self.broken:
                self._begin(self._whole or "")


def _decoded(raw: str) -> str | None:
    """The text that a JSON string stands for; None if it stands for none."""
    try:
        text = json.loads(raw, strict=False)
        if isinstance(text, str):
            text.encode()  # no half of a surrogate pair
            return text
    except ValueError:
        pass
    return None


def _as_arguments(raw: str) -> str | None:
    """A value's text as arguments: an object as it is, the text that a string holds, and null for none."""
    if raw.startswith("{"):
        return raw
    return NO_ARGUMENTS if raw == "null" else (_decoded(raw) or None)
