"""Log-probabilities and what adjusts the logits, from the real server on the CPU, against transformers in float32."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import cache
from typing import Any

import openai
import pytest
import pytest_asyncio
import torch
from models.smollm2 import model_file, transformers_model
from openai.types import CompletionChoice
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from asyncengine import AsyncEngine, EngineConfig
from asyncengine.api.app import bound_port, run_app
from asyncengine.tokenizer_file import load_tokenizer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

MODEL = "SmolLM2-135M-Instruct"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
STORY = "Once upon a time there was a little girl who lived in a village near the forest."
REPEATING = "one two one two one two one two one two"
TOLERANCE = 1e-3


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    config = EngineConfig(device="cpu", kv_cache_tokens=4096, max_model_len=512, max_num_seqs=8)
    loading = asyncio.create_task(asyncio.to_thread(reference))
    async with AsyncEngine.start(config) as engine:
        await loading
        runner = await run_app(engine, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{bound_port(runner)}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client
        await runner.cleanup()


@cache
def reference() -> LlamaForCausalLM:
    return transformers_model(model_file())


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(model_file())).tokenizer


def encode(text: str) -> list[int]:
    return tokenizer().encode(text).ids


@torch.inference_mode()
def logits_of(prompt: list[int], output: list[int]) -> Tensor:
    """[len(output), vocab] float32: what the model makes of everything before each token of `output`."""
    return reference()(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :].float()


async def complete(client: openai.AsyncOpenAI, prompt: list[int], **asked: Any) -> CompletionChoice:
    """A choice with its token ids, greedy unless asked otherwise."""
    own = {name: asked.pop(name) for name in ("repetition_penalty", "ignore_eos") if name in asked}
    arguments: dict[str, Any] = {"model": MODEL, "prompt": prompt, "temperature": 0} | asked
    reply = await client.completions.create(**arguments, extra_body={"return_token_ids": True} | own)
    return reply.choices[0]


def ids_of(choice: CompletionChoice) -> list[int]:
    assert choice.model_extra is not None
    return choice.model_extra["token_ids"]


def entries_of(choice: CompletionChoice) -> list[dict[str, Any]]:
    """One object a token, as in a chat, with token ids."""
    assert choice.logprobs is not None
    assert choice.logprobs.model_extra is not None
    return choice.logprobs.model_extra["content"]


def check_logprobs(prompt: list[int], choice: CompletionChoice, *, num_top: int) -> None:
    entries = entries_of(choice)
    output = [entry["token_id"] for entry in entries]
    assert output == ids_of(choice)[: len(output)]
    expected = logits_of(prompt, output).log_softmax(dim=-1)
    for position, entry in enumerate(entries):
        assert entry["logprob"] == pytest.approx(float(expected[position, entry["token_id"]]), abs=TOLERANCE)
        tops = entry["top_logprobs"]
        values = [top["logprob"] for top in tops]
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx(expected[position].topk(num_top).values.tolist(), abs=TOLERANCE)
        ids = [top["token_id"] for top in tops]
        assert len(set(ids)) == num_top
        assert values == pytest.approx(expected[position, ids].tolist(), abs=TOLERANCE)


async def test_greedy_tokens_have_the_logprobs_of_transformers(client: openai.AsyncOpenAI) -> None:
    prompt = encode(STORY)
    for num_top in (5, 0, 20):  # the second and third find the prompt in the prefix cache
        choice = await complete(client, prompt, max_tokens=8, logprobs=num_top)
        assert len(entries_of(choice)) == 8
        check_logprobs(prompt, choice, num_top=num_top)
        if num_top:
            assert all(entry["top_logprobs"][0]["token_id"] == entry["token_id"] for entry in entries_of(choice))


async def test_sampled_and_adjusted_tokens_have_the_logprobs_of_the_raw_logits(client: openai.AsyncOpenAI) -> None:
    prompt = encode(STORY)
    choice = await complete(
        client,
        prompt,
        max_tokens=12,
        logprobs=3,
        temperature=1.5,
        top_p=0.95,
        seed=3,
        presence_penalty=1.5,
        frequency_penalty=0.5,
        repetition_penalty=1.3,
        logit_bias={"260": 4, "28": -100},
    )
    check_logprobs(prompt, choice, num_top=3)


async def test_streamed_logprobs_are_those_not_streamed_in_both_shapes(client: openai.AsyncOpenAI) -> None:
    chat: Any = {"model": MODEL, "messages": QUESTION, "temperature": 0, "logprobs": True, "top_logprobs": 4}
    whole = (await client.chat.completions.create(**chat)).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.content is not None
    assert "".join(entry.token for entry in whole.logprobs.content) == "The capital of France is Paris."
    streamed: list[Any] = []
    async for chunk in await client.chat.completions.create(**chat, stream=True):
        logprobs = chunk.choices[0].logprobs
        streamed += (logprobs.content or []) if logprobs else []
    assert [entry.token for entry in streamed] == [entry.token for entry in whole.logprobs.content]
    assert [entry.logprob for entry in streamed] == pytest.approx(
        [entry.logprob for entry in whole.logprobs.content], abs=TOLERANCE
    )
    texts: Any = {"model": MODEL, "prompt": STORY, "temperature": 0, "max_tokens": 6, "logprobs": 2}
    completion = (await client.completions.create(**texts)).choices[0]
    tokens: list[str] = []
    offsets: list[int] = []
    async for part in await client.completions.create(**texts, stream=True):
        if part.choices[0].logprobs:
            tokens += part.choices[0].logprobs.tokens or []
            offsets += part.choices[0].logprobs.text_offset or []
    assert completion.logprobs is not None
    assert (tokens, offsets) == (completion.logprobs.tokens, completion.logprobs.text_offset)
    assert "".join(tokens) == completion.text


async def test_a_bias_of_100_forces_a_token_and_of_minus_100_forbids_it(client: openai.AsyncOpenAI) -> None:
    prompt = encode(STORY)
    (forced,) = encode(" Paris")
    choice = await complete(client, prompt, max_tokens=4, logit_bias={str(forced): 100})
    assert ids_of(choice) == [forced] * 4
    plain = ids_of(await complete(client, prompt, max_tokens=8))
    forbidden = {str(token): -100 for token in set(plain)}
    other = ids_of(await complete(client, prompt, max_tokens=8, logit_bias=forbidden))
    assert not set(plain) & set(other)


async def test_a_strong_frequency_penalty_stops_repetition(client: openai.AsyncOpenAI) -> None:
    prompt = encode(REPEATING)
    plain = ids_of(await complete(client, prompt, max_tokens=16))
    assert len(set(plain)) <= 4
    varied = ids_of(await complete(client, prompt, max_tokens=16, frequency_penalty=2, ignore_eos=True))
    assert len(set(varied)) >= 12


def adjusted(logits: Tensor, prompt: list[int], output: list[int], asked: dict[str, Any]) -> Tensor:
    """logits: [vocab], the model's own after `prompt` and `output`."""
    logits = logits.clone()
    for token, bias in asked.get("logit_bias", {}).items():
        logits[int(token)] += bias
    for token in set(prompt + output):
        penalty = asked.get("repetition_penalty", 1.0)
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(output):
        logits[token] -= asked.get("presence_penalty", 0.0)
        logits[token] -= asked.get("frequency_penalty", 0.0) * output.count(token)
    return logits


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        (STORY, {"repetition_penalty": 1.3}),
        (STORY, {"frequency_penalty": -1.0, "presence_penalty": 2.0}),
        (REPEATING, {"repetition_penalty": 0.8}),
        (REPEATING, {"presence_penalty": 1.5}),
        (REPEATING, {"frequency_penalty": 1.0}),
        (
            REPEATING,
            {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"260": 3}},
        ),
    ],
    ids=str,
)
async def test_each_greedy_token_is_the_likeliest_by_the_adjusted_logits(
    client: openai.AsyncOpenAI, text: str, asked: dict[str, Any]
) -> None:
    prompt = encode(text)
    output = ids_of(await complete(client, prompt, max_tokens=12, ignore_eos=True, **asked))
    assert len(output) == 12
    for position, logits in enumerate(logits_of(prompt, output)):
        expected = adjusted(logits, prompt, output[:position], asked)
        assert expected[output[position]] >= expected.max() - TOLERANCE, position


async def test_each_choice_is_penalised_for_its_own_output(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"frequency_penalty": 2.0, "repetition_penalty": 1.5}
    prompt = encode(REPEATING)
    reply = await client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=8,
        n=3,
        temperature=0.01,
        seed=1,
        frequency_penalty=2.0,
        extra_body={"return_token_ids": True, "repetition_penalty": 1.5, "ignore_eos": True},
    )
    for choice in reply.choices:
        output = ids_of(choice)
        for position, logits in enumerate(logits_of(prompt, output)):
            expected = adjusted(logits, prompt, output[:position], asked)
            assert expected[output[position]] >= expected.max() - 0.25, "at so low a temperature"


async def test_malformed_adjustments_are_refused_by_name(client: openai.AsyncOpenAI) -> None:
    cases: list[dict[str, Any]] = [{"logit_bias": {"49152": 1}}, {"logit_bias": {"5": 101}}, {"presence_penalty": 3}]
    for asked in cases:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model=MODEL, prompt="a", **asked)
        assert refused.value.param == next(iter(asked))
