"""The requests of `AsyncClient` and a server's answers as JSON, and what they mean."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

import aiohttp
import msgspec

from asyncengine.chat_prompt import ChatPrompt
from asyncengine.delta import Delta, ToolCallDelta
from asyncengine.engine_info import Health
from asyncengine.errors import (
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    RequestTimeoutError,
)
from asyncengine.logprobs import TokenLogprob, TopLogprob
from asyncengine.prompt_messages import as_json, plain_prompt
from asyncengine.request_terms import AskedTerms
from asyncengine.sampling import SamplingParams, Structured

_EVENT_END = b"\n\n"
_DATA = b"data:"
_DONE = b"[DONE]"


class _ErrorJson(msgspec.Struct):
    message: str
    type: str | None = None
    code: str | None = None
    param: str | None = None


class _FunctionJson(msgspec.Struct):
    name: str | None = None
    arguments: str = ""


class _CallJson(msgspec.Struct):
    index: int
    function: _FunctionJson
    id: str | None = None


class _ChatDeltaJson(msgspec.Struct):
    role: str | None = None
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[_CallJson] = []


class _TopJson(msgspec.Struct):
    token_id: int
    bytes: list[int] | None
    logprob: float


class _EntryJson(_TopJson):
    text_offset: int
    top_logprobs: list[_TopJson]


class _LogprobsJson(msgspec.Struct):
    content: list[_EntryJson] = []


class _ChoiceJson(msgspec.Struct):
    index: int
    text: str = ""
    delta: _ChatDeltaJson | None = None
    token_ids: list[int] = []
    logprobs: _LogprobsJson | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _PromptDetailsJson(msgspec.Struct):
    cached_tokens: int = 0
    session_tokens: int | None = None
    first_differing_token: int | None = None


class _UsageJson(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _PromptDetailsJson | None = None


class _ChunkJson(msgspec.Struct):
    choices: list[_ChoiceJson] = []
    usage: _UsageJson | None = None
    error: _ErrorJson | None = None


class _ModelJson(msgspec.Struct):
    id: str


class _ModelsJson(msgspec.Struct):
    data: Annotated[list[_ModelJson], msgspec.Meta(min_length=1)]


class _HealthJson(msgspec.Struct):
    status: str
    reason: str = ""


_CHUNK = msgspec.json.Decoder(_ChunkJson)


def request_body(
    prompt: str | Sequence[int] | ChatPrompt,
    params: SamplingParams,
    *,
    model: str | None,
    tool_choice: str,
    parallel_tool_calls: bool,
    terms: AskedTerms,
) -> bytes:
    """Of a completion, or of a chat completion if the prompt is a conversation. Raises `InvalidRequestError` for what
    is no JSON."""
    prompt = plain_prompt(prompt)
    # `return_token_ids` and `continuous_usage_stats` carry what a delta has besides its text, and no delta has the
    # prompt's ids
    body: dict[str, Any] = msgspec.structs.asdict(params) | {
        "stream": True,
        "stream_options": {"continuous_usage_stats": True},
        "return_token_ids": True,
        "return_prompt_token_ids": False,
        "logit_bias": dict(params.logit_bias),
    }
    body["structured_outputs"] = _outputs(body.pop("structured"))
    body |= terms
    if model is not None:
        body["model"] = model
    if not isinstance(prompt, ChatPrompt):
        return as_json("the request", body | {"prompt": prompt if isinstance(prompt, str) else list(prompt)})
    body |= {
        "messages": prompt.messages,
        "logprobs": params.logprobs is not None,
        "top_logprobs": params.logprobs,
        "add_generation_prompt": prompt.add_generation_prompt and not prompt.continue_final_message,
        "continue_final_message": prompt.continue_final_message,
        "chat_template_kwargs": prompt.template_kwargs,
    }
    if prompt.tools:
        body |= {
            "tools": prompt.tools,
            "tool_choice": _tool_choice(tool_choice),
            "parallel_tool_calls": parallel_tool_calls,
        }
    return as_json("the request", body)


def _tool_choice(choice: str) -> str | dict[str, Any]:
    if choice in ("auto", "none", "required"):
        return choice
    return {"type": "function", "function": {"name": choice}}


def _outputs(structured: Structured | None) -> dict[str, Any] | None:
    """The field by which the server asks for a structure."""
    match structured:
        case None:
            return None
        case Structured(kind="json_object"):
            return {"json_object": True}
        case Structured(kind="json_schema"):
            return {"json": structured.text}
        case Structured(kind="choice"):
            return {"choice": msgspec.json.decode(structured.text)}
    return {structured.kind: structured.text}


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of each event but [DONE], to the end of the response. An event may be of any size. Proxies may end lines
    in their own way, and put comments between events."""
    rest = b""
    async for received in response.content.iter_any():
        *events, rest = (rest + received).replace(b"\r\n", b"\n").split(_EVENT_END)
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(_DATA) and (data := line.removeprefix(_DATA).strip()) != _DONE:
                    yield data


