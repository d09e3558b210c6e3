"""Reads the messages of a chat request: JSON text in, plain dictionaries that a chat template can take out."""

from __future__ import annotations

from typing import Any, NoReturn

import msgspec

from asyncengine.errors import InvalidRequestError


def parse_conversation(data: bytes) -> list[dict[str, Any]]:
    """The messages in `data`, each an object with a `role` and, unless it calls tools, a `content`.

    `content` is a text or a list of text parts. Tool-call arguments given as JSON text become objects, the form in
    which templates expect them; any other text, which a model may have written, stays a text, and an empty one is no
    arguments. Reasoning has both of its names, since templates read one or the other. Which roles exist, and in which
    order, is for the template to say. Raises `InvalidRequestError` naming the place of the fault.
    """
    messages = _decode(data, "messages")
    if not isinstance(messages, list) or not messages:
        _refuse("messages must be a list of at least one message")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def parse_template_kwargs(data: bytes) -> dict[str, Any]:
    """The template's extra variables, from a JSON object's text ("" for none)."""
    kwargs = _decode(data, "chat_template_kwargs") if data else {}
    if not isinstance(kwargs, dict):
        raise InvalidRequestError("chat_template_kwargs must be an object", param="chat_template_kwargs")
    return kwargs


def parse_tools(data: bytes) -> list[dict[str, Any]]:
    """The functions that the template tells the model of."""
    tools = _decode(data, "tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequestError("tools must be a list of objects", param="tools")
    return tools


def join_parts(message: dict[str, Any]) -> dict[str, Any]:
    """`message` with a list of text parts joined to one text."""
    if not isinstance(message.get("content"), list):
        return message
    return {**message, "content": "".join(part["text"] for part in message["content"])}


def split_parts(message: dict[str, Any]) -> dict[str, Any]:
    """`message` with a plain text as a list of one text part."""
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _decode(data: bytes, name: str) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{name} is not valid JSON", param=name) from error
    except RecursionError as error:
        raise InvalidRequestError(f"{name} is nested too deeply", param=name) from error


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        _refuse(f"{place} must be an object")
    if not isinstance(message.get("role"), str) or not message["role"].strip():
        _refuse(f"{place}.role must be a text that is not empty")
    tool_calls, content = message.get("tool_calls"), message.get("content")
    if content is None and not tool_calls:
        _refuse(f"{place}.content is missing")
    if isinstance(content, list):
        _check_parts(content, f"{place}.content")
    elif not isinstance(content, str | None):
        _refuse(f"{place}.content must be a text or a list of text parts")
    changes: dict[str, Any] = {}
    if isinstance(tool_calls, list):
        changes["tool_calls"] = [_tool_call(call) for call in tool_calls]
    if reasoning := message.get("reasoning") or message.get("reasoning_content"):
        changes["reasoning"] = changes["reasoning_content"] = reasoning
    return {**message, **changes}


def _check_parts(parts: list[Any], place: str) -> None:
    if not parts:
        _refuse(f"{place} must not be an empty list")
    for index, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") != "text":
            _refuse(f'{place}[{index}] must be of type "text": other content is not supported')
        if not isinstance(part.get("text"), str):
            _refuse(f"{place}[{index}].text must be a text")


def _tool_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"].strip() or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _refuse(message: str) -> NoReturn:
    raise InvalidRequestError(message, param="messages")
