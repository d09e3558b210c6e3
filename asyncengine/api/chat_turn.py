"""What a chat request comes to: the prompt, the parameters, and how the answer's text is to be taken apart."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from asyncengine.api.answer_grammar import AnswerGrammar, Thinking
from asyncengine.api.answer_parser import TOOL_CALL_PARSERS, AnswerParser
from asyncengine.api.prompts import chat_prompt
from asyncengine.api.reasoning import THINK, THINK_END
from asyncengine.api.schema import ChatRequest
from asyncengine.api.tools import MAX_SCHEMA_DEPTH, ToolUse, deeper_than, tool_use
from asyncengine.chat_prompt import ChatPrompt
from asyncengine.config import ToolCallFormat
from asyncengine.engine_info import EngineInfo
from asyncengine.errors import InvalidRequestError
from asyncengine.sampling import SamplingParams, Structured
from asyncengine.wire.requests import Markup


class ChatTurn(msgspec.Struct, frozen=True, kw_only=True):
    """tool_calls: the format of those that the answer may have, None for none. reasoning: whether it may have some.
    blame: the field that is at fault where the grammar in `params` cannot be used; None for the client's own."""

    prompt: ChatPrompt
    params: SamplingParams
    tool_calls: ToolCallFormat | None
    reasoning: bool
    blame: str | None

    def parser(self) -> AnswerParser | None:
        """For one choice; None where all of an answer is content."""
        if self.tool_calls is None and not self.reasoning:
            return None
        return AnswerParser(tool_calls=self.tool_calls, reasoning=self.reasoning)

    def refusal(self, error: InvalidRequestError) -> InvalidRequestError:
        """`error` in terms of what the client sent."""
        if error.param != "structured_outputs" or self.blame is None:
            return error
        what = "the schema of a function" if self.blame == "tools" else "the schema"
        return InvalidRequestError(error.message.replace("the grammar", what, 1), code=error.code, param=self.blame)


def chat_turn(request: ChatRequest, info: EngineInfo) -> ChatTurn:
    """Raises `InvalidRequestError`."""
    params = request.sampling_params()
    use = tool_use(request.tools, request.tool_choice, request.parallel_tool_calls, info.tool_call_format)
    own = params.structured
    schema = _json_schema(own)
    # in Llama's format a call is a JSON object too: which of both an object is to be, its beginning cannot tell
    unclear = use is not None and use.free and info.tool_call_format == "llama3"
    if use is not None and own is not None and (schema is None or unclear):
        raise InvalidRequestError(
            f"an answer that may call tools cannot be kept to a {own.kind} as well: leave it out, or the tools",
            code="unsupported_parameter",
            param="tools",
        )
    # a structure other than JSON is that of all text from the first character on: no place is left for reasoning
    reasoning = info.reasoning and (own is None or schema is not None)
    structured, structured_thinking = own, None
    if use is not None or reasoning:
        structured = _structured(use, info, schema, think="may" if reasoning else "none")
        structured_thinking = _structured(use, info, schema, think="must") if reasoning else None
    tool_calls = None if use is None else info.tool_call_format
    tags = TOOL_CALL_PARSERS[tool_calls].tags if tool_calls is not None else ()
    if reasoning:
        tags = (*tags, THINK, THINK_END)
    markup = Markup(shown_tokens=tags, think=THINK if reasoning else "", structured_thinking=structured_thinking)
    prompt = chat_prompt(request, tools=[] if use is None else use.template_tools())
    return ChatTurn(
        prompt=msgspec.structs.replace(prompt, markup=markup) if tags else prompt,
        params=params if structured == own else msgspec.structs.replace(params, structured=structured),
        tool_calls=tool_calls,
        reasoning=reasoning,
        blame=None if structured == own else "tools" if use is not None else request.structure_field,
    )


def _json_schema(structured: Structured | None) -> dict[str, Any] | None:
    """What JSON it asks for, None if it is not of that kind or not to be understood, which the engine will say."""
    if structured is None or structured.kind not in ("json_schema", "json_object"):
        return None
    if structured.kind == "json_object":
        return {"type": "object"}
    try:
        schema = json.loads(structured.text)
    except (ValueError, RecursionError):
        return None
    if schema is True:
        return {}
    return schema if isinstance(schema, dict) and not deeper_than(schema, MAX_SCHEMA_DEPTH) else None


def _structured(
    use: ToolUse | None, info: EngineInfo, schema: dict[str, Any] | None, *, think: Thinking
) -> Structured | None:
    """What keeps an answer to all that was asked of it."""
    if use is not None and info.tool_call_format is not None:
        return use.structured(info.tool_call_format, think=think, tokens=info.tag_tokens, schema=schema)
    if schema is None:
        return None
    return Structured("grammar", AnswerGrammar(None, tokens=info.tag_tokens).of_json(schema, think=think))
