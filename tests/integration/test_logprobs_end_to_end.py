"""Log-probabilities and what adjusts the logits, from the real server on the CPU, against transformers in float32.

Both compute the first layers of SmolLM2; that they agree on all is shown where the models are tested."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
import torch
from models.smollm2 import transformers_model
from openai.types import CompletionChoice
from support.shallow_model import NAME as MODEL
from support.shallow_model import shallow_model_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from asyncengine import AsyncEngine, EngineConfig
from asyncengine.api.app import bound_port, run_app
from asyncengine.sampling import MAX_PROMPT_LOGPROBS
from asyncengine.tokenizer_file import load_tokenizer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
STORY = "Once upon a time there was a little girl who lived in a village near the forest."
TALE = "There was a girl who lived in a village near the forest. Ünï — 🙂."
REPEATING = "one two one two one two one two one two"
TOLERANCE = 1e-3


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    model = str(shallow_model_file())
    config = EngineConfig(model=model, device="cpu", kv_cache_tokens=4096, max_model_len=512, max_num_seqs=8)
    async with AsyncEngine.start(config) as engine:
        runner = await run_app(engine, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{bound_port(runner)}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client
        await runner.cleanup()


@cache
def reference() -> LlamaForCausalLM:
    return transformers_model(shallow_model_file())


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(shallow_model_file())).tokenizer


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
    chat: Any = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 8}
    chat |= {"logprobs": True, "top_logprobs": 4}
    whole = (await client.chat.completions.create(**chat)).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.content is not None
    assert "".join(entry.token for entry in whole.logprobs.content) == whole.message.content
    assert len(whole.logprobs.content) == 8
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


ADJUSTED: list[tuple[str, dict[str, Any]]] = [
    (STORY, {"repetition_penalty": 1.3}),
    (STORY, {"frequency_penalty": -1.0, "presence_penalty": 2.0}),
    (REPEATING, {"repetition_penalty": 0.8}),
    (REPEATING, {"presence_penalty": 1.5}),
    (REPEATING, {"frequency_penalty": 1.0}),
    (REPEATING, {"frequency_penalty": 2.0}),
    (
        REPEATING,
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"260": 3}},
    ),
]


async def test_each_greedy_token_is_the_likeliest_by_the_adjusted_logits(client: openai.AsyncOpenAI) -> None:
    async def ask(text: str, asked: dict[str, Any]) -> list[int]:
        return ids_of(await complete(client, encode(text), max_tokens=12, ignore_eos=True, **asked))

    outputs = await asyncio.gather(*(ask(text, asked) for text, asked in ADJUSTED))
    for (text, asked), output in zip(ADJUSTED, outputs, strict=True):
        assert len(output) == 12
        prompt = encode(text)
        for position, logits in enumerate(logits_of(prompt, output)):
            expected = adjusted(logits, prompt, output[:position], asked)
            assert expected[output[position]] >= expected.max() - TOLERANCE, (asked, position)


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
    return tokenizer().decode([token], skip_special_tokens=False)


async def test_every_token_of_a_prompt_has_the_log_probability_of_transformers(client: openai.AsyncOpenAI) -> None:
    tokens = encode(TALE)
    neighbours = [
        asyncio.create_task(client.completions.create(model=MODEL, prompt=f"{n} is", max_tokens=12)) for n in range(2)
    ]
    long = (tokens * 5)[:60]
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


async def test_a_chats_prompt_is_scored_with_its_template(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    asked: Any = {"model": MODEL, "messages": messages, "max_tokens": 2, "extra_body": {"prompt_logprobs": 2}}
    async with aiohttp.ClientSession() as session:
        body = {"messages": messages, "add_special_tokens": False}
        async with session.post(str(client.base_url).removesuffix("/v1/") + "/tokenize", json=body) as response:
            tokens = (await response.json())["tokens"]
    whole = await client.chat.completions.create(**asked)
    assert whole.model_extra is not None
    check_prompt(whole.model_extra["prompt_logprobs"], tokens, num_top=2)
    chunks = [chunk async for chunk in await client.chat.completions.create(**asked, n=2, stream=True)]
    (scored,) = [chunk.model_extra["prompt_logprobs"] for chunk in chunks if chunk.model_extra]
    check_prompt(scored, tokens, num_top=2)


@pytest.mark.parametrize(("max_tokens", "as_ids"), [(0, True), (4, False), (2, True)])
async def test_an_echo_comes_before_each_choice_streamed_or_not(
    client: openai.AsyncOpenAI, max_tokens: int, as_ids: bool
) -> None:
    texts = ("A tale — 🙂.", "A b")
    prompts: Any = [encode(text) if as_ids else text for text in texts]
    asked: Any = {"model": MODEL, "prompt": prompts, "n": 2, "seed": 1, "echo": True, "logprobs": 2}
    asked |= {"max_tokens": max_tokens, "extra_body": {"ignore_eos": True, "skip_special_tokens": False}}
    whole = await client.completions.create(**asked)
    plain = await client.completions.create(**asked | {"echo": False, "max_tokens": max(1, max_tokens)})
    streamed: dict[int, list[Any]] = {index: [] for index in range(4)}
    async for chunk in await client.completions.create(**asked, stream=True):
        streamed[chunk.choices[0].index].append(chunk.choices[0])
    assert whole.usage is not None
    assert whole.usage.completion_tokens == sum(max_tokens for _ in range(4))
    for index, choice in enumerate(whole.choices):
        given, ids = texts[index // 2], encode(texts[index // 2])
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
            best = max(logprobs.top_logprobs[position + 1].values())
            assert best == pytest.approx(float(expected[position].max()), abs=TOLERANCE)
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
    answer = await client.completions.create(model=MODEL, prompt=TALE, echo=True, max_tokens=0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (TALE, "length", None)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(encode(TALE)), 0)


TASK = """\
task: facts
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
QUESTIONS: list[dict[str, Any]] = [
    {"question": "The capital of France is", "choices": ["London", "Paris", "a river"], "answer": 1},
    {"question": "2 + 2 =", "choices": ["4", "five"], "answer": 0},
    {"question": "The first month of the year is", "choices": ["January", "Sunday"], "answer": 1},
]
EVALUATE = """\
import json, sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
if __name__ == "__main__":
    folder, model = sys.argv[1:]
    tasks = TaskManager(include_path=folder, include_defaults=False)  # which are thousands of files to read
    results = simple_evaluate("local-completions", model_args=model, tasks=["facts"], task_manager=tasks)
    answers = [sample["filtered_resps"] for sample in results["samples"]["facts"]]
    with open(f"{folder}/results.json", "w") as file:
        json.dump([results["results"]["facts"]["acc,none"], answers], file)
"""


