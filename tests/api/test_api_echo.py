"""Prompts in front of their answers, and their log-probabilities in the shapes of OpenAI and vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from api_server import CHAT, COMPLETIONS, Server
from fake_backend import ANSWER, FakeBackend

from asyncengine.sampling import SamplingParams


def logprobs_of(prompt: str, index: int, num_top: int) -> dict[str, Any]:
    """What an echo has of the first generated token and all before it; the tokenizer has put "<s>" before the text."""
    likely = [{f"t{t}": -k / 8 - t for t in range(num_top)} for k in range(1, len(prompt) + 1)]
    return {
        "tokens": ["<s>", *prompt, f"{index}:Hel"],
        "token_logprobs": [None, *(-k / 4 for k in range(1, len(prompt) + 1)), -0.5],
        "top_logprobs": [
            None,
            *(tops | {char: -k / 4} for k, (char, tops) in enumerate(zip(prompt, likely, strict=True), start=1)),
            {"0": 0.0, "1": -0.5, f"{index}:Hel": -0.5} if num_top == 2 else {f"{index}:Hel": -0.5},
        ],
        "text_offset": [0, *range(len(prompt)), len(prompt)],
    }


@pytest.mark.parametrize("num_top", [0, 2])
async def test_each_choice_of_each_prompt_begins_with_its_prompt_and_that_ones_logprobs(
    server: Server, backend: FakeBackend, num_top: int
) -> None:
    prompts: list[Any] = [[100, 101], [97, 98, 99]]
    body = {"prompt": prompts, "n": 2, "echo": True, "logprobs": num_top, "max_tokens": 1, "prompt_logprobs": 1}
    status, whole = await server.post(COMPLETIONS, body)
    assert status == 200
    assert {params.prompt_logprobs for _, params in backend.calls} == {max(num_top, 1)}
    assert [choice["text"] for choice in whole["choices"]] == ["de0:Hel", "de1:Hel", "abc0:Hel", "abc1:Hel"]
    *chunks, _ = await server.events(COMPLETIONS, body)
    streamed = {chunk["choices"][0]["index"]: chunk["choices"][0] for chunk in chunks}
    for choice in whole["choices"]:
        prompt = ("de", "abc")[choice["index"] // 2]
        assert choice["logprobs"] == logprobs_of(prompt, choice["index"] % 2, num_top)
        assert choice["prompt_logprobs"] == [
            None,
            *(
                {
                    str(200 + k): {"logprob": -k / 4, "rank": 2, "decoded_token": char},
                    "300": {"logprob": -k / 8, "rank": 1, "decoded_token": "t0"},
                }
                for k, char in enumerate(prompt, start=1)
            ),
        ]
        assert streamed[choice["index"]] == choice


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_alone_asks_for_no_logprobs_and_reaches_only_the_first_chunk(
    server: Server, backend: FakeBackend, stream: bool
) -> None:
    body = {"prompt": ["ab", "c"], "echo": True}
    if stream:
        *chunks, _ = await server.events(COMPLETIONS, body)
        texts = ["".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) for i in range(2)]
        assert all(chunk["choices"][0]["logprobs"] is None for chunk in chunks)
    else:
        _, whole = await server.post(COMPLETIONS, body)
        texts = [choice["text"] for choice in whole["choices"]]
        assert all(choice["logprobs"] is None and "prompt_logprobs" not in choice for choice in whole["choices"])
    assert texts == ["ab0:" + ANSWER, "c0:" + ANSWER]
    assert {params for _, params in backend.calls} == {SamplingParams(max_tokens=16)}


async def test_no_token_is_asked_for_and_none_is_counted_with_max_tokens_0(server: Server) -> None:
    body = {"prompt": "ab", "echo": True, "max_tokens": 0, "logprobs": 1}
    _, whole = await server.post(COMPLETIONS, body)
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["tokens"] == ["<s>", "a", "b"]
    assert whole["usage"]["completion_tokens"] == 0
    chunk, _ = await server.events(COMPLETIONS, body)
    assert chunk["choices"] == whole["choices"]


async def test_a_chats_prompt_is_told_once_whatever_the_number_of_choices(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "prompt_logprobs": 0}
    _, whole = await server.post(CHAT, body)
    assert [list(items or {}) for items in whole["prompt_logprobs"]] == [[], *([str(201 + k)] for k in range(6))]
    assert all("prompt_logprobs" not in choice for choice in whole["choices"])
    *chunks, _ = await server.events(CHAT, body)
    told = [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk]
    assert told == [whole["prompt_logprobs"]]