def delta_of(data: bytes) -> Delta | None:
    """None for a chunk without news of a choice: one that only opens a message."""
    try:
        chunk = _CHUNK.decode(data)
    except msgspec.DecodeError as error:
        raise EngineError(f"the server sent an event that is not understood: {error}") from error
    if chunk.error is not None:
        raise _typed_error(chunk.error, 500)
    if not chunk.choices or chunk.usage is None:
        return None
    choice, usage = chunk.choices[0], chunk.usage
    message = choice.delta or _ChatDeltaJson()
    if message.role is not None:
        return None
    details = usage.prompt_tokens_details or _PromptDetailsJson()
    return Delta(
        index=choice.index,
        text=choice.text if choice.delta is None else message.content,
        token_ids=choice.token_ids,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=details.cached_tokens,
        session_tokens=details.session_tokens,
        first_differing_token=details.first_differing_token,
        completion_tokens=usage.completion_tokens,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        logprobs=[] if choice.logprobs is None else [_token_logprob(entry) for entry in choice.logprobs.content],
        reasoning=message.reasoning_content,
        tool_calls=[
            ToolCallDelta(call.index, call.id, call.function.name, call.function.arguments)
            for call in message.tool_calls
        ],
    )


def models_of(body: bytes) -> list[str]:
    """Raises `EngineError`."""
    try:
        return [model.id for model in msgspec.json.decode(body, type=_ModelsJson).data]
    except msgspec.DecodeError as error:
        raise EngineError(f"its list of models is not understood: {error}") from error


def health_of(body: bytes, status: int) -> Health:
    """Raises `EngineError`, as the server says for a refusal."""
    try:
        told = msgspec.json.decode(body, type=_HealthJson)
        if status == 200:
            return Health(state="ready")
        return msgspec.convert({"state": told.status, "detail": told.reason}, Health)
    except msgspec.DecodeError as error:
        if status != 200:
            raise error_of(body, status) from None
        raise EngineError(f"its health is not understood: {error}") from error


def _token_logprob(entry: _EntryJson) -> TokenLogprob:
    return TokenLogprob(
        token_id=entry.token_id,
        token=bytes(entry.bytes or ()),
        logprob=entry.logprob,
        text_offset=entry.text_offset,
        top=tuple(TopLogprob(top.token_id, bytes(top.bytes or ()), top.logprob) for top in entry.top_logprobs),
    )


def error_of(body: bytes, status: int) -> EngineError:
    try:
        error = _CHUNK.decode(body).error
    except msgspec.DecodeError:
        error = None
    return _typed_error(error or _ErrorJson(f"the server answered with HTTP status {status}"), status)


def _typed_error(error: _ErrorJson, status: int) -> EngineError:
    if error.type == OverloadedError.type or status in (429, 503):
        kind: type[EngineError] = OverloadedError
    elif error.type == RequestTimeoutError.type:
        kind = RequestTimeoutError
    elif error.type == InvalidRequestError.type or 400 <= status < 500:
        kind = InvalidRequestError
    elif error.type == EngineDeadError.type and error.code != "internal_error":
        kind = EngineDeadError
    else:
        kind = EngineError
    return kind(error.message, code=error.code, param=error.param)