async def test_lm_eval_gets_the_log_likelihoods_of_transformers(client: openai.AsyncOpenAI, tmp_path: Path) -> None:
    """Its `local-completions`, as its users call it, on a task of ours of which one answer or two are wrong."""
    (tmp_path / "facts.yaml").write_text(TASK.replace("FOLDER", str(tmp_path)))
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    (tmp_path / "evaluate.py").write_text(EVALUATE)
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    model = f"model={MODEL},base_url={client.base_url}completions,tokenizer_backend=huggingface,tokenizer={tmp_path}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, tmp_path / "evaluate.py", tmp_path, model),
        env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    accuracy, answers = json.loads((tmp_path / "results.json").read_text())
    right = 0
    for question, answer in zip(QUESTIONS, answers, strict=True):
        context = encode(question["question"])
        sums: list[float] = []
        for choice, (value, is_greedy) in zip(question["choices"], answer, strict=True):
            prompt = encode(f"{question['question']} {choice}")
            assert prompt[: len(context)] == context
            expected = expected_logprobs(prompt)[len(context) - 1 :]
            own = expected.gather(1, torch.tensor(prompt[len(context) :])[:, None])[:, 0]
            sums.append(float(own.sum()))
            assert value == pytest.approx(sums[-1], abs=TOLERANCE)
            assert is_greedy == bool((own == expected.amax(dim=1)).all())
        right += sums.index(max(sums)) == question["answer"]
    assert right in (1, 2)
    assert accuracy == pytest.approx(right / 3)


async def test_too_many_log_probabilities_of_a_prompt_are_refused_by_name(client: openai.AsyncOpenAI) -> None:
    tokens = encode(TALE)
    prompt = (tokens * 20)[:400]
    assert MAX_PROMPT_LOGPROBS < 400 * 16 * 21
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(
            model=MODEL, prompt=prompt, n=16, max_tokens=1, extra_body={"prompt_logprobs": 20}
        )
    assert (refused.value.code, refused.value.param) == ("too_many_logprobs", "prompt_logprobs")
