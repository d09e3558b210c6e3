"""OpenAI's request bodies as types that bound every number, string, list and depth before anything is queued."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from asyncengine.api.json_body import decode_body
from asyncengine.api.request_messages import Messages, Name, unread
from asyncengine.api.structured import ResponseFormat, StructuredOutputs, structured_of
from asyncengine.api.tools import ToolChoice, Tools
from asyncengine.api.unknown_fields import decode_conversation
from asyncengine.api.unsupported import NO_EFFECT_IN_CHAT, NO_EFFECT_IN_COMPLETIONS, ignored_fields
from asyncengine.config import ServiceClass
from asyncengine.errors import InvalidRequestError
from asyncengine.request_terms import MAX_NAME_CHARS, MAX_SESSION_SECONDS, REQUEST_NAME
from asyncengine.sampling import (
    INT32_MAX,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

MAX_PROMPTS = 256
MAX_CHOICES = 1024
"""Prompts times `n` in one request."""
MAX_LOGPROBS_AT_ONCE = 4096
"""Choices of one request times the log-probabilities that each reports of a token."""
MAX_PROMPT_LOGPROBS_AT_ONCE = 2**20
"""Characters or ids of all prompts of a request, times `n`, times the log-probabilities that each token of a prompt
reports."""
DEFAULT_COMPLETION_TOKENS = 16
TEMPLATE_KWARGS = ("date_string", "enable_thinking", "preserve_thinking", "reasoning_effort", "thinking")
"""Variables of a chat template that a request may set. Never the template itself, nor the engine's own variables."""

TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
TokenCount = Annotated[int, Meta(ge=1, le=INT32_MAX)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
LogprobCount = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
_PROMPTS = Meta(max_length=MAX_PROMPTS)
Prompts = Annotated[
    list[str | TokenId | TokenIds],
    Meta(
        min_length=1,
        extra_json_schema={
            "anyOf": [
                msgspec.json.schema(kind)
                for kind in (Annotated[list[str], _PROMPTS], list[TokenId], Annotated[list[TokenIds], _PROMPTS])
            ]
        },
    ),
]
"""One prompt as ids, or several prompts: all as text or all as ids."""
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_STRING_CHARS)]
SessionName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
RequestName = Annotated[str, Meta(pattern=REQUEST_NAME)]
TemplateValue = bool | Annotated[str, Meta(max_length=64)] | None
TemplateKwargs = Annotated[
    dict[str, TemplateValue],
    Meta(max_length=16, extra_json_schema={"propertyNames": {"enum": list(TEMPLATE_KWARGS)}}),
]
LogitBias = Annotated[
    dict[TokenId, Bias],
    Meta(max_length=MAX_LOGIT_BIAS, extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"}}),
]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """include_usage: one more event at the end, with the whole request's usage. continuous_usage_stats: every event
    carries the usage of its own choice so far. include_obfuscation: events are never padded."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[bool, Meta(extra_json_schema={"const": False})] | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints have in common. null means the default everywhere.

    return_token_ids: each choice also carries its new `token_ids`, and the answer its `prompt_token_ids` unless
    return_prompt_token_ids, whose default it is, says no. timings: each choice says at its end where its time went (see
    `api.timings`). request_id: part of the answer's id, by which the request can be cancelled; without it one is drawn.
    cache_salt: cached prefixes are shared among requests with the same one. service_class, session,
    session_ttl_seconds: see `request_terms.AskedTerms`. user: names the person that the client acts for, and changes
    nothing.
    """

    model: Name | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    min_p: Fraction | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    logit_bias: LogitBias | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: LogprobCount | None = None
    priority: Annotated[int, Meta(ge=-INT32_MAX, le=INT32_MAX)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_prompt_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    timings: bool | None = None
    request_id: RequestName | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    service_class: ServiceClass | None = None
    session: SessionName | None = None
    session_ttl_seconds: Annotated[float, Meta(gt=0, le=MAX_SESSION_SECONDS)] | None = None
    user: Name | None = None

    @property
    def num_choices(self) -> int:
        """`n`: choices per prompt."""
        return 1 if self.n is None else self.n

    @property
    def tells_prompt_ids(self) -> bool:
        """The answer has its prompts' ids."""
        asked = self.return_prompt_token_ids
        return bool(self.return_token_ids if asked is None else asked)

    @property
    def num_logprobs(self) -> int | None:
        """`SamplingParams.logprobs`; the two endpoints ask for it in ways of their own."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """`SamplingParams.prompt_logprobs`."""
        return self.prompt_logprobs

    @property
    def structure_field(self) -> str:
        """The field that asks for a structure, where one does."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    def refusal(self, error: InvalidRequestError) -> InvalidRequestError:
        """`error` in terms of what the client sent: `SamplingParams` has one name where a body has two."""
        if error.param == "structured_outputs":
            return InvalidRequestError(error.message, code=error.code, param=self.structure_field)
        if error.param in ("max_tokens", "min_tokens") and self.max_completion_tokens is not None:
            name = "max_completion_tokens"
            message, param = (text.replace("max_tokens", name) for text in (error.message, error.param))
            return InvalidRequestError(message, code=error.code, param=param)
        return error

    def sampling_params(self) -> SamplingParams:
        """Raises `InvalidRequestError` where fields contradict each other."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        try:
            return SamplingParams(
                n=self.num_choices,
                max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
                min_tokens=self.min_tokens or 0,
                temperature=1.0 if self.temperature is None else self.temperature,
                top_k=self.top_k or 0,
                top_p=1.0 if self.top_p is None else self.top_p,
                min_p=self.min_p or 0.0,
                presence_penalty=self.presence_penalty or 0.0,
                frequency_penalty=self.frequency_penalty or 0.0,
                repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
                logit_bias=tuple((self.logit_bias or {}).items()),
                logprobs=self.num_logprobs,
                prompt_logprobs=self.num_prompt_logprobs,
                seed=self.seed,
                stop=stop,
                stop_token_ids=tuple(self.stop_token_ids or ()),
                ignore_eos=bool(self.ignore_eos),
                skip_special_tokens=self.skip_special_tokens is not False,
                include_stop_str_in_output=bool(self.include_stop_str_in_output),
                priority=self.priority or 0,
                structured=structured_of(self.response_format, self.structured_outputs),
            )
        except InvalidRequestError as error:
            raise self.refusal(error) from None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of /v1/completions. `max_tokens` null, other than missing, means up to the model's context length; 0 is for
    an echo of the prompt. echo: each choice begins with its prompt, and so do its log-probabilities."""

    prompt: str | Prompts
    max_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = DEFAULT_COMPLETION_TOKENS
    logprobs: LogprobCount | None = None
    echo: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        asked = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((count for count in asked if count is not None), default=None)


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of /v1/chat/completions. Without `max_tokens` an answer may fill the model's context."""

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


R = TypeVar("R", bound=GenerationRequest)
T = TypeVar("T", bound=msgspec.Struct)


class Parsed(msgspec.Struct, Generic[T], frozen=True):
    """A request, and the names of its fields that this server does not know."""

    request: T
    ignored: list[str]


_COMPLETION = msgspec.json.Decoder(CompletionRequest)
_CHAT = msgspec.json.Decoder(ChatRequest)
FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
"""Which fields a body has."""


def parse_completion(body: bytes) -> Parsed[CompletionRequest]:
    """Raises `InvalidRequestError`."""
    request = decode_body(body, _COMPLETION)
    _check_stream_options(request)
    if request.max_tokens == 0 and request.max_completion_tokens is None and not request.echo:
        raise InvalidRequestError("max_tokens 0 is only allowed with echo", param="max_tokens")
    given = decode_body(body, FIELDS)
    return Parsed(request, ignored_fields(given, CompletionRequest.__struct_fields__, NO_EFFECT_IN_COMPLETIONS))


def parse_chat(body: bytes, no_effect: Mapping[str, tuple[Any, ...]] = NO_EFFECT_IN_CHAT) -> Parsed[ChatRequest]:
    """no_effect: as in `unsupported`. Raises `InvalidRequestError`."""
    request, places = decode_conversation(body, _CHAT)
    _check_stream_options(request)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequestError("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
    given = decode_body(body, FIELDS)
    ignored = ignored_fields(given, ChatRequest.__struct_fields__, no_effect)
    return Parsed(request, ignored + places + unread(request.messages))


def _check_stream_options(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options is only allowed when stream is true", param="stream_options")
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        raise InvalidRequestError(
            "stream_options.include_obfuscation is not supported by this server",
            code="unsupported_parameter",
            param="stream_options.include_obfuscation",
        )
