"""Finds a model's tool calls in its text, piece by piece: the same calls and content for every way of cutting it.

A call is passed on from the moment its name and the beginning of its arguments are known; its arguments follow as they
are written. What turns out before that to be no call is content, as the model wrote it, tags included. What breaks
off or goes wrong later is left in the arguments: OpenAI's clients know that these need not be valid JSON.

    content ..... <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> ..... content
    held back     ----------------------------------->
    passed on                                       f(   {"a": 1}
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import ClassVar

from asyncengine.api.markup import BLANK, TagSearch, Words
from asyncengine.api.tool_call_object import CallObject
from asyncengine.delta import ToolCallDelta

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(slots=True)
class _News:
    """Of one call; id and name with the first."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: list[str] = field(default_factory=list)


class ToolCallParser(ABC):
    """One answer's. `push` its text, then `flush`, and `take` what has been found after each."""

    tags: ClassVar[tuple[str, ...]]
    """What it must see of the text, whether or not it is shown otherwise."""

    def __init__(self, content: Words, *, new_id: Callable[[], str] = new_call_id) -> None:
        """content: where what is no call goes."""
        self._content = content
        self._new_id = new_id
        self._call = self._new_call()
        self._raw: list[str] = []  # of what may become a call
        self._news: list[_News] = []
        self._count = 0
        self.engaged = False
        """Something that may be a call has begun, now or before."""
        self.called = False
        """There are calls, and the last one's arguments are complete."""

    @abstractmethod
    def push(self, text: str) -> None: ...

    @abstractmethod
    def flush(self) -> None:
        """The text is over."""

    @abstractmethod
    def _new_call(self) -> CallObject: ...

    def take(self) -> list[ToolCallDelta]:
        """News of calls since the last call of this; at most one for each call."""
        if not self._news:
            return []
        news, self._news = self._news, []
        return [ToolCallDelta(each.index, each.id, each.name, "".join(each.arguments)) for each in news]

    def _open(self, tag: str) -> None:
        """What follows may be a call."""
        self.engaged = True
        self._call = self._new_call()
        self._raw = [tag]

    def _read(self, text: str) -> str:
        """Read on in the call; returns what follows it, and what breaks it. What is no call becomes content."""
        begun = self._call.name != ""
        end = self._call.push(text)
        if not begun:
            if self._call.name:
                self._begin()
            elif self._call.broken:
                self._raw.append(text[:end])
                self._give_up()
            else:
                self._raw.append(text[:end])
        self._add(self._call.take())
        self.called = self._count > 0 and not self._call.in_arguments
        return text[end:]

    def _begin(self) -> None:
        self._raw.clear()
        self._content.border()
        self._news.append(_News(self._count, self._new_id(), self._call.name))
        self._count += 1

    def _give_up(self) -> None:
        self._content.add("".join(self._raw))
        self._raw.clear()

    def _add(self, arguments: str) -> None:
        """Add to the arguments of the newest call."""
        if arguments:
            if not self._news:
                self._news.append(_News(self._count - 1))
            self._news[-1].arguments.append(arguments)


