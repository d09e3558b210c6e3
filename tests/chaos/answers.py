"""An answer in one form, however it came, so that any two can be compared: whole JSON, a stream, part of a stream."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from chaos.exchange import Reply


class WrongAnswerError(Exception):
    """An answer breaks a rule that holds whatever was asked."""


@dataclass
class Choice:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class Answer:
    """Choices by index. usage: prompt tokens and completion tokens; None in part of a stream. Cached tokens are left
    out, for they depend on who came before."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: tuple[int, int] | None = None


def answer_of(reply: Reply) -> Answer:
    """Raises `WrongAnswerError` for what is no complete answer, or one with anything twice or missing."""
    if reply.broken:
        raise WrongAnswerError(reply.broken)
    if reply.status != 200:
        raise WrongAnswerError(f"HTTP {reply.status}: {reply.body[:300].decode(errors='replace')}")
    if not reply.headers["content-type"].startswith("text/event-stream"):
        answer = Answer()
        _add(json.loads(reply.body), answer)
    else:
        events = _events(reply.body)
        if events.count("[DONE]") != 1 or events[-1] != "[DONE]":
            raise WrongAnswerError(f"{events.count('[DONE]')} times [DONE], the last event is {events[-1][:300]}")
        answer = _folded(events[:-1])
    if answer.usage is None:
        raise WrongAnswerError("there is no usage")
    for index, choice in answer.choices.items():
        if choice.finish_reason is None:
            raise WrongAnswerError(f"choice {index} has no finish_reason")
    return answer


def part_of(reply: Reply) -> Answer:
    """What a client that left had of a stream. Raises `WrongAnswerError`."""
    if not reply.headers.get("content-type", "").startswith("text/event-stream"):
        return Answer()
    return _folded([event for event in _events(reply.body[: reply.body.rfind(b"\n\n") + 2]) if event != "[DONE]"])


def difference(got: Answer, expected: Answer, *, tolerance: float) -> str:
    """Where two complete answers first differ, "" where they do not. tolerance: between log-probabilities."""
    if got.usage != expected.usage:
        return f"usage is {got.usage}, expected {expected.usage}"
    if got.choices.keys() != expected.choices.keys():
        return f"choices are {sorted(got.choices)}, expected {sorted(expected.choices)}"
    for index, right in expected.choices.items():
        choice = got.choices[index]
        for name in ("text", "token_ids", "finish_reason", "stop_reason"):
            if getattr(choice, name) != getattr(right, name):
                return f"choice {index}: {name} is {getattr(choice, name)!r}, expected {getattr(right, name)!r}"
        if not alike(choice.logprobs, right.logprobs, tolerance):
            return f"choice {index}: logprobs are {choice.logprobs}, expected {right.logprobs}"
    return ""


def departure(got: Answer, expected: Answer) -> str:
    """Where part of a stream departs from the whole answer, "" where it does not."""
    for index, choice in got.choices.items():
        right = expected.choices[index]
        if not right.text.startswith(choice.text):
            return f"choice {index}: the text begins with {choice.text!r}, expected {right.text!r}"
        if right.token_ids[: len(choice.token_ids)] != choice.token_ids:
            return f"choice {index}: token_ids begin with {choice.token_ids}, expected {right.token_ids}"
    return ""


def alike(got: Any, expected: Any, tolerance: float) -> bool:
    """Equal plain data, but for numbers with a fraction, which may differ by `tolerance`."""
    if isinstance(expected, float) and isinstance(got, float):
        return math.isclose(got, expected, rel_tol=0, abs_tol=tolerance)
    if isinstance(expected, dict) and isinstance(got, dict):
        return got.keys() == expected.keys() and all(alike(got[key], expected[key], tolerance) for key in expected)
    if isinstance(expected, list) and isinstance(got, list):
        return len(got) == len(expected) and all(map(alike, got, expected, [tolerance] * len(got)))
    return bool(got == expected)


def _events(body: bytes) -> list[str]:
    events = body.decode().removesuffix("\n\n").split("\n\n")
    if not all(event.startswith("data: ") for event in events):
        raise WrongAnswerError(f"no events: {body[:300]!r}")
    return [event.removeprefix("data: ") for event in events]


def _folded(events: list[str]) -> Answer:
    answer = Answer()
    for event in events:
        _add(json.loads(event), answer)
    return answer


def _add(data: Any, answer: Answer) -> None:
    """Add an event, or a whole answer, to what is there."""
    if "error" in data:
        raise WrongAnswerError(f"an error within the answer: {data['error']}")
    for news in data["choices"]:
        choice = answer.choices.setdefault(news["index"], Choice())
        if choice.finish_reason is not None:
            raise WrongAnswerError(f"choice {news['index']} goes on after its finish_reason: {news}")
        said = news.get("delta") or news.get("message") or {"content": news.get("text")}
        choice.text += said.get("content") or ""
        choice.token_ids += news.get("token_ids") or []
        for name, entries in (news["logprobs"] or {}).items():
            choice.logprobs.setdefault(name, []).extend(entries or [])
        choice.finish_reason = news["finish_reason"]
        choice.stop_reason = news.get("stop_reason")
    if usage := data.get("usage"):
        if answer.usage is not None:
            raise WrongAnswerError("there is a second usage")
        _check(usage)
        answer.usage = usage["prompt_tokens"], usage["completion_tokens"]


def _check(usage: Any) -> None:
    """What is told of the cache and of the session depends on who came before, but not on nothing."""
    prompt, details = usage["prompt_tokens"], usage["prompt_tokens_details"]
    differs, session = details.get("first_differing_token"), details.get("session_tokens", 0)
    if details["cached_tokens"] > prompt or (differs is not None and (differs >= session or differs > prompt)):
        raise WrongAnswerError(f"the usage contradicts itself: {usage}")
