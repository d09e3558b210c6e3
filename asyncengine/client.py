"""The engine's `generate` over HTTP: the same calls and deltas, from any machine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from types import TracebackType
from typing import Annotated, Any

import aiohttp
import msgspec

from asyncengine.errors import EngineDeadError, EngineError, InvalidRequestError, OverloadedError
from asyncengine.logprobs import TokenLogprob, TopLogprob
from asyncengine.sampling import SamplingParams, Structured
from asyncengine.streams import ChatPrompt, Delta, ToolCallDelta

CONNECT_SECONDS = 10.0
_EVENT_END = b"\n\n"
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


class _CachedJson(msgspec.Struct):
    cached_tokens: int = 0


class _UsageJson(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _CachedJson | None = None


class _ChunkJson(msgspec.Struct):
    choices: list[_ChoiceJson] = []
    usage: _UsageJson | None = None
    error: _ErrorJson | None = None


class _ModelJson(msgspec.Struct):
    id: str


class _ModelsJson(msgspec.Struct):
    data: Annotated[list[_ModelJson], msgspec.Meta(min_length=1)]


_CHUNK = msgspec.json.Decoder(_ChunkJson)
_MODELS = msgspec.json.Decoder(_ModelsJson)


class AsyncClient:
    """A server's models, for use as `async with AsyncClient("http://127.0.0.1:8000") as client`.

    base_url: with or without its /v1. model: the name to ask for; None takes the one the server has. One client serves
    any number of concurrent requests. The server must be this one: deltas need fields that others do not send.
    """

    def __init__(self, base_url: str, *, model: str | None = None) -> None:
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> AsyncClient:
        # an answer takes as long as it takes, so only connecting is timed; streams are not limited in number
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            connector=aiohttp.TCPConnector(limit=0),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections, which aborts what they carry. Idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def models(self) -> list[str]:
        """Names of the server's models, at least one. Raises `EngineError`."""
        try:
            async with self._open_session().get(f"{self._base_url}/v1/models") as response:
                body = await response.read()
                if response.status != 200:
                    raise _error(body, response.status)
                return [model.id for model in _MODELS.decode(body).data]
        except aiohttp.ClientError as error:
            raise self._unreachable(error) from error
        except msgspec.DecodeError as error:
            raise EngineError(f"its list of models is not understood: {error}") from error

    async def generate(
        self,
        prompt: str | Sequence[int] | ChatPrompt,
        params: SamplingParams | None = None,
        *,
        tool_choice: str = "auto",
        parallel_tool_calls: bool = True,
    ) -> AsyncGenerator[Delta, None]:
        """Yield deltas of all `params.n` choices until each has finished, as `AsyncEngine.generate` does.

        Of a conversation's answer the server tells reasoning and tool calls from the text. tool_choice: of a prompt
        with tools, "auto", "none", "required" or the name of the function to call. parallel_tool_calls: more than one
        call in an answer.

        Leaving early (break, `aclose`, cancellation) closes the connection, which aborts the request. Raises
        `InvalidRequestError`, `OverloadedError`, `EngineDeadError` as the server reports them, and `EngineError` when
        it cannot be reached.
        """
        session = self._open_session()
        params = params or SamplingParams()
        if params.prompt_logprobs is not None or params.max_tokens == 0:
            raise InvalidRequestError(
                "a client's deltas do not have what a request for its prompt alone, or for its prompt's "
                "log-probabilities, is about",
                code="unsupported_parameter",
                param="prompt_logprobs" if params.prompt_logprobs is not None else "max_tokens",
            )
        body = _body(prompt, params, self._model)
        if isinstance(prompt, ChatPrompt) and prompt.tools:
            body |= {
                "tools": prompt.tools,
                "tool_choice": _tool_choice(tool_choice),
                "parallel_tool_calls": parallel_tool_calls,
            }
        path = "/v1/chat/completions" if isinstance(prompt, ChatPrompt) else "/v1/completions"
        request = session.post(
            self._base_url + path, data=msgspec.json.encode(body), headers={"Content-Type": "application/json"}
        )
        unfinished = params.n
        try:
            async with request as response:
                if response.status != 200:
                    raise _error(await response.read(), response.status)
                async for data in _events(response):
                    delta = _delta(data)
                    if delta is not None:
                        unfinished -= delta.finish_reason is not None
                        yield delta
        except aiohttp.ClientError as error:
            raise self._unreachable(error) from error
        if unfinished:
            raise EngineDeadError("the server ended the stream before the answer was complete")

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise EngineError("the client is not open: use it as `async with AsyncClient(url) as client`")
        return self._session

    def _unreachable(self, error: aiohttp.ClientError) -> EngineError:
        return EngineError(f"no answer from {self._base_url}: {error}", code="connection_error")


def _body(prompt: str | Sequence[int] | ChatPrompt, params: SamplingParams, model: str | None) -> dict[str, Any]:
    # `return_token_ids` and `continuous_usage_stats` carry what a delta has besides its text
    body: dict[str, Any] = msgspec.structs.asdict(params) | {
        "stream": True,
        "stream_options": {"continuous_usage_stats": True},
        "return_token_ids": True,
        "logit_bias": dict(params.logit_bias),
    }
    body["structured_outputs"] = _outputs(body.pop("structured"))
    if model is not None:
        body["model"] = model
    if not isinstance(prompt, ChatPrompt):
        return body | {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    return body | {
        "messages": prompt.messages,
        "logprobs": params.logprobs is not None,
        "top_logprobs": params.logprobs,
        "add_generation_prompt": prompt.add_generation_prompt,
        "chat_template_kwargs": prompt.template_kwargs,
    }


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


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of each event but [DONE], to the end of the response. An event may be of any size."""
    rest = b""
    async for received in response.content.iter_any():
        *events, rest = (rest + received).split(_EVENT_END)
        for event in events:
            data = event.removeprefix(b"data: ")
            if data != _DONE:
                yield data


def _delta(data: bytes) -> Delta | None:
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
    return Delta(
        index=choice.index,
        text=choice.text if choice.delta is None else message.content,
        token_ids=choice.token_ids,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0,
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


def _token_logprob(entry: _EntryJson) -> TokenLogprob:
    return TokenLogprob(
        token_id=entry.token_id,
        token=bytes(entry.bytes or ()),
        logprob=entry.logprob,
        text_offset=entry.text_offset,
        top=tuple(TopLogprob(top.token_id, bytes(top.bytes or ()), top.logprob) for top in entry.top_logprobs),
    )


def _error(body: bytes, status: int) -> EngineError:
    try:
        error = _CHUNK.decode(body).error
    except msgspec.DecodeError:
        error = None
    return _typed_error(error or _ErrorJson(f"the server answered with HTTP status {status}"), status)


def _typed_error(error: _ErrorJson, status: int) -> EngineError:
    if error.type == OverloadedError.type or status in (429, 503):
        kind: type[EngineError] = OverloadedError
    elif error.type == InvalidRequestError.type or 400 <= status < 500:
        kind = InvalidRequestError
    elif error.type == EngineDeadError.type and error.code != "internal_error":
        kind = EngineDeadError
    else:
        kind = EngineError
    return kind(error.message, code=error.code, param=error.param)
