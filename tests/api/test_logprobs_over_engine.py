"""Log-probabilities over the real engine, tokenizer and detokenizer; the scripted runner repeats each prompt."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from api_server import CHAT, COMPLETIONS, Server, serving
from support.python_path import PYTHON_PATH
from support.scripted_runner import scripted_logprobs
from support.tokenizers_cache import default_model_file

from asyncengine import AsyncEngine, ChatPrompt, EngineConfig, InvalidRequestError, SamplingParams, TokenLogprob
from asyncengine.client import AsyncClient
from asyncengine.tokenizer_file import load_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "Grüße, 世界! 👨‍👩‍👧 in 3 tokens?\r\n"
VOCAB_SIZE = 49152
ASKED: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"stop": ["tok"]},
    {"stop": ["界", "never"]},
    {"stop": ["! 👨"], "include_stop_str_in_output": True},
    {"max_tokens": 3},
    {"max_tokens": 60, "ignore_eos": True},
    {"stop_token_ids": [17], "return_token_ids": True},
    {"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5, "logit_bias": {"5": -100}},
]


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHON_PATH)
        patch.setenv("ASYNCENGINE_SCRIPT", "{}")
        yield


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine() -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(max_model_len=2048)
    async with AsyncEngine.start(config, modules={"gpu_runner": "support.scripted_runner"}) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(engine: AsyncEngine) -> AsyncIterator[Server]:
    async with serving(engine) as server:
        yield server


@pytest.mark.parametrize("asked", ASKED, ids=json.dumps)
@pytest.mark.parametrize("count", [0, 3])
async def test_a_streamed_completion_has_the_logprobs_of_the_whole_one(
    server: Server, asked: dict[str, Any], count: int
) -> None:
    body = {"prompt": [TEXT, "ab"], "max_tokens": 50, "logprobs": count, **asked}
    status, whole = await server.post(COMPLETIONS, body)
    *chunks, _ = await server.events(COMPLETIONS, body)
    assert status == 200
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        logprobs: dict[str, list[Any]] = {name: [] for name in choice["logprobs"]}
        text = ""
        for part in mine:
            text += part["text"]
            for name, column in (part["logprobs"] or {}).items():
                logprobs[name] += column
            assert all(offset < len(text) for offset in logprobs["text_offset"])
        assert (text, logprobs) == (choice["text"], choice["logprobs"])
        assert len({len(column) for column in logprobs.values()}) == 1
        assert all(
            text.startswith(token, offset)
            for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
            if "\ufffd" not in token and offset + len(token) <= len(text)
        )


@pytest.mark.parametrize("asked", ASKED, ids=json.dumps)
async def test_a_streamed_chat_has_the_logprobs_of_the_whole_one(server: Server, asked: dict[str, Any]) -> None:
    body = {
        "messages": [{"role": "user", "content": TEXT}],
        "max_tokens": 100,
        "logprobs": True,
        "top_logprobs": 4,
        "skip_special_tokens": False,
        **asked,
    }
    status, whole = await server.post(CHAT, body)
    *chunks, _ = await server.events(CHAT, body)
    assert status == 200
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        entries = [entry for part in mine for entry in (part["logprobs"] or {"content": []})["content"]]
        assert entries == choice["logprobs"]["content"]
        assert all(len(entry["top_logprobs"]) == 4 for entry in entries)
        if "stop" not in asked:
            text = bytes(byte for entry in entries for byte in entry["bytes"]).decode("utf-8", "replace")
            assert text == choice["message"]["content"]


async def test_every_entry_is_exact(server: Server) -> None:
    tokenizer = load_tokenizer(str(default_model_file())).tokenizer
    ids = tokenizer.encode(TEXT).ids
    _, whole = await server.post(
        COMPLETIONS, {"prompt": ids, "max_tokens": 60, "logprobs": 2, "return_token_ids": True}
    )
    (choice,) = whole["choices"]
    assert choice["token_ids"] == [*ids, 2]
    entries = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in entries] == ids, "all but the end-of-sequence token"
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == TEXT.encode()
    for position, (entry, token) in enumerate(zip(entries, ids, strict=True)):
        logprob, top_ids, top_logprobs = scripted_logprobs(position, token, 2, VOCAB_SIZE)
        assert entry["logprob"] == logprob
        assert [top["token_id"] for top in entry["top_logprobs"]] == top_ids
        assert [top["logprob"] for top in entry["top_logprobs"]] == top_logprobs
        assert choice["logprobs"]["token_logprobs"][position] == logprob


@pytest.mark.parametrize("stop", [(), ("tok",), ("世",)])
@pytest.mark.parametrize("prompt", [TEXT, ChatPrompt(messages=[{"role": "user", "content": TEXT}])])
async def test_the_client_sees_the_entries_that_the_engine_sees(
    server: Server, engine: AsyncEngine, prompt: str | ChatPrompt, stop: tuple[str, ...]
) -> None:
    params = SamplingParams(max_tokens=60, logprobs=3, stop=stop, seed=1, logit_bias=((7, 2.0),))
    direct: list[TokenLogprob] = []
    async for delta in engine.generate(prompt, params):
        direct += delta.logprobs
    over_http: list[TokenLogprob] = []
    async with AsyncClient(server.url) as client:
        async for delta in client.generate(prompt, params):
            over_http += delta.logprobs
    assert over_http == direct
    assert direct
    assert all(isinstance(entry.token, bytes) and len(entry.top) == 3 for entry in direct)


async def test_a_bias_of_a_token_outside_the_vocabulary_is_400(server: Server, engine: AsyncEngine) -> None:
    status, answer = await server.post(COMPLETIONS, {"prompt": "a", "logit_bias": {str(VOCAB_SIZE): 1}})
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "logit_bias", "invalid_token_id")
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        await anext(engine.generate("a", SamplingParams(logit_bias=((VOCAB_SIZE, 1.0),))))
    assert (await server.post(COMPLETIONS, {"prompt": "a"}))[0] == 200
