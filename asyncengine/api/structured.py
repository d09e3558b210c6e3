"""What a request says about the structure of its text, in OpenAI's field or in vLLM's.

response_format       {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": ...}}
structured_outputs    one of {"json": schema or its text}, {"json_object": true}, {"regex": ...}, {"choice": [...]},
                      {"grammar": ...}
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from asyncengine.errors import InvalidRequestError
from asyncengine.sampling import MAX_STRUCTURED_BYTES, Structured, StructuredKind

MAX_CHOICES = 4096

Text = Annotated[str, Meta(min_length=1, max_length=MAX_STRUCTURED_BYTES)]
Choices = Annotated[
    list[Annotated[str, Meta(max_length=MAX_STRUCTURED_BYTES)]], Meta(min_length=1, max_length=MAX_CHOICES)
]
Unset = Annotated[bool, Meta(extra_json_schema={"const": False})]


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """name, description and strict are for the caller's own use: the schema is always kept to."""

    name: Annotated[str, Meta(max_length=512)] | None = None
    description: str | None = None
    schema: msgspec.Raw
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At most one of the first five. json: null is none. The others are what vLLM's own type has beside them, which its
    clients send as it is: they may say nothing."""

    json: msgspec.Raw | UnsetType = UNSET
    json_object: bool | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    structural_tag: None = None
    whitespace_pattern: None = None
    disable_fallback: Unset | None = None
    disable_any_whitespace: Unset | None = None
    disable_additional_properties: Unset | None = None
    _backend: None = None
    _backend_was_auto: Unset | None = None


def structured_of(response_format: ResponseFormat | None, outputs: StructuredOutputs | None) -> Structured | None:
    """What the text must match, None for anything. Raises `InvalidRequestError`."""
    found = []
    if response_format is not None and response_format.type != "json_schema" and response_format.json_schema:
        raise InvalidRequestError(
            "response_format.json_schema is only allowed with type json_schema", param="response_format.json_schema"
        )
    if response_format is not None and response_format.type != "text":
        found.append(_of_format(response_format))
    if outputs is not None:
        found += _of_outputs(outputs)
    if len(found) > 1:
        raise InvalidRequestError(
            f"a text can have one structure, got {' and '.join(structured.kind for structured in found)}",
            param="structured_outputs",
        )
    return found[0] if found else None


def _of_format(response_format: ResponseFormat) -> Structured:
    if response_format.type == "json_object":
        return Structured("json_object")
    if response_format.json_schema is None:
        raise InvalidRequestError(
            "response_format.json_schema is required with type json_schema",
            code="missing_required_parameter",
            param="response_format.json_schema",
        )
    return _json(response_format.json_schema.schema, "response_format.json_schema.schema")


def _of_outputs(outputs: StructuredOutputs) -> list[Structured]:
    for name in ("disable_fallback", "disable_any_whitespace", "disable_additional_properties", "_backend_was_auto"):
        if getattr(outputs, name):
            param = f"structured_outputs.{name}"
            raise InvalidRequestError(
                f"{param} is not supported by this server", code="unsupported_parameter", param=param
            )
    found = []
    if outputs.json is not UNSET and bytes(outputs.json) != b"null":
        found.append(_json(outputs.json, "structured_outputs.json"))
    if outputs.json_object:
        found.append(Structured("json_object"))
    if outputs.choice is not None:
        found.append(_structured("choice", msgspec.json.encode(outputs.choice).decode(), "structured_outputs.choice"))
    if outputs.regex is not None:
        found.append(_structured("regex", outputs.regex, "structured_outputs.regex"))
    if outputs.grammar is not None:
        found.append(_structured("grammar", outputs.grammar, "structured_outputs.grammar"))
    return found


def _json(raw: msgspec.Raw, param: str) -> Structured:
    """Of a schema, or of a text that holds one."""
    data = bytes(raw)
    if data.startswith(b'"'):
        return _structured("json_schema", msgspec.json.decode(data, type=str), param)
    if len(data) > MAX_STRUCTURED_BYTES:  # of any kind of characters
        raise InvalidRequestError(f"{param} may have {MAX_STRUCTURED_BYTES} bytes, got {len(data)}", param=param)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{param} is not UTF-8 (byte {error.start} of it)", param=param) from None
    return _structured("json_schema", text, param)


def _structured(kind: StructuredKind, text: str, param: str) -> Structured:
    try:
        return Structured(kind, text)
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message, param=param) from None
