"""What a chat request comes to: the prompt, the parameters, and how the answer's text is to be taken apart."""

from __future__ import annotations

import msgspec

from asyncengine.api.answer_parser import TOOL_CALL_PARSERS, AnswerParser
from asyncengine.api.prompts import chat_prompt
from asyncengine.api.reasoning import THINK, THINK_END
from asyncengine.api.schema import ChatRequest
from asyncengine.api.tools import ToolUse, tool_use
from asyncengine.config import ToolCallFormat
from asyncengine.engine_info import EngineInfo
from asyncengine.errors import InvalidRequestError
from asyncengine.sampling import SamplingParams, Structured
from asyncengine.streams import ChatPrompt
from asyncengine.wire.messages import Markup


class ChatTurn(msgspec.Struct, frozen=True, kw_only=True):
    """tool_calls: the format of those that the answer may have, None for none. reasoning: whether it may have some.
    keeps_tools: the structure in `params` is that of calls."""

    prompt: ChatPrompt
    params: SamplingParams
    tool_calls: ToolCallFormat | None
    reasoning: bool
    keeps_tools: bool

    def parser(self) -> AnswerParser | None:
        """For one choice; None where all of an answer is content."""
        if self.tool_calls is None and not self.reasoning:
            return None
        return AnswerParser(tool_calls=self.tool_calls, reasoning=self.reasoning)

    def refusal(self, error: InvalidRequestError) -> InvalidRequestError:
        """`error` in terms of what the client sent."""
        if not self.keeps_tools or error.param != "structured_outputs":
            return error
        message = error.message.replace("the grammar", "the schema of a function", 1)
        return InvalidRequestError(message, code=error.code, param="tools")


def chat_turn(request: ChatRequest, info: EngineInfo) -> ChatTurn:
    """Raises `InvalidRequestError`."""
    params = request.sampling_params()
    use = tool_use(request.tools, request.tool_choice, request.parallel_tool_calls, info.tool_call_format)
    # a structure of the client's own is that of all text from the first character on: no place is left for reasoning
    reasoning = info.reasoning and params.structured is None
    if use is not None and params.structured is not None:
        raise InvalidRequestError(
            "an answer that may call tools cannot have a structure as well; set tool_choice to none, or leave out "
            "response_format and structured_outputs",
            code="unsupported_parameter",
            param="tools",
        )
    structured, structured_thinking = _structures(use, info, reasoning=reasoning)
    tool_calls = None if use is None else info.tool_call_format
    tags = TOOL_CALL_PARSERS[tool_calls].tags if tool_calls is not None else ()
    if reasoning:
        tags = (*tags, THINK, THINK_END)
    markup = Markup(shown_tokens=tags, think=THINK if reasoning else "", structured_thinking=structured_thinking)
    prompt = chat_prompt(request, tools=[] if use is None else use.template_tools())
    return ChatTurn(
        prompt=msgspec.structs.replace(prompt, markup=markup) if tags else prompt,
        params=params if structured is None else msgspec.structs.replace(params, structured=structured),
        tool_calls=tool_calls,
        reasoning=reasoning,
        keeps_tools=structured is not None,
    )


def _structures(
    use: ToolUse | None, info: EngineInfo, *, reasoning: bool
) -> tuple[Structured | None, Structured | None]:
    """Of an answer that calls `use`'s functions, and of one that begins in the middle of reasoning."""
    if use is None or info.tool_call_format is None:
        return None, None
    format, tokens = info.tool_call_format, info.tag_tokens
    if not reasoning:
        return use.structured(format, think="none", tokens=tokens), None
    return (
        use.structured(format, think="may", tokens=tokens),
        use.structured(format, think="must", tokens=tokens),
    )
