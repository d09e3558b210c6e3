"""The tokenizer workers as an API process sees them: whoever has least to do gets the next text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from asyncengine.errors import OverloadedError
from asyncengine.questions import Questions
from asyncengine.wire.pipes import Sender
from asyncengine.wire.requests import Detokenize, TokenizeChat, TokenizeText, ToTokenizer

Question = TokenizeText | TokenizeChat | Detokenize

MAX_UNACKED_BYTES = 64 * 1024 * 1024
"""A tokenizer that owes so much, a minute's work or more, gets no further text of an API process: what waits for it is
bounded in bytes, not only in messages."""


@dataclass(slots=True, eq=False)
class TokenizerLink:
    """One tokenizer worker's pipe, the bytes of text sent to it that it has not acknowledged, and the questions that it
    has not answered, by rid. The pipe is another one after the worker was lost."""

    sender: Sender
    unacked_bytes: int = 0
    questions: dict[int, Question] = field(default_factory=dict)

    def ask_again(self) -> None:
        """Send all unanswered questions once more. An answer that comes twice is dropped the second time."""
        for message in self.questions.values():
            self.sender.send(message)


class TokenizerLinks:
    def __init__(self, senders: Iterable[Sender], questions: Questions) -> None:
        self._links = [TokenizerLink(sender) for sender in senders]
        self._questions = questions

    def __iter__(self) -> Iterator[TokenizerLink]:
        return iter(self._links)

    def __getitem__(self, index: int) -> TokenizerLink:
        return self._links[index]

    def send(self, message: ToTokenizer) -> TokenizerLink:
        """Send to one of them, and say to which. Raises `OverloadedError`."""
        link = self._idlest()
        if link.unacked_bytes >= MAX_UNACKED_BYTES or not link.sender.try_send(message):
            raise OverloadedError("the engine has no room for another prompt now", code="overloaded")
        return link

    def resend(self, message: ToTokenizer) -> TokenizerLink:
        """The same for what had been accepted before: where the pipe is full, it waits."""
        link = self._idlest()
        link.sender.send(message)
        return link

    async def ask(self, message: Question, size: int) -> Any:
        """The answer of one of them to a question of `size` bytes. Raises `EngineError`."""
        link = self.send(message)
        link.unacked_bytes += size
        link.questions[message.rid] = message
        try:
            return await self._questions.ask(message.rid)
        finally:
            link.unacked_bytes -= size
            del link.questions[message.rid]

    def _idlest(self) -> TokenizerLink:
        return min(self._links, key=lambda link: link.unacked_bytes)
