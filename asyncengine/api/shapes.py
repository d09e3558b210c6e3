"""OpenAI's JSON for the answers of both endpoints, whole and in chunks."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from asyncengine.api.chat_messages import AssistantMessageJson, FunctionCallJson, ToolCallJson, delta_json
from asyncengine.api.logprobs import (
    ChatLogprobsJson,
    CompletionLogprobsJson,
    PromptLogprobsJson,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from asyncengine.api.sse import event
from asyncengine.api.timings import TimingsJson, timings
from asyncengine.api.usage import Usage, usage_of
from asyncengine.delta import FINISH_REASONS, Delta
from asyncengine.logprobs import PromptLogprob, TokenLogprob
from asyncengine.timeline import Timeline

encode = msgspec.json.encode


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class Answer:
    """One choice's whole answer, gathered from its deltas."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[PromptLogprob] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.timeline: Timeline | None = None

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            if call.index == len(self._calls):
                self._calls.append(_Call(call.id or "", call.name or ""))
            self._calls[call.index].arguments.append(call.arguments)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.timeline = delta.timeline

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def tool_calls(self) -> list[ToolCallJson]:
        return [
            ToolCallJson(id=call.id, function=FunctionCallJson(name=call.name, arguments="".join(call.arguments)))
            for call in self._calls
        ]


FinishReason = Annotated[
    str, msgspec.Meta(extra_json_schema={"enum": [*dict.fromkeys(FINISH_REASONS.values()), "tool_calls"]})
]


class ChoiceJson(msgspec.Struct, frozen=True, kw_only=True):
    """What a choice of either endpoint has. `stop_reason`, `token_ids` and `timings` are no part of OpenAI's schema:
    the first is there when a stop token or string of the request ended the choice, the others when asked for."""

    index: int
    finish_reason: FinishReason | None
    stop_reason: int | str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    timings: TimingsJson | UnsetType = UNSET


class CompletionChoiceJson(ChoiceJson, frozen=True, kw_only=True):
    text: str
    logprobs: CompletionLogprobsJson | None
    prompt_logprobs: PromptLogprobsJson | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChoiceJson(ChoiceJson, frozen=True, kw_only=True):
    message: AssistantMessageJson
    logprobs: ChatLogprobsJson | None


C = TypeVar("C", bound=ChoiceJson)


