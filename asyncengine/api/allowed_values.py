"""The texts that a field of a body may have, for whoever sent another one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from msgspec import inspect

STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
"""One step of a path such as `messages[0].content`: a name or a position."""

_described = cache(inspect.type_info)  # takes milliseconds, and there are as many kinds as routes


def allowed_values(kind: Any, path: str) -> list[str]:
    """What the field at `path` of a body may be, where that is one of some texts. kind: the body's type."""
    kinds = list(_plain(_described(kind)))
    for name, _ in STEP.findall(path):
        kinds = [inner for each in kinds for inner in _inside(each, name)]
    return [str(value) for each in kinds if isinstance(each, inspect.LiteralType) for value in each.values]


def _plain(kind: inspect.Type) -> Iterator[inspect.Type]:
    """All that a value of this kind may be."""
    if isinstance(kind, inspect.Metadata):
        yield from _plain(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from _plain(each)
    else:
        yield kind


def _inside(kind: inspect.Type, name: str) -> Iterator[inspect.Type]:
    """What is one step into it. name: of a field, "" for an item of a list."""
    if isinstance(kind, inspect.ListType) and not name:
        yield from _plain(kind.item_type)
    elif isinstance(kind, inspect.StructType):
        for field in kind.fields:
            if field.encode_name == name:
                yield from _plain(field.type)
