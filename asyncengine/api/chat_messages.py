"""OpenAI's JSON for an assistant's message, whole and in chunks."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from asyncengine.delta import Delta, ToolCallDelta


class FunctionCallJson(msgspec.Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallJson(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: str = "function"
    function: FunctionCallJson


class ToolCallChunkJson(msgspec.Struct, frozen=True, kw_only=True):
    """News of a call; who it is comes once."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCallJson


class AssistantMessageJson(msgspec.Struct, frozen=True, kw_only=True):
    """content: null where the answer consists of calls. reasoning, tool_calls: only where there are some.
    reasoning_content: the same as `reasoning`."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallJson] | UnsetType = UNSET


class DeltaJson(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of a message. role: in the first event of a choice, with nothing else. reasoning_content: the same as
    `reasoning`."""

    role: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallChunkJson] | UnsetType = UNSET


def delta_json(delta: Delta) -> DeltaJson:
    reasoning = delta.reasoning or UNSET
    return DeltaJson(
        reasoning=reasoning,
        reasoning_content=reasoning,
        content=delta.text or UNSET,
        tool_calls=[_call_chunk(call) for call in delta.tool_calls] or UNSET,
    )


def _call_chunk(call: ToolCallDelta) -> ToolCallChunkJson:
    if call.id is None or call.name is None:
        return ToolCallChunkJson(index=call.index, function=FunctionCallJson(arguments=call.arguments))
    function = FunctionCallJson(name=call.name, arguments=call.arguments)
    return ToolCallChunkJson(index=call.index, id=call.id, type="function", function=function)