class ResponseJson(msgspec.Struct, Generic[C], frozen=True, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[C]
    prompt_logprobs: PromptLogprobsJson | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    usage: Usage


class CompletionJson(ResponseJson[CompletionChoiceJson], frozen=True, kw_only=True):
    """Choice `k` of prompt `i` has index `i * n + k`."""


class ChatCompletionJson(ResponseJson[ChatChoiceJson], frozen=True, kw_only=True):
    """One conversation's choices."""


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """name: the client's own for the request, which becomes part of its id; None draws one. token_ids: choices carry
    their token ids. logprobs: whole choices have log-probabilities, though perhaps of no token; a chunk has those that
    its delta has, else null. echo_logprobs: they begin with those of the echoed prompt, with so many likely tokens
    each. prompt_logprobs: how many likely tokens `prompt_logprobs` have of each of a prompt's. prompt_token_ids: of
    each choice's prompt, to be told; None for not. include_usage: a last chunk with the total usage is promised, so the
    others say null. continuous_usage: every chunk carries its choice's usage so far. timings_from: choices that have
    ended have timings, since this time (ns); None for none.
    """

    name: str | None = None
    token_ids: bool = False
    logprobs: bool = False
    echo_logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_token_ids: Sequence[list[int]] | None = None
    include_usage: bool = False
    continuous_usage: bool = False
    timings_from: int | None = None


class Shape(ABC):
    """Writes one response. What its chunks have in common is encoded once."""

    id_prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]
    response_type: ClassVar[type[ResponseJson[Any]]]
    prompt_is_a_choices: ClassVar[bool]
    """Whether what is told of a prompt belongs to choices, or once to the response."""
    text_members: ClassVar[tuple[bytes, bytes]]
    """What comes before and after a choice's text in a chunk."""

    def __init__(self, model: str, fingerprint: str, options: AnswerOptions) -> None:
        """fingerprint: of the engine, see `EngineInfo`."""
        self.id = f"{self.id_prefix}-{options.name or secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model
        self._fingerprint = fingerprint
        self._token_ids = options.token_ids
        self._logprobs = options.logprobs
        self._echo_logprobs = options.echo_logprobs
        self._prompt_logprobs = options.prompt_logprobs
        self._prompt_ids = options.prompt_token_ids
        self._begun: set[int] = set()  # choices that had a chunk, where it makes a difference
        self._continuous_usage = options.continuous_usage
        self._timings_from = options.timings_from
        head = {
            "id": self.id,
            "object": self.chunk_object,
            "created": self._created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._head = encode(head)[:-1] + b',"choices":['
        self._tail = b',"usage":null}' if options.include_usage else b"}"
        self._text_is_all = not options.token_ids and not options.continuous_usage and self._prompt_ids is None
        before, after = self.text_members
        self._before_text = b"data: " + self._head.replace(b"%", b"%%") + b'{"index":%d,' + before
        self._after_text = after + b',"logprobs":null,"finish_reason":null}]' + self._tail + b"\n\n"

    @abstractmethod
    def chunk(self, index: int, delta: Delta) -> bytes:
        """Events for a delta of choice `index`; none (b"") for one without news."""

    @abstractmethod
    def _choice(self, index: int, answer: Answer) -> ChoiceJson: ...

    @abstractmethod
    def _logprobs_json(
        self, entries: Sequence[TokenLogprob], prompt: Sequence[PromptLogprob]
    ) -> CompletionLogprobsJson | ChatLogprobsJson:
        """prompt: of an echoed one; none for others."""

    def usage_chunk(self, usage: Usage) -> bytes:
        """The event after the last choice has finished."""
        return event(self._head + b'],"usage":' + encode(usage) + b"}")

    def response(self, answers: Mapping[int, Answer], usage: Usage) -> bytes:
        """The whole response, of choice index -> answer."""
        choices = [self._choice(index, answers[index]) for index in sorted(answers)]
        response = self.response_type(
            id=self.id,
            object=self.object,
            created=self._created,
            model=self._model,
            system_fingerprint=self._fingerprint,
            choices=choices,
            prompt_logprobs=UNSET if self.prompt_is_a_choices else self._prompt_json(answers[0].prompt_logprobs),
            prompt_token_ids=UNSET if self.prompt_is_a_choices else self._ids_of_prompt(0),
            usage=usage,
        )
        return encode(response)

    def _has_news(self, delta: Delta) -> bool:
        if delta.prompt_logprobs and self._prompt_logprobs is not None:
            return True
        if delta.text or delta.logprobs or delta.finish_reason is not None or delta.reasoning or delta.tool_calls:
            return True
        return bool(delta.token_ids) and (self._token_ids or self._continuous_usage)

    def _is_text_only(self, delta: Delta) -> bool:
        """What nearly all deltas are: `_text_event` writes them at a fraction of the cost."""
        if not self._text_is_all or delta.finish_reason is not None or delta.text == "":
            return False
        return not (delta.logprobs or delta.reasoning or delta.tool_calls or delta.prompt_logprobs)

    def _text_event(self, index: int, text: str) -> bytes:
        return self._before_text % index + encode(text) + self._after_text

    def _event(self, index: int, content: bytes, delta: Delta) -> bytes:
        """content: the JSON members that hold the choice's text."""
        finish = b"null" if delta.finish_reason is None else b'"%b"' % delta.finish_reason.encode()
        echoed = self._echoed(delta.prompt_logprobs)
        logprobs = encode(self._logprobs_json(delta.logprobs, echoed)) if delta.logprobs or echoed else b"null"
        prompt = self._prompt_json(delta.prompt_logprobs)
        prompt_member = b"" if prompt is UNSET else b',"prompt_logprobs":' + encode(prompt)
        parts = [self._head, b'{"index":%d,' % index, content, b',"logprobs":', logprobs, b',"finish_reason":', finish]
        if delta.stop_reason is not None:
            parts += (b',"stop_reason":', encode(delta.stop_reason))
        if self._token_ids:
            parts += (b',"token_ids":', encode(delta.token_ids))
        if isinstance(spent := self._timings(delta.timeline), TimingsJson):
            parts += (b',"timings":', encode(spent))
        if self.prompt_is_a_choices:
            parts.append(prompt_member)
            end = b"}]"
        else:
            end = b"}]" + (b"" if index else prompt_member)
        parts += (end, self._usage_so_far(delta))
        return event(b"".join(parts))

    def _usage_so_far(self, delta: Delta) -> bytes:
        """The end of a chunk."""
        return b',"usage":%b}' % encode(usage_of(delta)) if self._continuous_usage else self._tail

    def _timings(self, timeline: Timeline | None) -> TimingsJson | UnsetType:
        return UNSET if timeline is None or self._timings_from is None else timings(timeline, self._timings_from)

    def _ids(self, answer: Answer) -> list[int] | UnsetType:
        return answer.token_ids if self._token_ids else UNSET

    def _ids_of_prompt(self, index: int) -> list[int] | UnsetType:
        return UNSET if self._prompt_ids is None else self._prompt_ids[index]

    def _ids_member(self, index: int) -> bytes:
        """The ids of the prompt of choice `index` as a further member of an object."""
        return b"" if self._prompt_ids is None else b',"prompt_token_ids":' + encode(self._prompt_ids[index])

    def _echoed(self, prompt: list[PromptLogprob] | None) -> list[PromptLogprob]:
        return [] if prompt is None or self._echo_logprobs is None else prompt

    def _prompt_json(self, prompt: list[PromptLogprob] | None) -> PromptLogprobsJson | UnsetType:
        if prompt is None or self._prompt_logprobs is None:
            return UNSET
        return prompt_logprobs(prompt, num_top=self._prompt_logprobs)


class CompletionShape(Shape):
    id_prefix = "cmpl"
    object = chunk_object = "text_completion"
    response_type = CompletionJson
    prompt_is_a_choices = True
    text_members = (b'"text":', b"")

    def chunk(self, index: int, delta: Delta) -> bytes:
        if self._is_text_only(delta):
            return self._text_event(index, delta.text)
        if not self._has_news(delta):
            return b""
        content = b'"text":' + encode(delta.text)
        if index not in self._begun:
            self._begun.add(index)
            content += self._ids_member(index)
        return self._event(index, content, delta)

    def _choice(self, index: int, answer: Answer) -> ChoiceJson:
        return CompletionChoiceJson(
            index=index,
            text=answer.text,
            prompt_logprobs=self._prompt_json(answer.prompt_logprobs),
            prompt_token_ids=self._ids_of_prompt(index),
            logprobs=self._logprobs_json(answer.logprobs, self._echoed(answer.prompt_logprobs))
            if self._logprobs
            else None,
            finish_reason=answer.finish_reason,
            stop_reason=UNSET if answer.stop_reason is None else answer.stop_reason,
            token_ids=self._ids(answer),
            timings=self._timings(answer.timeline),
        )

    def _logprobs_json(
        self, entries: Sequence[TokenLogprob], prompt: Sequence[PromptLogprob]
    ) -> CompletionLogprobsJson:
        num_top = self._echo_logprobs or 0
        return completion_logprobs(entries, token_ids=self._token_ids, prompt=prompt, num_top=num_top)


class ChatShape(Shape):
    """A choice's first chunk names its role and nothing else, as OpenAI's does; the very first has the prompt's ids."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    response_type = ChatCompletionJson
    prompt_is_a_choices = False
    text_members = (b'"delta":{"content":', b"}")
    _ROLE = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'

    def chunk(self, index: int, delta: Delta) -> bytes:
        role = b""
        if index not in self._begun:
            prompt = b"" if self._begun else self._ids_member(index)
            self._begun.add(index)
            role = event(self._head + b'{"index":%d,' % index + self._ROLE + prompt + self._usage_so_far(delta))
        if self._is_text_only(delta):
            return role + self._text_event(index, delta.text)
        if not self._has_news(delta):
            return role
        return role + self._event(index, b'"delta":' + encode(delta_json(delta)), delta)

    def _choice(self, index: int, answer: Answer) -> ChoiceJson:
        return ChatChoiceJson(
            index=index,
            message=_message_of(answer),
            logprobs=self._logprobs_json(answer.logprobs, []) if self._logprobs else None,
            finish_reason=answer.finish_reason,
            stop_reason=UNSET if answer.stop_reason is None else answer.stop_reason,
            token_ids=self._ids(answer),
            timings=self._timings(answer.timeline),
        )

    def _logprobs_json(self, entries: Sequence[TokenLogprob], prompt: Sequence[PromptLogprob]) -> ChatLogprobsJson:
        return chat_logprobs(entries, token_ids=self._token_ids)


def _message_of(answer: Answer) -> AssistantMessageJson:
    calls, reasoning = answer.tool_calls, answer.reasoning or UNSET
    return AssistantMessageJson(
        content=None if calls and not answer.text else answer.text,
        reasoning=reasoning,
        reasoning_content=reasoning,
        tool_calls=calls or UNSET,
    )
