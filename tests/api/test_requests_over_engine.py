"""Tokens, cancelling and timings over the real engine, tokenizer and detokenizer, with the scripted runner."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from api_server import CHAT, COMPLETIONS, Server, serving
from support.python_path import PYTHON_PATH
from support.tokenizers_cache import default_model_file

from asyncengine import AsyncEngine, ChatPrompt, EngineConfig, InvalidRequestError
from asyncengine.tokenizer_file import load_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "Grüße, 世界! 👨‍👩‍👧 in 3 tokens?\r\n"
ENDLESS = {"prompt": [40, 41], "max_tokens": 1900, "ignore_eos": True}


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHON_PATH)
        patch.setenv("ASYNCENGINE_SCRIPT", json.dumps({"step_ms": 2, "endless_from": 1900}))
        yield


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine() -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(max_model_len=2048, max_num_seqs=4)
    async with AsyncEngine.start(config, modules={"gpu_runner": "support.scripted_runner"}) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(engine: AsyncEngine) -> AsyncIterator[Server]:
    async with serving(engine) as server:
        yield server


async def idle(engine: AsyncEngine) -> None:
    async with asyncio.timeout(60):
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


async def test_the_ids_of_a_prompt_are_those_of_its_tokenizer(server: Server) -> None:
    tokenizer = load_tokenizer(str(default_model_file())).tokenizer
    texts = [TEXT, "<|im_start|>user", "a"]
    expected = [tokenizer.encode(text).ids for text in texts]
    body = {"prompt": texts, "return_token_ids": True, "max_tokens": 2, "ignore_eos": True, "echo": True}
    for prompts in (texts, expected):
        _, whole = await server.post(COMPLETIONS, body | {"prompt": prompts})
        assert [choice["prompt_token_ids"] for choice in whole["choices"]] == expected
        assert [len(choice["token_ids"]) for choice in whole["choices"]] == [2, 2, 2]
        assert whole["usage"]["prompt_tokens"] == sum(map(len, expected))
    *chunks, _ = await server.events(COMPLETIONS, body)
    told = {chunk["choices"][0]["index"]: chunk["choices"][0] for chunk in reversed(chunks)}
    assert [told[index]["prompt_token_ids"] for index in range(3)] == expected

    chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2, "return_token_ids": True}
    _, answer = await server.post(CHAT, chat)
    first, *_ = await server.events(CHAT, chat)
    written = tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)
    assert written.endswith(f"<|im_start|>user\n{TEXT}<|im_end|>\n<|im_start|>assistant\n")
    assert answer["prompt_token_ids"] == first["prompt_token_ids"] == tokenizer.encode(written).ids
    assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])


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


async def test_an_answer_goes_on_where_the_last_message_ends(server: Server) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It is <|im_end|> "}]
    body = {"messages": messages, "continue_final_message": True}
    _, tokenized = await server.post("/tokenize", body)
    _, text = await server.post("/detokenize", {"tokens": tokenized["tokens"]})
    assert text["prompt"].endswith("Hi<|im_end|>\n<|im_start|>assistant\nIt is <|im_end|> ")
    _, whole = await server.post(CHAT, body | {"return_token_ids": True, "add_generation_prompt": False})
    assert whole["choices"][0]["token_ids"][:-1] == tokenized["tokens"]
    for path in ("/tokenize", CHAT):
        for wrong in ({"messages": messages[:1]}, {"add_generation_prompt": True}):
            status, answer = await server.post(path, body | wrong)
            assert (status, answer["error"]["param"]) == (400, "continue_final_message")


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
    assert json.loads(usage[6:])["usage"]["completion_tokens"] >= 2
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
        async with asyncio.timeout(60):
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
    async with asyncio.timeout(60):
        while engine._requests.count < 3:
            await asyncio.sleep(0.005)
    assert await engine.cancel("cmpl-three")
    status, whole = await waiting
    assert status == 200
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["abort"] * 3
    await idle(engine)
    assert not await engine.cancel("cmpl-three")


# ------------------------------------------------------------------------------------------------- parameters, timings


PARTS = ("accept", "tokenize", "queue", "prefill", "detokenize", "decode", "write")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_parts_of_the_timings_are_what_the_client_saw(server: Server, stream: bool) -> None:
    body = {"prompt": TEXT, "max_tokens": 50, "ignore_eos": True, "timings": True, "stream": stream}
    gaps: list[float] = []
    while len(gaps) < 500 and not (gaps and min(gaps) < 5):
        begin = time.monotonic()
        async with server.session.post(server.url + COMPLETIONS, json=body) as response:
            text = (await response.read()).decode()
        seen_ms = 1000 * (time.monotonic() - begin)
        last = json.loads(text.split("\n\n")[-3][6:] if stream else text)
        spent = last["choices"][0]["timings"]
        assert sum(spent[f"{part}_ms"] for part in PARTS) == pytest.approx(spent["total_ms"], abs=0.01)
        assert sum(spent[f"{part}_ms"] for part in PARTS[:5]) == pytest.approx(spent["first_token_ms"], abs=0.01)
        gaps.append(seen_ms - spent["total_ms"])
    assert 0 <= min(gaps) < 5  # the others may have met with a busy machine


async def test_a_priority_needs_the_policy_of_that_name(server: Server) -> None:
    status, answer = await server.post(COMPLETIONS, {"prompt": "a", "priority": -1})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "unsupported_parameter", "priority")
    assert (await server.post(COMPLETIONS, {"prompt": "a", "priority": 0}))[0] == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_stop_token_ends_the_answer_and_is_shown_only_on_request(server: Server, path: str) -> None:
    _, tokens = await server.post("/tokenize", {"prompt": "one two three"})
    stop = tokens["tokens"][1]
    body: dict[str, Any] = {"stop_token_ids": [stop], "return_token_ids": True, "max_tokens": 50}
    if path == COMPLETIONS:
        body |= {"prompt": "one two three"}
    else:
        body |= {"messages": [{"role": "user", "content": "one two three"}]}
    for shown, end in ((False, "one"), (True, "one two")):
        _, whole = await server.post(path, {**body, "include_stop_str_in_output": shown})
        *chunks, _ = await server.events(path, {**body, "include_stop_str_in_output": shown})
        (choice,) = whole["choices"]
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        assert text.endswith(end)
        assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"][-1]) == ("stop", stop, stop)
        streamed = [chunk["choices"][0] for chunk in chunks]
        assert text == "".join(
            each["text"] if path == COMPLETIONS else each["delta"].get("content", "") for each in streamed
        )
        assert streamed[-1]["stop_reason"] == stop


async def test_min_tokens_outlast_a_stop_token(server: Server) -> None:
    _, tokens = await server.post("/tokenize", {"prompt": "one two three"})
    body = {"prompt": "one two three", "stop_token_ids": [tokens["tokens"][0]], "max_tokens": 50}
    _, short = await server.post(COMPLETIONS, body)
    _, longer = await server.post(COMPLETIONS, {**body, "min_tokens": 2})
    assert short["usage"]["completion_tokens"] == 1
    assert longer["usage"]["completion_tokens"] == 4
    assert longer["choices"][0]["text"] == "one two three"


async def test_special_tokens_are_hidden_alike_in_every_way_of_asking(server: Server) -> None:
    prompt = "<|im_start|>a<|im_end|>b"
    for skip, expected in ((True, "ab"), (False, prompt)):
        body = {"prompt": prompt, "skip_special_tokens": skip, "max_tokens": 4, "n": 2}
        _, whole = await server.post(COMPLETIONS, body)
        texts = ["", ""]
        for chunk in (await server.events(COMPLETIONS, body))[:-1]:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert [choice["text"] for choice in whole["choices"]] == texts == [expected] * 2


async def test_continuous_usage_counts_each_choice_up_to_the_whole(server: Server) -> None:
    body = {"prompt": TEXT, "max_tokens": 20, "n": 2, "ignore_eos": True, "return_token_ids": True}
    options = {"continuous_usage_stats": True, "include_usage": True}
    *chunks, total, _ = await server.events(COMPLETIONS, {**body, "stream_options": options})
    counts = [0, 0]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        counts[choice["index"]] += len(choice["token_ids"])
        assert chunk["usage"]["completion_tokens"] == counts[choice["index"]]
        assert chunk["usage"]["prompt_tokens"] == total["usage"]["prompt_tokens"]
    assert counts == [20, 20]
    assert total["usage"]["completion_tokens"] == 40
