"""Fields of a conversation that nobody knows here: clients note this and that beside what they send, so such fields are
left out and, unless they are null, named, as those of the body itself are."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from asyncengine.api.json_body import MAX_SHOWN_NAME_CHARS, UNKNOWN_FIELD, decode_body
from asyncengine.api.request_messages import CalledFunction, ContentPart, Message, Messages, ToolCall
from asyncengine.api.tools import FunctionJson, ToolJson, Tools
from asyncengine.errors import InvalidRequestError

CONVERSATION = (Message, ContentPart, ToolCall, CalledFunction, ToolJson, FunctionJson)
"""The kinds of objects whose unknown fields are left out."""
_LOOKED_INTO = {"messages": inspect.type_info(Messages), "tools": inspect.type_info(Tools)}
_ANYTHING = msgspec.json.Decoder(dict[str, Any])

T = TypeVar("T")


def decode_conversation(body: bytes, decoder: msgspec.json.Decoder[T]) -> tuple[T, list[str]]:
    """As `decode_body`, and the places of what is unknown in messages and tools."""
    try:
        return decode_body(body, decoder), []
    except InvalidRequestError as error:
        if error.code != UNKNOWN_FIELD or not (error.param or "").startswith(("messages[", "tools[")):
            raise
        content = decode_body(body, _ANYTHING)
        places: list[str] = []
        for name, kind in _LOOKED_INTO.items():
            _leave_out(content.get(name), kind, name, places)
    return decode_body(msgspec.json.encode(content), decoder), places


def _leave_out(value: Any, kind: inspect.Type, place: str, places: list[str]) -> None:
    if isinstance(kind, inspect.Metadata):
        _leave_out(value, kind.type, place, places)
    elif isinstance(kind, inspect.UnionType):
        for each in kind.types:
            _leave_out(value, each, place, places)
    elif isinstance(kind, inspect.ListType) and isinstance(value, list):
        for position, item in enumerate(value):
            _leave_out(item, kind.item_type, f"{place}[{position}]", places)
    elif isinstance(kind, inspect.StructType) and isinstance(value, dict):
        fields = {field.encode_name: field.type for field in kind.fields}
        for name in list(value):
            if name in fields:
                _leave_out(value[name], fields[name], f"{place}.{name}", places)
            elif value.pop(name) is not None:
                places.append(f"{place}.{name[:MAX_SHOWN_NAME_CHARS]}")
