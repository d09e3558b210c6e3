"""The turns of a conversation as clients send them, and as the model's chat template gets them.

An answer's message may come back as a client holds it: with what is null or empty in every answer of this server, with
`index` as its chunks had it, with the reasoning under either of its names or both, and with what the client itself has
made of it (`parsed`, `parsed_arguments`) or notes beside it, which says nothing that is not in the text.
Whoever asks for a cache has one. Any other field is reported, for nobody acts on it, and so is what another server has
put into a field that is empty in answers of this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from asyncengine.errors import InvalidRequestError

MAX_MESSAGES = 4096
MAX_TOOL_CALLS = 128
MAX_ARGUMENTS_DEPTH = 32

Name = Annotated[str, Meta(max_length=512)]
ClientsOwn = msgspec.Raw | UnsetType
"""What clients put into what they send that changes nothing here, whatever it is."""


class ContentPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One part of a message's content; only parts of type "text" are understood."""

    type: Annotated[str, Meta(max_length=64, extra_json_schema={"const": "text"})]
    text: str | None = None
    id: Name | None = None
    index: ClientsOwn = UNSET
    annotations: ClientsOwn = UNSET
    extras: ClientsOwn = UNSET
    cache_control: ClientsOwn = UNSET


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """arguments: an object, or the JSON text of one; text that is none is the template's as it is."""

    name: str
    arguments: str | dict[str, Any] | None = None
    parsed_arguments: ClientsOwn = UNSET


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call that the model has made before."""

    id: Name | None = None
    type: Literal["function"] | None = None
    function: CalledFunction
    index: ClientsOwn = UNSET


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One turn of a conversation. reasoning_content: the older name of `reasoning`, which counts where both have text.
    refusal: stands in the place of an assistant's content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    name: Name | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: Name | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None
    parsed: ClientsOwn = UNSET
    cache_control: ClientsOwn = UNSET
    id: ClientsOwn = UNSET
    metadata: ClientsOwn = UNSET
    provider_specific_fields: ClientsOwn = UNSET


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


def unread(messages: Sequence[Message]) -> list[str]:
    """The places of known fields that have something to say and that nobody reads."""
    places = []
    for position, message in enumerate(messages):
        if message.annotations:
            places.append(f"messages[{position}].annotations")
        if message.refusal and not _refused(message):
            places.append(f"messages[{position}].refusal")
    return places


def template_message(message: Message, where: str) -> dict[str, object]:
    """Raises `InvalidRequestError`. where: the message's place in the request."""
    # "developer" is the newer name of the system role; templates of open models know only the older one
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, object] = {"role": role, "content": _text(message, where)}
    if message.name is not None:
        turn["name"] = message.name
    if reasoning := _reasoning(message):
        turn["reasoning_content"] = reasoning
    if message.tool_calls is not None:
        turn["tool_calls"] = [
            _template_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _template_call(call: ToolCall, where: str) -> dict[str, object]:
    arguments = {} if call.function.arguments is None else call.function.arguments
    _check_depth(arguments, MAX_ARGUMENTS_DEPTH, f"{where}.function.arguments")
    turned: dict[str, object] = {} if call.id is None else {"id": call.id}
    return {**turned, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _reasoning(message: Message) -> str | None:
    return message.reasoning or message.reasoning_content


def _refused(message: Message) -> bool:
    return message.role == "assistant" and bool(message.refusal) and not message.content


def _text(message: Message, where: str) -> str:
    content = message.refusal if _refused(message) else message.content
    if isinstance(content, str):
        return content
    if content is None and message.role == "assistant" and (message.tool_calls or _reasoning(message)):
        return ""
    if not content:
        raise InvalidRequestError(
            f"{where}.content must be a text or a list of at least one text part", param=f"{where}.content"
        )
    texts = []
    for position, part in enumerate(content):
        at = f"{where}.content[{position}]"
        if part.type != "text":
            raise _unsupported(at, part.type)
        if part.text is None:
            raise InvalidRequestError(f"{at}.text is required", code="missing_required_parameter", param=f"{at}.text")
        texts.append(part.text)
    return "\n".join(texts)


def _unsupported(part: str, kind: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{part}: only text parts are supported, got {kind[:64]!r}", code="unsupported_content", param=part
    )


def _check_depth(value: Any, levels: int, where: str) -> None:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if children and levels == 0:
        raise InvalidRequestError(f"{where} is nested deeper than {MAX_ARGUMENTS_DEPTH} levels", param=where)
    for child in children:
        _check_depth(child, levels - 1, where)
