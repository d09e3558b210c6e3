"""An answer of either endpoint, whole or as the events of a stream, in one form in which the two must be equal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def of_whole(answer: dict[str, Any]) -> dict[str, Any]:
    """Of a response that came as a whole; of a refusal, that."""
    if "error" in answer:
        return answer
    folded = {name: answer.get(name) for name in ("usage", "prompt_logprobs", "prompt_token_ids")}
    return folded | _maker(answer) | {"choices": [_choice([choice]) for choice in answer["choices"]]}


def of_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a stream's events without "[DONE]", the last of which tells the usage."""
    *chunks, last = events
    assert last["choices"] == []
    pieces: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks:
        assert chunk.get("usage") is None or chunk["usage"]["prompt_tokens"] <= last["usage"]["prompt_tokens"]
        for choice in chunk["choices"]:
            pieces.setdefault(choice["index"], []).append(choice)
    for parts in pieces.values():
        assert [part["finish_reason"] is not None for part in parts] == [False] * (len(parts) - 1) + [True]
    (prompt, *more) = [chunk["prompt_logprobs"] for chunk in chunks if chunk.get("prompt_logprobs")] or [None]
    assert not more
    assert all(_maker(chunk) == _maker(last) for chunk in chunks)
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    folded = {"usage": last["usage"], "prompt_logprobs": prompt, "prompt_token_ids": chunks[0].get("prompt_token_ids")}
    return folded | _maker(last) | {"choices": [_choice(pieces[index]) for index in sorted(pieces)]}


def _maker(answer: dict[str, Any]) -> dict[str, str]:
    return {name: answer[name] for name in ("model", "system_fingerprint")}


def _choice(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One choice, of its one or more parts."""
    messages = [part.get("message") or part.get("delta") or {"content": part.get("text")} for part in parts]
    calls: dict[int, list[str]] = {}
    for message in messages:
        for place, call in enumerate(message.get("tool_calls") or []):
            name_and_arguments = calls.setdefault(call.get("index", place), ["", ""])
            name_and_arguments[0] += call["function"].get("name") or ""
            name_and_arguments[1] += call["function"].get("arguments") or ""
    assert all(message.get("reasoning") == message.get("reasoning_content") for message in messages)
    (prompt, *more) = [part["prompt_logprobs"] for part in parts if part.get("prompt_logprobs")] or [None]
    assert not more
    assert not any("prompt_token_ids" in part for part in parts[1:])
    return {
        "index": parts[0]["index"],
        "text": _joined(message.get("content") for message in messages),
        "reasoning": _joined(message.get("reasoning") for message in messages),
        "tool_calls": [calls[index] for index in sorted(calls)],
        "finish_reason": parts[-1]["finish_reason"],
        "stop_reason": parts[-1].get("stop_reason"),
        "token_ids": [token for part in parts for token in part.get("token_ids", [])],
        "prompt_logprobs": prompt,
        "prompt_token_ids": parts[0].get("prompt_token_ids"),
        "logprobs": _logprobs([part["logprobs"] for part in parts if part["logprobs"]]),
        "timings": sorted(parts[-1].get("timings", {})),
    }


def _joined(texts: Iterable[str | None]) -> str:
    return "".join(text or "" for text in texts)


def _logprobs(columns: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """All columns one behind the other; none where there is nothing in them."""
    joined: dict[str, list[Any]] = {}
    for each in columns:
        for name, values in each.items():
            joined.setdefault(name, []).extend(values or [])
    return {name: values for name, values in joined.items() if values}
