"""From the bytes of a request body to a typed request, with errors a person can act on."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from asyncengine.api.allowed_values import STEP, allowed_values
from asyncengine.errors import InvalidRequestError

MAX_SHOWN_BITS = 128
MAX_SHOWN_NAME_CHARS = 64
UNKNOWN_FIELD = "unknown_parameter"
"""Code of an error that names a field of an object inside the body."""
_LONE_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*(?P<lone>\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|[c-fC-F][0-9a-fA-F]{2}))"
)
_SURROGATE_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_PATH = re.compile(r" - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_NULL_EXPECTED = "Expected `null`, got"
"""For a field that is there so that it can be refused by name."""
_WRONG_TEXT = "Invalid enum value "
"""For a field that may have some texts only."""

T = TypeVar("T")


def decode_body(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Parse `body`; raises `InvalidRequestError` saying where it is not JSON, or which field has a wrong value.

    The parser counts its own depth, so nesting of any depth is an error here and not a stack overflow.
    """
    try:
        return decoder.decode(body)
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply", code="invalid_json") from None
    except msgspec.ValidationError as error:
        raise _wrong_value(str(error), body, decoder.type) from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(_where_malformed(str(error), body), code="invalid_json") from None


def _where_malformed(message: str, body: bytes) -> str:
    surrogate = _lone_surrogate_offset(body)
    if surrogate is not None:
        return f"the body is not valid JSON: half a surrogate pair (byte {surrogate})"
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f"the body is not valid JSON: not UTF-8 (byte {error.start})"
    if "(byte " in message:
        return f"the body is not valid JSON: {message.removeprefix('JSON is malformed: ')}"
    return f"the body is not valid JSON: it ends too early (byte {len(body)})"


def _lone_surrogate_offset(body: bytes) -> int | None:
    # whole pairs are blanked first, so that the second half of one is not taken for a lone half
    match = _LONE_SURROGATE.search(_SURROGATE_PAIR.sub(lambda pair: b" " * len(pair[0]), body))
    return None if match is None else match.start("lone")


def _wrong_value(message: str, body: bytes, kind: Any) -> InvalidRequestError:
    at = _PATH.search(message)
    path = at["path"].removesuffix("[...]") if at else ""  # what the parser calls any value of a map
    what = message[: at.start()] if at else message
    missing = _MISSING.search(what)
    if missing:
        param = f"{path}.{missing['name']}" if path else missing["name"]
        return InvalidRequestError(f"{param} is required", code="missing_required_parameter", param=param)
    unknown = _UNKNOWN.fullmatch(what)
    if unknown:
        param = f"{path}.{unknown['name'][:MAX_SHOWN_NAME_CHARS]}"
        return InvalidRequestError(f"{param}: there is no such field", code=UNKNOWN_FIELD, param=param)
    if path and what.startswith(_NULL_EXPECTED):
        return InvalidRequestError(f"{path} is not supported by this server", code="unsupported_parameter", param=path)
    if what.startswith(_WRONG_TEXT) and (allowed := allowed_values(kind, path)):
        what = f"{what}, expected {', '.join(map(repr, allowed))}"
    if at and at["key"]:
        what = f"a name in it: {what}"
    if not path:
        return InvalidRequestError(f"the body must be a JSON object: {what}", code="invalid_type")
    return InvalidRequestError(f"{path}: {what}{_shown_value(body, path)}", code="invalid_value", param=path)


def _shown_value(body: bytes, path: str) -> str:
    """The offending value, if it is a number or a literal: text may be long or private and is not repeated."""
    value = _value_at(body, path)
    if not isinstance(value, (int, float)) or (isinstance(value, int) and value.bit_length() > MAX_SHOWN_BITS):
        return ""
    return f" ({msgspec.json.encode(value).decode()})"


def _value_at(body: bytes, path: str) -> Any:
    """What a body has at a place such as `messages[0].content`; None where that cannot be told."""
    try:
        value: Any = msgspec.json.decode(body)
        for name, position in STEP.findall(path):
            value = value[int(position)] if position else value[name]
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError):
        return None
    return value
