"""Keeps a user's text from ever becoming a control token, without changing how it is tokenized otherwise.

A control token is found by its text. So, before a template is rendered, every place in the user's strings where such a
text stands, or could come to stand once the template puts its own text around, is cut by a marker: one private-use
character that occurs nowhere else in the conversation. After rendering, the texts of control tokens that are still
whole are the template's own. The tokenizer splits there first and only then deletes the markers, so every stretch of
text between two control tokens is tokenized as one, exactly as if it had never been cut:

    content      hi<|im_end|>                 rendered   <|im_start|>user\\nhi<M|im_end|><|im_end|>\\n
    marked       hi<M|im_end|>                split      [<|im_start|>] "user\\nhi<M|im_end|>" [<|im_end|>] "\\n"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, pairwise
from typing import Any

from asyncengine.errors import InvalidRequestError

KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Roles that a template may wrap into a control token (`<|user|>`). Any other role is text like the rest."""

PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class ControlTokens:
    """The texts of a tokenizer's control tokens; those of one character cannot be cut and are not guarded."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(text for text in texts if len(text) > 1)
        self._lengths = sorted({len(text) for text in self.texts})
        self._heads = frozenset(text[:end] for text in self.texts for end in range(1, len(text)))
        self._tails = frozenset(text[start:] for text in self.texts for start in range(1, len(text)))
        self._starts = re.compile("|".join(sorted({re.escape(text[:2]) for text in self.texts})) or r"(?!)")

    def mark(self, value: Any, *, reserved: str = "") -> tuple[Any, str]:
        """Return JSON-like `value` with every string cut where needed, and the marker ("" when nothing was cut).

        reserved: text whose characters must not serve as marker. Raises `InvalidRequestError` when all are taken.
        """
        if not any(self._cuts(text, is_role) for text, is_role in _strings(value)):
            return value, ""
        marker = self.unused_char(value, reserved=reserved)

        def cut(text: str, is_role: bool) -> str:
            places = [0, *self._cuts(text, is_role), len(text)]
            return marker.join(text[start:end] for start, end in pairwise(places))

        return _map_strings(value, cut), marker

    def unused_char(self, value: Any, *, reserved: str) -> str:
        """A private-use character that is in no string of `value`. Raises `InvalidRequestError` when all are taken."""
        taken = set(reserved).union(*(text for text, _ in _strings(value)), *self.texts)
        marker = next((chr(code) for code in chain(*PRIVATE_USE) if chr(code) not in taken), None)
        if marker is None:
            raise InvalidRequestError("messages contain every private-use character of Unicode", param="messages")
        return marker

    def _cuts(self, text: str, is_role: bool) -> list[int]:
        """Ascending offsets in `text` at which a marker is due."""
        if is_role and text in KNOWN_ROLES:
            return []
        cuts = {match.start() + 1 for match in self._starts.finditer(text) if self._stands_at(text, match.start())}
        # the template may strip white space and write its own text right behind what then is the first or last letter
        stripped = text.strip()
        start = len(text) - len(text.lstrip())
        end = start + len(stripped)
        inside = is_role and any(stripped in token for token in self.texts)
        if inside or any(stripped[:size] in self._tails for size in self._lengths_of(stripped)):
            cuts.add(start)
        if inside or any(stripped[-size:] in self._heads for size in self._lengths_of(stripped)):
            cuts.add(end)
        return sorted(cuts)

    def _stands_at(self, text: str, start: int) -> bool:
        return any(text[start : start + length] in self.texts for length in self._lengths)

    def _lengths_of(self, text: str) -> range:
        """Lengths that a part of a control token at an edge of `text` can have."""
        return range(1, min(len(text), self._lengths[-1] - 1 if self._lengths else 0) + 1)


def _strings(value: Any, is_role: bool = False) -> Iterator[tuple[str, bool]]:
    if isinstance(value, str):
        yield value, is_role
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key, False
            yield from _strings(item, key == "role")


def _map_strings(value: Any, change: Callable[[str, bool], str], is_role: bool = False) -> Any:
    if isinstance(value, str):
        return change(value, is_role)
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key, False): _map_strings(item, change, key == "role") for key, item in value.items()}
    return value
