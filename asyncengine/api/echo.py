"""Puts a completion's prompt in front of its answer."""

from __future__ import annotations

import msgspec

from asyncengine.delta import Delta
from asyncengine.logprobs import PromptLogprob


class Echo:
    """One choice's. text: of the prompt, as the client gave it or as its ids read."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._begun = False

    def parse(self, delta: Delta) -> Delta:
        """`delta` as one of a text that begins with the prompt."""
        changes: dict[str, object] = {}
        if delta.logprobs:
            offset = len(self._text)
            changes["logprobs"] = [
                msgspec.structs.replace(entry, text_offset=offset + entry.text_offset) for entry in delta.logprobs
            ]
        if not self._begun:
            self._begun = True
            changes["text"] = self._text + delta.text
            if delta.prompt_logprobs is not None:
                changes["prompt_logprobs"] = self._placed(delta.prompt_logprobs)
        return msgspec.structs.replace(delta, **changes) if changes else delta

    def _placed(self, entries: list[PromptLogprob]) -> list[PromptLogprob]:
        """With offsets in the text. What a tokenizer adds, it adds in front, where the text does not have it."""
        last, size = entries[-1], len(self._text)
        added = last.text_offset + len(last.text) - size
        if added == 0:
            return entries
        return [
            msgspec.structs.replace(entry, text_offset=min(max(entry.text_offset - added, 0), size))
            for entry in entries
        ]
