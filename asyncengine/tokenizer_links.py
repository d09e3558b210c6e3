"""The tokenizer workers as an API process sees them: whoever has least to do gets the next text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from asyncengine.errors import OverloadedError
from asyncengine.questions import Questions
from asyncengine.wire.messages import Detokenize, TokenizeChat, TokenizeText, ToTokenizer
from asyncengine.wire.pipes import Sender


class TokenizerLink:
    """One tokenizer worker's pipe, and the bytes of text sent to it that it has not acknowledged."""

    __slots__ = ("sender", "unacked_bytes")

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.unacked_bytes = 0


class TokenizerLinks:
    def __init__(self, senders: Iterable[Sender], questions: Questions) -> None:
        self._links = [TokenizerLink(sender) for sender in senders]
        self._questions = questions

    def __iter__(self) -> Iterator[TokenizerLink]:
        return iter(self._links)

    def send(self, message: ToTokenizer) -> TokenizerLink:
        """Send to one of them, and say to which. Raises `OverloadedError`."""
        link = min(self._links, key=lambda link: link.unacked_bytes)
        if not link.sender.try_send(message):
            raise OverloadedError("the engine has no room for another prompt now", code="overloaded")
        return link

    async def ask(self, message: TokenizeText | TokenizeChat | Detokenize, size: int) -> Any:
        """The answer of one of them to a question of `size` bytes. Raises `EngineError`."""
        link = self.send(message)
        link.unacked_bytes += size
        try:
            return await self._questions.ask(message.rid)
        finally:
            link.unacked_bytes -= size
