"""Typed reading of what a model's files say about it; a wrong or missing field names itself in a `StartupError`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from asyncengine.errors import StartupError

INT_MAX = 2**31 - 1


class Fields:
    """Fields of one file. `source` names the file in errors. A field that is null counts as absent."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.source = source
        self._values = values

    def get(self, name: str) -> Any:
        """The raw value; None when absent."""
        return self._values.get(name)

    def has(self, name: str) -> bool:
        """Whether the field is there, null or not."""
        return name in self._values

    def count(self, name: str, default: int | None = None, *, limit: int = INT_MAX) -> int:
        """A whole number from 1 to `limit`."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            raise self._wrong(name, f"a whole number from 1 to {limit}", value)
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self._wrong(name, "a number above 0", value)
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._present(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        """A token id or a list of them; empty when absent."""
        value = self.get(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= INT_MAX:
                raise self._wrong(name, "token ids", value)
        return tuple(ids)

    def nested(self, name: str) -> Fields | None:
        """The fields of an object; None when absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, "an object", value)
        return Fields(f"{self.source}: {name}", value)

    def _present(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise StartupError(f"{self.source} does not say {name}")
        return value

    def _wrong(self, name: str, wanted: str, value: Any) -> StartupError:
        return StartupError(f"{self.source}: {name} must be {wanted}, got {value!r:.80}")
