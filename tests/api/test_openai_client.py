"""The real `openai` package against the server, sync and async."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from api_server import Server
from fake_backend import ANSWER, MODEL, FakeBackend

from asyncengine.errors import EngineDeadError, InvalidRequestError

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_completion_streamed_is_the_completion_not_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(model=MODEL, prompt="abc")
    chunks = [chunk async for chunk in await client.completions.create(model=MODEL, prompt="abc", stream=True)]
    assert whole.choices[0].text == "0:" + ANSWER
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
    assert whole.choices[0].finish_reason == "stop"
    assert whole.object == "text_completion"
    assert whole.id.startswith("cmpl-")
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (3, 5, 8)
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 2


async def test_chat_streamed_is_the_chat_not_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model=MODEL, messages=HELLO)
    stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    chunks = [chunk async for chunk in stream]
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == "0:" + ANSWER
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", None, None, None, None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, None, "stop"]
    assert whole.id.startswith("chatcmpl-")
    assert (whole.object, chunks[0].object) == ("chat.completion", "chat.completion.chunk")


async def test_sync_client_in_a_thread(server: Server) -> None:
    def talk() -> tuple[str, str, list[str]]:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            chat = client.chat.completions.create(model=MODEL, messages=HELLO)
            text = "".join(
                chunk.choices[0].text for chunk in client.completions.create(model=MODEL, prompt="a", stream=True)
            )
            return chat.choices[0].message.content or "", text, [model.id for model in client.models.list()]

    assert await asyncio.to_thread(talk) == ("0:" + ANSWER, "0:" + ANSWER, [MODEL])


async def test_usage_chunk_reaches_the_client(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert [chunk.usage is not None for chunk in chunks] == [False] * 5 + [True]
    assert chunks[-1].choices == []


async def test_refusals_are_the_clients_own_exceptions(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        await client.completions.create(model="other", prompt="a")
    assert not_found.value.code == "model_not_found"
    backend.refusal = InvalidRequestError("too long: 10 of 5", code="context_length_exceeded", param="prompt")
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model=MODEL, messages=HELLO, stream=stream)
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")


async def test_engine_death_in_mid_stream_raises_in_the_client(
    client: openai.AsyncOpenAI, backend: FakeBackend
) -> None:
    backend.failure, backend.fail_after = EngineDeadError("gpu_runner died"), 2
    texts = []
    with pytest.raises(openai.APIError, match="gpu_runner died"):  # noqa: PT012 - the loop is what raises
        async for chunk in await client.completions.create(model=MODEL, prompt="a", stream=True):
            texts.append(chunk.choices[0].text)
    assert texts == ["0:Hel"]


async def test_sampling_fields_reach_the_engine(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    await client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_completion_tokens=3,
        temperature=0,
        top_p=0.5,
        seed=7,
        stop=["x", "y"],
        n=2,
        extra_body={"top_k": 5, "min_p": 0.1, "min_tokens": 1, "ignore_eos": True, "priority": -3},
    )
    params = backend.calls[0][1]
    assert (params.max_tokens, params.temperature, params.top_p, params.seed) == (3, 0.0, 0.5, 7)
    assert (params.stop, params.n, params.top_k, params.min_p) == (("x", "y"), 2, 5, 0.1)
    assert (params.min_tokens, params.ignore_eos, params.priority) == (1, True, -3)


async def test_a_completions_logprobs_are_the_clients_own_type(
    client: openai.AsyncOpenAI, backend: FakeBackend
) -> None:
    backend.pieces = ("a", "é", "")
    whole = await client.completions.create(model=MODEL, prompt="abc", logprobs=1)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["0:a", "é", ""]
    assert logprobs.token_logprobs == [-0.5, -1.0, -1.5]
    assert logprobs.text_offset == [0, 3, 4]
    assert logprobs.top_logprobs == [{"0": 0.0, "0:a": -0.5}, {"0": 0.0, "é": -1.0}, {"0": 0.0, "": -1.5}]
    assert logprobs.model_extra == {}


async def test_a_chats_logprobs_are_the_clients_own_type(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    backend.pieces = ("a", "é", "")
    whole = await client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.refusal is None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["0:a", "é", ""]
    assert [entry.bytes for entry in logprobs.content] == [[48, 58, 97], [0xC3, 0xA9], None]
    assert [entry.logprob for entry in logprobs.content] == [-0.5, -1.0, -1.5]
    tops = [(top.token, top.bytes, top.logprob) for top in logprobs.content[0].top_logprobs]
    assert tops == [("0", [48], 0.0), ("1", [49], -0.5)]
    assert logprobs.content[0].model_extra == {}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("logprobs", [0, 1, 5, 20])
async def test_streamed_completion_logprobs_are_those_not_streamed(
    client: openai.AsyncOpenAI, n: int, logprobs: int
) -> None:
    asked: Any = {"model": MODEL, "prompt": "abc", "logprobs": logprobs, "n": n}
    whole = await client.completions.create(**asked)
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    streamed: list[dict[str, list[Any]]] = [{name: [] for name in names} for _ in range(n)]
    async for chunk in await client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            for name in names if choice.logprobs else ():
                streamed[choice.index][name] += getattr(choice.logprobs, name)
    assert streamed == [{name: getattr(choice.logprobs, name) for name in names} for choice in whole.choices]
    assert len(streamed[0]["tokens"]) == 5


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("top_logprobs", [None, 0, 3, 20])
async def test_streamed_chat_logprobs_are_those_not_streamed(
    client: openai.AsyncOpenAI, n: int, top_logprobs: int | None
) -> None:
    asked: Any = {"model": MODEL, "messages": HELLO, "logprobs": True, "top_logprobs": top_logprobs, "n": n}
    whole = await client.chat.completions.create(**asked)
    streamed: list[list[Any]] = [[] for _ in range(n)]
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.logprobs.content or [] if choice.logprobs else []
    assert streamed == [choice.logprobs.content for choice in whole.choices]
    assert [len(entry.top_logprobs) for entry in streamed[0]] == [top_logprobs or 0] * 5


async def test_nobody_gets_logprobs_unasked(client: openai.AsyncOpenAI) -> None:
    completion = await client.completions.create(model=MODEL, prompt="abc")
    chat = await client.chat.completions.create(model=MODEL, messages=HELLO)
    assert completion.choices[0].logprobs is chat.choices[0].logprobs is None
    async for chunk in await client.completions.create(model=MODEL, prompt="abc", stream=True):
        assert chunk.choices[0].logprobs is None


async def test_penalties_and_bias_reach_the_engine(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    asked: Any = {"model": MODEL, "presence_penalty": 0.5, "frequency_penalty": -1, "logit_bias": {"50": -100, "7": 3}}
    await client.completions.create(prompt="a", **asked, extra_body={"repetition_penalty": 1.2})
    await client.chat.completions.create(messages=HELLO, **asked, extra_body={"repetition_penalty": 1.2})
    for _, params in backend.calls:
        assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -1, 1.2)
        assert params.logit_bias == ((50, -100), (7, 3))


async def test_refused_adjustments_name_their_parameter(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model=MODEL, messages=HELLO, top_logprobs=2)
    assert refused.value.param == "top_logprobs"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model=MODEL, prompt="a", logit_bias={"5": 101})
    assert refused.value.param == "logit_bias"
    assert backend.calls == []
