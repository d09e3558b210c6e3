"""HTTP over the real engine, tokenizer and detokenizer; the scripted runner repeats each prompt."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from api_server import CHAT, COMPLETIONS, Server, serving
from support.python_path import PYTHON_PATH

from asyncengine import AsyncEngine, ChatPrompt, EngineConfig, SamplingParams
from asyncengine.api.app import bound_port, run_app
from asyncengine.client import AsyncClient

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "Grüße, 世界! 👨‍👩‍👧 in 3 tokens?\r\n"
MESSAGES = [{"role": "user", "content": TEXT}]


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHON_PATH)
        patch.setenv("ASYNCENGINE_SCRIPT", json.dumps({"refuse_longer_than": 1000, "endless_from": 1900}))
        yield


def start_engine() -> AsyncEngine:
    return AsyncEngine.start(EngineConfig(max_model_len=2048), modules={"gpu_runner": "support.scripted_runner"})


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine() -> AsyncIterator[AsyncEngine]:
    async with start_engine() as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(engine: AsyncEngine) -> AsyncIterator[Server]:
    async with serving(engine) as server:
        yield server


async def test_a_completion_comes_back_streamed_or_not(server: Server) -> None:
    status, whole = await server.post(COMPLETIONS, {"prompt": [TEXT, "b"], "n": 2, "max_tokens": 100})
    *chunks, usage, done = await server.events(
        COMPLETIONS, {"prompt": [TEXT, "b"], "n": 2, "max_tokens": 100, "stream_options": {"include_usage": True}}
    )
    texts = [""] * 4
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert status == 200
    assert texts == [TEXT, TEXT, "b", "b"]
    assert [choice["text"] for choice in whole["choices"]] == texts
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["stop"] * 4
    assert usage["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert done == "[DONE]"


async def test_a_chat_comes_back_streamed_or_not(server: Server) -> None:
    body = {"messages": MESSAGES, "skip_special_tokens": False, "stop": ["<|im_start|>assistant"]}
    status, whole = await server.post(CHAT, body)
    *chunks, _ = await server.events(CHAT, body)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert status == 200
    assert text.endswith(f"<|im_start|>user\n{TEXT}<|im_end|>\n")
    (choice,) = whole["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert choice["stop_reason"] == chunks[-1]["choices"][0]["stop_reason"] == "<|im_start|>assistant"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"prompt": ""}, "empty_prompt"),
        ({"prompt": [49152]}, "invalid_token_id"),
        ({"prompt": [[1], [5, 2**31 - 1]]}, "invalid_token_id"),
        ({"prompt": [1] * 2048}, "context_length_exceeded"),
        ({"prompt": [1] * 1001}, "context_length_exceeded"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_of_every_process_are_400(server: Server, body: dict, code: str, stream: bool) -> None:
    status, answer = await server.post(COMPLETIONS, {**body, "stream": stream})
    assert (status, answer["error"]["code"]) == (400, code)
    assert (await server.post(COMPLETIONS, {"prompt": "a"}))[0] == 200


async def test_clients_that_leave_free_the_rows(server: Server, engine: AsyncEngine) -> None:
    endless = SamplingParams(max_tokens=1900, ignore_eos=True)
    async with AsyncClient(server.url) as client:

        async def leave_early(prompt: str | ChatPrompt) -> None:
            async with aclosing(client.generate(prompt, endless)) as deltas:
                await anext(deltas)

        await asyncio.gather(
            *[leave_early("abc") for _ in range(8)], leave_early(ChatPrompt(messages=[dict(MESSAGES[0])]))
        )
    async with asyncio.timeout(60):
        while (gauges := engine.gauges())["running"] or gauges["open_streams"]:
            await asyncio.sleep(0.01)
    assert gauges["free_pages"] == gauges["total_pages"]


async def test_the_client_sees_what_the_engine_sees(server: Server, engine: AsyncEngine) -> None:
    params = SamplingParams(max_tokens=50, stop=("tok",), seed=1)
    direct = [delta async for delta in engine.generate(TEXT, params)]
    async with AsyncClient(server.url) as client:
        over_http = [delta async for delta in client.generate(TEXT, params)]
    for deltas in (direct, over_http):
        assert "".join(delta.text for delta in deltas) == TEXT[: TEXT.index("tok")]
        assert sum(len(delta.token_ids) for delta in deltas) == deltas[-1].completion_tokens
    assert over_http[-1].prompt_tokens == direct[-1].prompt_tokens
    assert (over_http[-1].finish_reason, over_http[-1].stop_reason) == ("stop", "tok")


async def last_of_stream(server: Server, prompt: list[int]) -> Any:
    """The last event, or the answer where the error came before there was anything to stream."""
    async with server.session.post(server.url + COMPLETIONS, json={"prompt": prompt, "stream": True}) as response:
        return json.loads((await response.text()).strip().split("\n\n")[-1].removeprefix("data: "))


async def test_a_token_that_is_none_fails_its_own_request_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCENGINE_SCRIPT", json.dumps({"instead": {"41": -1, "42": 49157}}))
    async with start_engine() as engine, serving(engine) as server:
        good = [server.post(COMPLETIONS, {"prompt": [40, 43, 44]}) for _ in range(6)]
        bad = [server.post(COMPLETIONS, {"prompt": [40, token, 44]}) for token in (41, 42)]
        streamed = [last_of_stream(server, [40, token, 44]) for token in (41, 42)]
        answers = await asyncio.gather(*good, *bad, *streamed)
        assert {(status, answer["choices"][0]["finish_reason"]) for status, answer in answers[:6]} == {(200, "stop")}
        for id, whole, last in zip((-1, 49157), answers[6:8], answers[8:], strict=True):
            message = f"the model produced token id {id}, which is outside its tokenizer's vocabulary"
            error = {"message": message, "type": "server_error", "param": None, "code": "invalid_output_token"}
            assert whole == (500, {"error": error})
            assert last == {"error": error}
        async with server.session.get(server.url + "/metrics") as response:
            ends = dict(re.findall(r'request_success_total{.*finished_reason="(\w+)"} (\d+)', await response.text()))
        assert (ends["error"], ends["stop"]) == ("4", "6")


async def test_an_echo_has_every_character_of_its_prompt(server: Server) -> None:
    for prompt in ("AB\0CD", "\0", "é😀b", TEXT):
        _, tokens = await server.post("/tokenize", {"prompt": prompt})
        body = {"prompt": prompt, "echo": True, "max_tokens": 0}
        status, answer = await server.post(COMPLETIONS, body)
        assert (status, answer["choices"][0]["text"]) == (200, prompt)
        assert answer["usage"]["prompt_tokens"] == tokens["count"]
        _, of_ids = await server.post(COMPLETIONS, body | {"prompt": tokens["tokens"]})
        assert of_ids["choices"][0]["text"] == prompt


async def test_an_engine_that_is_closed_ends_its_streams_with_an_error() -> None:
    engine = await start_engine()
    runner = await run_app(engine, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{bound_port(runner)}"
    body = {"prompt": "abc", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession() as session:
        async with session.post(url + COMPLETIONS, json=body) as response:
            await response.content.readuntil(b"\n\n")
            await engine.close()
            *_, last, end = (await response.read()).split(b"\n\n")
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_dead"
        assert end == b""
        async with session.get(url + "/health") as response:
            assert (response.status, (await response.json())["status"]) == (503, "closed")
    await runner.cleanup()
