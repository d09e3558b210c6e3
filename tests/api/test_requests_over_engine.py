"""Tokens, cancelling and timings over the real engine, tokenizer and detokenizer, with the scripted runner."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest
import pytest_asyncio
from api_server import CHAT, COMPLETIONS, Server
from support.python_path import PYTHON_PATH

from asyncengine import AsyncEngine, ChatPrompt, EngineConfig, InvalidRequestError
from asyncengine.api.app import bound_port, run_app

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "Grüße, 世界! 👨‍👩‍👧 in 3 tokens?\r\n"
ENDLESS = {"prompt": [40, 41], "max_tokens": 1900, "ignore_eos": True}


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHON_PATH)
        patch.setenv("ASYNCENGINE_SCRIPT", json.dumps({"step_ms": 2}))
        yield


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine() -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(max_model_len=2048, max_num_seqs=4)
    async with AsyncEngine.start(config, modules={"gpu_runner": "support.scripted_runner"}) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(engine: AsyncEngine) -> AsyncIterator[Server]:
    runner = await run_app(engine, "127.0.0.1", 0)
    async with aiohttp.ClientSession() as session:
        yield Server(f"http://127.0.0.1:{bound_port(runner)}", session)
    await runner.cleanup()


async def idle(engine: AsyncEngine) -> None:
    async with asyncio.timeout(20):
        while (gauges := engine.gauges())["running"] or gauges["waiting"] or gauges["open_streams"]:
            await asyncio.sleep(0.01)
    assert gauges["free_pages"] == gauges["total_pages"]


# ------------------------------------------------------------------------------------------------------------- tokens


async def test_tokens_are_those_that_the_prompt_is_run_as_and_become_its_text_again(server: Server) -> None:
    status, answer = await server.post("/tokenize", {"prompt": TEXT, "return_token_strs": True})
    assert status == 200
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 2048
    _, whole = await server.post(COMPLETIONS, {"prompt": TEXT, "max_tokens": 100, "return_token_ids": True})
    *echoed, _ = whole["choices"][0]["token_ids"]
    assert answer["tokens"] == echoed
    assert await server.post("/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": TEXT})


async def test_a_conversations_tokens_are_those_of_its_template(server: Server) -> None:
    messages = [{"role": "user", "content": "Hi <|im_end|>"}]
    _, answer = await server.post("/tokenize", {"messages": messages, "add_special_tokens": False})
    _, whole = await server.post(CHAT, {"messages": messages, "return_token_ids": True})
    *echoed, _ = whole["choices"][0]["token_ids"]
    assert answer["tokens"] == echoed
    _, shorter = await server.post(
        "/tokenize", {"messages": messages, "add_special_tokens": False, "add_generation_prompt": False}
    )
    assert answer["tokens"][: shorter["count"]] == shorter["tokens"]
    assert shorter["count"] < answer["count"]
    _, text = await server.post("/detokenize", {"tokens": answer["tokens"]})
    assert text["prompt"].endswith("<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n")


async def test_an_empty_text_has_no_tokens(server: Server) -> None:
    status, answer = await server.post("/tokenize", {"prompt": ""})
    assert (status, answer["count"], answer["tokens"]) == (200, 0, [])


async def test_a_text_that_is_longer_than_the_context_is_counted_but_not_one_without_bound(server: Server) -> None:
    status, answer = await server.post("/tokenize", {"prompt": "a b c d " * 1000})
    assert status == 200
    assert answer["count"] > 2048
    status, answer = await server.post("/tokenize", {"prompt": "a b c d " * 100_000})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_ids_outside_the_vocabulary_are_refused_with_their_place(server: Server) -> None:
    for wrong in (49152, 2**31 - 1):
        status, answer = await server.post("/detokenize", {"tokens": [1, wrong]})
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "invalid_token_id", "tokens")
        assert f"tokens[1] is {wrong}" in answer["error"]["message"]


async def test_more_tokens_than_an_answer_can_hold_are_refused(engine: AsyncEngine) -> None:
    with pytest.raises(InvalidRequestError, match="could take"):
        await engine.detokenize([0] * 2_000_000)
    assert await engine.detokenize([1, 2]) == "<|im_start|><|im_end|>"


async def test_python_callers_ask_the_same(engine: AsyncEngine) -> None:
    tokens = await engine.tokenize("one two", texts=True)
    assert tokens.texts == ["one", "Ġtwo"]
    assert await engine.detokenize(tokens.ids) == "one two"
    chat = await engine.tokenize(ChatPrompt(messages=[{"role": "user", "content": "one two"}]))
    assert chat.texts is None
    assert set(tokens.ids[1:]) < set(chat.ids)


async def test_many_questions_at_once_each_get_their_own_answer(engine: AsyncEngine) -> None:
    texts = [f"{number} and {number * number}" for number in range(100)]
    asked = [asyncio.create_task(engine.tokenize(text)) for text in texts]
    left = asyncio.create_task(engine.tokenize("nobody waits for this"))
    await asyncio.sleep(0)
    left.cancel()
    tokens = await asyncio.gather(*asked)
    assert await asyncio.gather(*(engine.detokenize(one.ids) for one in tokens)) == texts
    assert [link.unacked_bytes for link in engine._tokenizers] == [0]


# --------------------------------------------------------------------------------------------------------- cancelling


async def test_a_running_stream_is_cancelled_by_its_id(server: Server, engine: AsyncEngine) -> None:
    body = {**ENDLESS, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    async with server.session.post(server.url + COMPLETIONS, json=body) as response:
        first = json.loads((await response.content.readline())[6:])
        assert (await server.post(f"/v1/requests/{first['id']}/cancel", {}))[0] == 200
        *chunks, usage, done = (await response.read()).decode().strip().split("\n\n")
    ends = [json.loads(chunk[6:])["choices"][0] for chunk in chunks if "abort" in chunk]
    assert sorted((choice["index"], choice["finish_reason"]) for choice in ends) == [(0, "abort"), (1, "abort")]
    assert 2 <= json.loads(usage[6:])["usage"]["completion_tokens"] < 3800
    assert done == "data: [DONE]"
    await idle(engine)
    assert (await server.post(f"/v1/requests/{first['id']}/cancel", {}))[0] == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_waits_is_cancelled_by_the_name_it_was_given(
    server: Server, engine: AsyncEngine, stream: bool
) -> None:
    aborts = engine.totals().counters["finished_abort"]
    async with server.session.post(server.url + COMPLETIONS, json={**ENDLESS, "n": 4, "stream": True}) as running:
        first = json.loads((await running.content.readline())[6:])
        body = {**ENDLESS, "stream": stream, "request_id": "mine"}
        waiting = asyncio.create_task(server.session.post(server.url + COMPLETIONS, json=body))
        async with asyncio.timeout(20):
            while (await server.post("/v1/requests/cmpl-mine/cancel", {}))[0] == 404:
                await asyncio.sleep(0.005)
        response = await waiting
        text = (await response.read()).decode()
        assert response.status == 200
        assert '"text":""' in text
        assert '"finish_reason":"abort"' in text
        assert (await server.post(f"/v1/requests/{first['id']}/cancel", {}))[0] == 200
    await idle(engine)
    assert engine.totals().counters["finished_abort"] == aborts + 5


async def test_all_prompts_of_a_request_are_cancelled_together(server: Server, engine: AsyncEngine) -> None:
    body = {**ENDLESS, "prompt": [[40], [41], [42]], "request_id": "three"}
    waiting = asyncio.create_task(server.post(COMPLETIONS, body))
    async with asyncio.timeout(20):
        while engine._requests.count < 3:
            await asyncio.sleep(0.005)
    assert await engine.cancel("cmpl-three")
    status, whole = await waiting
    assert status == 200
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["abort"] * 3
    await idle(engine)
    assert not await engine.cancel("cmpl-three")
