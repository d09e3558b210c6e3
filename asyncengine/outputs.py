"""Answers as a whole, put together from their deltas."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable

import msgspec

from asyncengine.delta import Delta, ToolCallDelta
from asyncengine.errors import EngineError
from asyncengine.logprobs import TokenLogprob
from asyncengine.timeline import Timeline

NS = 1e-9


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One choice. finish_reason, stop_reason: as in `Delta`; a finish_reason of None says that the deltas ended early.

    logprobs: None unless asked for; which tokens have one, `Delta` tells.
    reasoning, tool_calls: the parts of a chat's answer that an HTTP server has told apart from its text.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] | None = None
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []


class RequestTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of CLOCK_MONOTONIC: when the engine queued the request, first planned it, had the first token of any of
    its choices here and the last of all. first_token_latency: seconds from its submission."""

    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float
    first_token_latency: float


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one prompt: `outputs` in the order of their `index`, as many as `SamplingParams.n`.

    prompt: the text, for a conversation the text of its tokens, None for a prompt given as ids.
    prompt_token_ids: None where they are not known, as with a text sent over HTTP.
    num_cached_tokens: of the prompt, found in the prefix cache. session_tokens, first_differing_token: as in `Delta`.
    metrics: None over HTTP.
    error: why there is no answer; then `outputs` is empty.
    """

    prompt: str | None
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    session_tokens: int | None = None
    first_differing_token: int | None = None
    metrics: RequestTimes | None = None
    error: EngineError | None = None


async def collect(
    deltas: AsyncIterable[Delta], *, prompt: str | None = None, prompt_token_ids: list[int] | None = None
) -> RequestOutput:
    """All of what `AsyncEngine.generate` or `AsyncClient.generate` yields, as one answer; raises what they raise."""
    return assemble([delta async for delta in deltas], prompt=prompt, prompt_token_ids=prompt_token_ids)


def assemble(deltas: Iterable[Delta], *, prompt: str | None, prompt_token_ids: list[int] | None) -> RequestOutput:
    """One request's deltas, in their order, as one answer."""
    choices: dict[int, list[Delta]] = {}
    for delta in deltas:
        choices.setdefault(delta.index, []).append(delta)
    ends = [choice[-1] for choice in choices.values()]
    return RequestOutput(
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        outputs=[_output(index, choices[index]) for index in sorted(choices)],
        num_cached_tokens=max((end.cached_tokens for end in ends), default=0),
        session_tokens=ends[0].session_tokens if ends else None,
        first_differing_token=ends[0].first_differing_token if ends else None,
        metrics=_times([end.timeline for end in ends if end.timeline is not None]),
    )


def _output(index: int, deltas: list[Delta]) -> CompletionOutput:
    logprobs = [entry for delta in deltas for entry in delta.logprobs]
    return CompletionOutput(
        index=index,
        text="".join([delta.text for delta in deltas]),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
        logprobs=logprobs or None,
        reasoning="".join([delta.reasoning for delta in deltas]),
        tool_calls=_tool_calls(news for delta in deltas for news in delta.tool_calls),
    )


def _tool_calls(all_news: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    calls: dict[int, ToolCallDelta] = {}
    for news in all_news:
        call = calls.get(news.index)
        if call is None:
            calls[news.index] = news
        else:
            calls[news.index] = ToolCallDelta(
                news.index, call.id or news.id, call.name or news.name, call.arguments + news.arguments
            )
    return [calls[index] for index in sorted(calls)]


def _times(timelines: list[Timeline]) -> RequestTimes | None:
    if not timelines:
        return None
    first = min(timelines, key=lambda timeline: timeline.seen)
    return RequestTimes(
        queued_ts=first.queued * NS,
        scheduled_ts=first.started * NS,
        first_token_ts=first.seen * NS,
        last_token_ts=max(timeline.finished for timeline in timelines) * NS,
        first_token_latency=(first.seen - first.arrived) * NS,
    )
