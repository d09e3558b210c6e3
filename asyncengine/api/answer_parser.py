"""Takes a chat's answer apart into what the model thinks, what it says and which tools it calls.

text -> ReasoningParser -> ToolCallParser -> Words
          reasoning          tool_calls       content
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from asyncengine.api.markup import Words
from asyncengine.api.reasoning import ReasoningParser
from asyncengine.api.tool_calls import HermesParser, Llama3Parser, ToolCallParser, new_call_id
from asyncengine.config import ToolCallFormat
from asyncengine.delta import Delta

PIECE_CHARS = 4096
"""Text is read in pieces of at most so much: what follows a tag is copied, and must be short."""
TOOL_CALL_PARSERS: dict[ToolCallFormat, type[ToolCallParser]] = {"hermes": HermesParser, "llama3": Llama3Parser}


class AnswerParser:
    """One choice's. The parts of all its deltas together do not depend on how the text was cut into deltas."""

    def __init__(
        self, *, tool_calls: ToolCallFormat | None, reasoning: bool, new_id: Callable[[], str] = new_call_id
    ) -> None:
        """tool_calls: the format of calls, None for an answer that has none. reasoning: whether there may be some."""
        self._content = Words()
        self._tools = None if tool_calls is None else TOOL_CALL_PARSERS[tool_calls](self._content, new_id=new_id)
        rest = self._content.add if self._tools is None else self._tools.push
        self._reasoning = ReasoningParser(self._content, rest, self._engaged) if reasoning else None
        self._push = rest if self._reasoning is None else self._reasoning.push

    def parse(self, delta: Delta) -> Delta:
        """`delta` with its text taken apart."""
        text, content = delta.text, self._content
        if self._tools is None and self._reasoning is not None and self._reasoning.over and content.free:
            return delta
        for start in range(0, len(text), PIECE_CHARS):
            self._push(text[start : start + PIECE_CHARS])
        if delta.finish_reason is not None:
            self._flush()
        called = delta.finish_reason == "stop" and self._tools is not None and self._tools.called
        return msgspec.structs.replace(
            delta,
            text=content.take(),
            reasoning="" if self._reasoning is None else self._reasoning.take(),
            tool_calls=[] if self._tools is None else self._tools.take(),
            finish_reason="tool_calls" if called else delta.finish_reason,
        )

    def _engaged(self) -> bool:
        return self._tools is not None and self._tools.engaged

    def _flush(self) -> None:
        if self._reasoning is not None:
            self._reasoning.flush()
        if self._tools is not None:
            self._tools.flush()
        self._content.flush()
