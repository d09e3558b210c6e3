"""Log-probabilities of prompts from the real server on the CPU, against transformers in float32, and as lm-eval asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import cache
from operator import itemgetter
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
import torch
from models.smollm2 import model_file, transformers_model
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from asyncengine import AsyncEngine, EngineConfig
from asyncengine.api.app import bound_port, run_app
from asyncengine.sampling import MAX_PROMPT_LOGPROBS
from asyncengine.tokenizer_file import load_tokenizer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

MODEL = "SmolLM2-135M-Instruct"
STORY = "Once upon a time there was a little girl who lived in a village near the forest. Ünï — 🙂."
TOLERANCE = 1e-3


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def url() -> AsyncIterator[str]:
    config = EngineConfig(device="cpu", kv_cache_tokens=4096, max_model_len=512, max_num_seqs=8)
    loading = asyncio.create_task(asyncio.to_thread(reference))
    async with AsyncEngine.start(config) as engine:
        await loading
        runner = await run_app(engine, "127.0.0.1", 0)
        yield f"http://127.0.0.1:{bound_port(runner)}/v1"
        await runner.cleanup()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@cache
def reference() -> LlamaForCausalLM:
    return transformers_model(model_file())


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(model_file())).tokenizer


def encode(text: str) -> list[int]:
    return tokenizer().encode(text).ids


@torch.inference_mode()
def expected_logprobs(tokens: list[int]) -> Tensor:
    """[len(tokens) - 1, vocab]: of what follows each token but the last."""
    return reference()(torch.tensor([tokens])).logits[0, :-1].float().log_softmax(dim=-1)


def check_prompt(scored: list[Any], tokens: list[int], *, num_top: int) -> None:
    """scored: `prompt_logprobs` of an answer."""
    first, *rest = scored
    assert first is None
    assert len(rest) == len(tokens) - 1
    expected = expected_logprobs(tokens)
    for position, items in enumerate(rest):
        own = items[str(tokens[position + 1])]
        assert own["logprob"] == pytest.approx(float(expected[position, tokens[position + 1]]), abs=TOLERANCE)
        assert own["decoded_token"] == token_text(tokens[position + 1])
        by_rank = {item["rank"]: int(token) for token, item in items.items()}
        best = expected[position].topk(num_top).indices.tolist()
        assert [by_rank[rank + 1] for rank in range(num_top)] == best
        assert abs(own["rank"] - 1 - int((expected[position] > expected[position, tokens[position + 1]]).sum())) <= 1
        assert len(items) == num_top + (own["rank"] > num_top)


def token_text(token: int) -> str:
    text = tokenizer().id_to_token(token)
    if token < 17:  # special tokens are spelled as they are
        return text
    return tokenizer().decode([token], skip_special_tokens=False)


async def test_every_token_of_a_prompt_has_the_log_probability_of_transformers(client: openai.AsyncOpenAI) -> None:
    tokens = encode(STORY)
    neighbours = [
        asyncio.create_task(client.completions.create(model=MODEL, prompt=f"{n} is", max_tokens=40)) for n in range(3)
    ]
    long = (tokens * 12)[:300]
    for prompt, num_top in ((tokens, 5), (long, 1)):
        answer = await client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=2, temperature=0, extra_body={"prompt_logprobs": num_top}
        )
        choice = answer.choices[0]
        assert choice.model_extra is not None
        check_prompt(choice.model_extra["prompt_logprobs"], prompt, num_top=num_top)
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 2)
    await asyncio.gather(*neighbours)


async def test_a_chats_prompt_is_scored_with_its_template(client: openai.AsyncOpenAI, url: str) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    asked: Any = {"model": MODEL, "messages": messages, "max_tokens": 3, "extra_body": {"prompt_logprobs": 2}, "n": 2}
    async with aiohttp.ClientSession() as session:
        body = {"messages": messages, "add_special_tokens": False}
        async with session.post(url.removesuffix("/v1") + "/tokenize", json=body) as response:
            tokens = (await response.json())["tokens"]
    whole = await client.chat.completions.create(**asked)
    assert whole.model_extra is not None
    check_prompt(whole.model_extra["prompt_logprobs"], tokens, num_top=2)
    chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
    (scored,) = [chunk.model_extra["prompt_logprobs"] for chunk in chunks if chunk.model_extra]
    check_prompt(scored, tokens, num_top=2)


@pytest.mark.parametrize("max_tokens", [0, 4])
@pytest.mark.parametrize("as_ids", [False, True])
async def test_an_echo_comes_before_each_choice_streamed_or_not(
    client: openai.AsyncOpenAI, max_tokens: int, as_ids: bool
) -> None:
    tokens = encode(STORY)
    prompts: Any = [tokens, encode("A b")] if as_ids else [STORY, "A b"]
    asked: Any = {"model": MODEL, "prompt": prompts, "n": 2, "seed": 1, "echo": True, "logprobs": 2}
    asked["max_tokens"] = max_tokens
    whole = await client.completions.create(**asked)
    plain = await client.completions.create(**asked | {"echo": False, "max_tokens": max(1, max_tokens)})
    streamed: dict[int, list[Any]] = {index: [] for index in range(4)}
    async for chunk in await client.completions.create(**asked, stream=True):
        streamed[chunk.choices[0].index].append(chunk.choices[0])
    assert whole.usage is not None
    assert whole.usage.completion_tokens == sum(max_tokens for _ in range(4))
    for index, choice in enumerate(whole.choices):
        given, ids = ((STORY, tokens), ("A b", encode("A b")))[index // 2]
        answer = plain.choices[index] if max_tokens else None
        assert choice.text == given + (answer.text if answer else "")
        assert choice.finish_reason == "length"
        logprobs = choice.logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.top_logprobs is not None
        assert logprobs.text_offset is not None
        assert logprobs.tokens == [token_text(token) for token in ids] + (answer.logprobs.tokens if answer else [])  # type: ignore[union-attr, operator]
        assert logprobs.token_logprobs[0] is None
        assert logprobs.top_logprobs[0] is None
        expected = expected_logprobs(ids)
        for position, token in enumerate(ids[1:]):
            value = logprobs.token_logprobs[position + 1]
            assert value == pytest.approx(float(expected[position, token]), abs=TOLERANCE)
            tops = list(logprobs.top_logprobs[position + 1].values())[:2]
            assert tops == pytest.approx(expected[position].topk(2).values.tolist(), abs=TOLERANCE)
        for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            assert "\ufffd" in token or choice.text[offset:].startswith(token)
        parts = streamed[index]
        assert "".join(part.text for part in parts) == choice.text
        assert parts[0].text.startswith(given)
        assert parts[-1].finish_reason == "length"
        for column in ("tokens", "text_offset"):
            both = [entry for part in parts if part.logprobs for entry in getattr(part.logprobs, column)]
            assert both == getattr(logprobs, column)


async def test_an_echo_without_logprobs_computes_none(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt=STORY, echo=True, max_tokens=0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (STORY, "length", None)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(encode(STORY)), 0)


async def test_lm_evals_loglikelihood_request_gives_the_sum_of_transformers(url: str) -> None:
    """The body that its `local-completions` sends, and how it reads the answer."""
    pairs = [("The capital of France is", " Paris"), ("The capital of France is", " London"), ("2 + 2 =", " 4")]
    contexts, continuations = ([encode(text) for text in texts] for texts in zip(*pairs, strict=True))
    prompts = [context + continuation for context, continuation in zip(contexts, continuations, strict=True)]
    body = {"model": MODEL, "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    async with aiohttp.ClientSession() as session, session.post(url + "/completions", json=body | {"echo": True}) as r:
        assert r.status == 200
        assert "x-ignored-fields" not in r.headers
        answer = await r.json()
    sums = []
    for choice, context, prompt in zip(
        sorted(answer["choices"], key=itemgetter("index")), contexts, prompts, strict=True
    ):
        values = choice["logprobs"]["token_logprobs"][len(context) : -1]
        tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
        expected = expected_logprobs(prompt)[len(context) - 1 :]
        own = expected.gather(1, torch.tensor(prompt[len(context) :])[:, None])[:, 0]
        sums.append(sum(values))
        assert sums[-1] == pytest.approx(float(own.sum()), abs=TOLERANCE)
        is_greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        assert is_greedy == bool((own == expected.amax(dim=1)).all())
    assert sums[0] > sums[1]


async def test_too_many_log_probabilities_of_a_prompt_are_refused_by_name(client: openai.AsyncOpenAI) -> None:
    tokens = encode(STORY)
    prompt = (tokens * 20)[:400]
    assert 400 * 16 * 21 > MAX_PROMPT_LOGPROBS
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(
            model=MODEL, prompt=prompt, n=16, max_tokens=1, extra_body={"prompt_logprobs": 20}
        )
    assert (refused.value.code, refused.value.param) == ("too_many_logprobs", "prompt_logprobs")