class HermesParser(ToolCallParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, as Hermes and Qwen write it."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    tags = (OPEN, CLOSE)

    class _In(Enum):
        CONTENT = auto()
        CALL = auto()
        END = auto()
        """Directly behind a call's object: white space is no content."""
        REST = auto()
        """Behind it: a closing tag is due."""
        SPOILT = auto()
        """In arguments that are none."""

    def __init__(self, content: Words, *, new_id: Callable[[], str] = new_call_id) -> None:
        super().__init__(content, new_id=new_id)
        self._in = self._In.CONTENT
        self._search = TagSearch(self.OPEN)

    def _new_call(self) -> CallObject:
        return CallObject(argument_keys=ARGUMENT_KEYS, keys=None, need_arguments=False)

    def push(self, text: str) -> None:
        while text:
            text = self._read_call(text) if self._in is self._In.CALL else self._read_text(text)

    def flush(self) -> None:
        held = self._search.flush()
        if self._in is not self._In.END or not self.CLOSE.startswith(held):  # else it is the tag that is due, cut short
            self._write(held)
        if self._in is self._In.CALL:
            self._give_up()

    def _read_call(self, text: str) -> str:
        rest = self._read(text)
        if self._call.done:
            self._enter(self._In.END)
        elif self._call.broken and not self._call.name:
            self._enter(self._In.CONTENT)
        elif self._call.broken:
            self._enter(self._In.SPOILT if self._call.in_arguments else self._In.REST)
        return rest

    def _read_text(self, text: str) -> str:
        before, rest = self._search.push(text)
        if self._in is self._In.END and (before := before.lstrip(BLANK)):
            self._in = self._In.REST
        self._write(before)
        if self._search.found == self.OPEN:
            self._enter(self._In.CALL)
        elif self._search.found:
            self._enter(self._In.CONTENT)
        return rest

    def _write(self, text: str) -> None:
        if self._in is self._In.SPOILT:
            self._add(text)
        else:
            self._content.add(text)

    def _enter(self, state: _In) -> None:
        self._in = state
        if state is self._In.CALL:
            self._open(self.OPEN)
        else:
            self._search = TagSearch(self.OPEN) if state is self._In.CONTENT else TagSearch(self.OPEN, self.CLOSE)


class Llama3Parser(ToolCallParser):
    """`{"name": ..., "parameters": {...}}` in place of an answer, or anywhere behind `<|python_tag|>`; more of them
    may follow, with a semicolon, a comma or white space between."""

    TAG = "<|python_tag|>"
    tags = (TAG,)
    KEYS = frozenset({"type", "id", "name", *ARGUMENT_KEYS})
    """An object with others is an answer in JSON, which is not held back any longer."""
    SEPARATORS = BLANK + ";,"

    class _In(Enum):
        START = auto()
        """Where a call may begin."""
        CONTENT = auto()
        CALL = auto()
        SPOILT = auto()

    def __init__(self, content: Words, *, new_id: Callable[[], str] = new_call_id) -> None:
        super().__init__(content, new_id=new_id)
        self._in = self._In.START
        self._search = TagSearch(self.TAG)
        self._between: list[str] = []  # what may be no more than set off a call

    def _new_call(self) -> CallObject:
        return CallObject(argument_keys=ARGUMENT_KEYS, keys=self.KEYS, need_arguments=True)

    def push(self, text: str) -> None:
        while text:
            match self._in:
                case self._In.START:
                    text = self._read_start(text)
                case self._In.CALL:
                    text = self._read_call(text)
                case _:
                    text = self._read_text(text)

    def flush(self) -> None:
        if self._in is self._In.CALL:
            self._give_up()
        elif self._in is self._In.START and not self.called:
            self._content.add("".join(self._between))
        self._write(self._search.flush())

    def _read_start(self, text: str) -> str:
        separators = self.SEPARATORS if self.called else BLANK
        rest = text.lstrip(separators)
        self._between.append(text[: len(text) - len(rest)])
        if not rest:
            return ""
        before = "".join(self._between)
        self._between.clear()
        if rest.startswith("{"):
            self._in = self._In.CALL
            self._open(before)
            return rest
        self._in = self._In.CONTENT
        self._content.add(before)
        return rest

    def _read_call(self, text: str) -> str:
        rest = self._read(text)
        if self._call.done:
            self._in = self._In.START
        elif self._call.broken:
            self._in = self._In.SPOILT if self._call.in_arguments else self._In.CONTENT
        return rest

    def _read_text(self, text: str) -> str:
        before, rest = self._search.push(text)
        self._write(before)
        if self._search.found:
            self._in = self._In.START
            self._between.append(self.TAG)
        return rest

    def _write(self, text: str) -> None:
        if self._in is self._In.SPOILT:
            self._add(text)
        else:
            self._content.add(text)
