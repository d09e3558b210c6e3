"""The whole engine on the CPU: the real SmolLM2 behind the real HTTP endpoint, asked by real clients."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessageParam
from prometheus_client.parser import text_string_to_metric_families
from support.eventually import PATIENCE_SECONDS, eventually
from support.folded_stream import of_events, of_whole
from support.tokenizers_cache import default_model_file

from asyncengine import AsyncEngine, EngineConfig, SamplingParams
from asyncengine.api.app import bound_port, run_app
from asyncengine.api.timings import PARTS
from asyncengine.tokenizer_file import load_tokenizer
from asyncengine.wire.accounting import RingReader, StepRecord, TurnRecord

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine() -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(device="cpu", kv_cache_tokens=16_384, max_model_len=1024, max_num_seqs=64)
    async with AsyncEngine.start(config) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def url(engine: AsyncEngine) -> AsyncIterator[str]:
    runner = await run_app(engine, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{bound_port(runner)}/v1"
    await runner.cleanup()


@pytest.fixture
def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)


async def wait_until(engine: AsyncEngine, condition: Callable[[dict[str, int]], bool]) -> dict[str, int]:
    """The gauges once `condition` holds for them; fails after a minute."""
    await eventually(lambda: condition(engine.gauges()))
    return engine.gauges()


async def wait_until_idle(engine: AsyncEngine) -> dict[str, int]:
    """The gauges once nothing runs and every page is free or only cached."""
    return await wait_until(
        engine,
        lambda gauges: (
            gauges["running"] == gauges["waiting"] == 0
            and gauges["free_pages"] + gauges["cached_pages"] == gauges["total_pages"]
        ),
    )


async def test_the_default_model_names_the_capital_of_france(client: openai.AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(model="SmolLM2-135M-Instruct", messages=QUESTION, temperature=0)
    assert reply.choices[0].message.content == ANSWER
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (37, 8)


async def test_the_streamed_answer_is_the_same_word_for_word(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="SmolLM2-135M-Instruct", messages=QUESTION, temperature=0, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]


async def test_the_first_words_come_while_the_answer_is_still_being_written(
    client: openai.AsyncOpenAI, engine: AsyncEngine
) -> None:
    stream = await client.chat.completions.create(
        model="SmolLM2-135M-Instruct",
        messages=QUESTION,
        temperature=0,
        stream=True,
        max_tokens=900,  # seconds of work: however late this process reads, it is far from its end
        extra_body={"ignore_eos": True},
    )
    chunk = await anext(chunk async for chunk in stream if chunk.choices[0].delta.content)
    assert await engine.cancel(chunk.id), "it has not ended"
    *_, last = [chunk async for chunk in stream]
    assert last.choices[0].finish_reason == "abort"  # type: ignore[comparison-overlap]
    await wait_until_idle(engine)


async def test_raw_server_sent_events_carry_the_answer_and_end_with_done(url: str) -> None:
    body = {"messages": QUESTION, "temperature": 0, "stream": True}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/chat/completions", json=body) as response:
        events = [line[6:] for line in (await response.text()).split("\n\n") if line]
    assert events[-1] == "[DONE]"
    texts = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1]]
    assert "".join(texts) == ANSWER


async def test_every_process_accounts_for_what_it_did(engine: AsyncEngine) -> None:
    run_dir = engine._supervisor.run_dir
    rings = {role: _ring(run_dir, role) for role in ("tokenizer_proc", "detokenizer_proc", "engine")}
    loop = RingReader(run_dir / "gpu_runner.0.ring", StepRecord)
    begun = loop.written
    written = {role: ring.written for role, ring in rings.items()}
    before = time.monotonic_ns()
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    async with aclosing(engine.generate("Count to ten.", params)) as deltas:
        tokens = [token async for delta in deltas for token in delta.token_ids]
    after = time.monotonic_ns()
    assert len(tokens) == 20

    def own_steps() -> list[StepRecord]:
        # the last request's overshoot may have been on the device still
        return [record for record in loop.snapshot(begun) if record.collected and record.device_begin > before]

    await eventually(lambda: len(own_steps()) >= 20)  # a step's record is written behind its frame
    steps = [record for record in own_steps() if record.commit < after]
    for record in steps:
        assert record.drain <= record.plan <= record.wait <= record.commit <= record.send <= record.end
        assert record.device_begin < record.device_end < record.commit
    assert len(steps) >= 20

    def detokenized() -> int:
        return sum(record.items for record in rings["detokenizer_proc"].snapshot(written["detokenizer_proc"]))

    # records are written behind what they tell of
    await eventually(lambda: detokenized() >= 20 and all(ring.written > written[role] for role, ring in rings.items()))
    gauges = await wait_until(engine, lambda gauges: gauges["host_us_per_step"] > 0)
    assert 0 < gauges["gpu_busy_permille"] <= 1000


def _ring(run_dir: Path, role: str) -> RingReader[TurnRecord]:
    return RingReader(run_dir / f"{role}.0.ring", TurnRecord)


async def test_choices_and_seeds(client: openai.AsyncOpenAI) -> None:
    async def ask(seed: int | None, n: int = 1) -> list[str]:
        reply = await client.completions.create(
            model="SmolLM2-135M-Instruct", prompt="Once upon a time", max_tokens=12, temperature=1, n=n, seed=seed
        )
        return [choice.text for choice in reply.choices]

    alone, other, again = await asyncio.gather(ask(7, n=4), ask(None), ask(7, n=4))
    assert alone == again
    assert len(set(alone)) == 4
    assert alone[2] == (await ask(9))[0], "choice k uses seed + k"
    assert other[0] not in alone


async def test_stop_strings_end_the_row_and_are_not_shown(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(
        model="SmolLM2-135M-Instruct", messages=QUESTION, temperature=0, stop=[" of Fra"]
    )
    assert whole.choices[0].message.content == "The capital"
    assert whole.choices[0].finish_reason == "stop"


async def test_64_streams_at_once_all_finish_byte_exact(engine: AsyncEngine) -> None:
    tokenizer = load_tokenizer(str(default_model_file())).tokenizer
    rng = np.random.default_rng(0)

    async def stream(index: int) -> None:
        params = SamplingParams(temperature=1.5, max_tokens=int(rng.integers(1, 7)), seed=index, ignore_eos=True)
        prompt = rng.integers(100, 40_000, int(rng.integers(1, 12))).tolist()
        text, ids, finish = "", [], None
        async for delta in engine.generate(prompt, params):
            assert finish is None
            text, finish = text + delta.text, delta.finish_reason
            ids += delta.token_ids
            assert delta.completion_tokens == len(ids)
        assert finish == "length"
        assert len(ids) == params.max_tokens
        assert text == tokenizer.decode(ids, skip_special_tokens=True)

    await asyncio.gather(*(stream(index) for index in range(64)))
    await wait_until_idle(engine)


async def test_killing_half_of_64_clients_mid_stream_frees_what_they_held(engine: AsyncEngine, url: str) -> None:
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 900, "ignore_eos": True, "stream": True}
    survivors = {**body, "max_tokens": 6, "stream_options": {"include_usage": True}}
    started = asyncio.Semaphore(0)
    aborted_before = engine.gauges()["aborted"]

    async def vanish(session: aiohttp.ClientSession) -> None:
        async with session.post(f"{url}/completions", json=body) as response:
            await response.content.readline()
            started.release()
            await asyncio.sleep(3600)

    async def stay(session: aiohttp.ClientSession) -> None:
        async with session.post(f"{url}/completions", json=survivors) as response:
            text = await response.text()
        assert '"completion_tokens":6' in text
        assert text.endswith("data: [DONE]\n\n")

    def rows_of_the_killed(gauges: dict[str, int]) -> int:
        return 32 - (gauges["aborted"] - aborted_before)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        vanishing = [asyncio.create_task(vanish(session)) for _ in range(32)]
        staying = [asyncio.create_task(stay(session)) for _ in range(32)]
        for _ in vanishing:
            await started.acquire()
        for task in vanishing:
            task.cancel()
        await wait_until(engine, lambda gauges: rows_of_the_killed(gauges) == 0 and gauges["running"] <= 32)
        await asyncio.gather(*staying)
    gauges = await wait_until_idle(engine)
    assert gauges["open_streams"] == 0


async def test_leaving_a_stream_early_frees_its_row_and_pages(engine: AsyncEngine) -> None:
    async with aclosing(engine.generate([9, 9, 9], SamplingParams(max_tokens=1000, ignore_eos=True))) as stream:
        async for _ in stream:
            break
    await wait_until_idle(engine)


async def test_refusals_have_both_numbers_and_the_next_request_is_served(
    engine: AsyncEngine, client: openai.AsyncOpenAI
) -> None:
    cases: list[tuple[list[int] | str, int, tuple[str, ...]]] = [
        ([5] * 1024, 1, ("1024",)),
        ([5] * 1000, 100, ("1000", "100", "1024")),
        ([5, engine.info.vocab_size], 1, ("1", str(engine.info.vocab_size))),
        ("word " * 5000, 1, ("1024",)),
    ]
    for prompt, max_tokens, numbers in cases:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="SmolLM2-135M-Instruct", prompt=prompt, max_tokens=max_tokens)
        for number in numbers:
            assert number in refused.value.message
    reply = await client.chat.completions.create(model="SmolLM2-135M-Instruct", messages=QUESTION, temperature=0)
    assert reply.choices[0].message.content == ANSWER


def without_floats(answer: dict[str, Any]) -> tuple[Any, list[float]]:
    """All but the numbers that are not whole, and these in order."""
    numbers: list[float] = []

    def take(text: str) -> None:
        numbers.append(float(text))

    return json.loads(json.dumps(answer), parse_float=take), numbers


async def test_answers_of_the_real_model_are_equal_streamed_and_whole(url: str) -> None:
    chat = {"messages": QUESTION, "max_tokens": 12}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", {**chat, "temperature": 0.9, "seed": 5, "n": 2, "logprobs": True, "top_logprobs": 3}),
        ("chat/completions", {**chat, "temperature": 0, "stop": [" is"], "return_token_ids": True, "timings": True}),
        ("chat/completions", {**chat, "temperature": 0, "structured_outputs": {"regex": "Paris|Rome"}}),
        (
            "completions",
            {
                "prompt": ["Paris is", "Rome"],
                "echo": True,
                "logprobs": 2,
                "max_tokens": 6,
                "temperature": 0.7,
                "seed": 1,
            },
        ),
        (
            "completions",
            {"prompt": "One, two,", "presence_penalty": 1, "repetition_penalty": 1.2, "seed": 3, "prompt_logprobs": 1},
        ),
    ]
    async with aiohttp.ClientSession() as session:

        async def both_ways(path: str, body: dict[str, Any]) -> None:
            async with session.post(f"{url}/{path}", json=body) as response:
                whole = await response.json()
            streaming = {"stream": True, "stream_options": {"include_usage": True}}
            async with session.post(f"{url}/{path}", json=body | streaming) as response:
                *events, _ = (await response.text()).removesuffix("\n\n").split("\n\n")
            folded = of_events([json.loads(event.removeprefix("data: ")) for event in events])
            expected = of_whole(whole)
            for answer in (folded, expected):
                del answer["usage"]["prompt_tokens_details"]  # the second finds the prompt in the cache
            (shape, numbers), (expected_shape, expected_numbers) = map(without_floats, (folded, expected))
            assert shape == expected_shape
            assert numbers == pytest.approx(expected_numbers, abs=1e-3)  # rounded otherwise in another batch

        await asyncio.gather(*(both_ways(path, body) for path, body in bodies))


async def test_metrics_and_timings_of_the_real_model(url: str, engine: AsyncEngine) -> None:
    async def scrape(session: aiohttp.ClientSession) -> dict[str, float]:
        async with session.get(url.removesuffix("/v1") + "/metrics") as response:
            families = text_string_to_metric_families(await response.text())
        return {
            sample.name: sample.value
            for family in families
            for sample in family.samples
            if not sample.labels.keys() & {"le", "finished_reason", "reason"}
        }

    async def spend(session: aiohttp.ClientSession, number: int) -> tuple[dict[str, float], dict[str, float], Any]:
        """What two equal requests added, what the page shows then, and the second one's answer."""
        prompt = (
            f"{number}. " + "The sea was calm that morning, and so were the people who had come to look at it. " * 4
        )
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "timings": True}
        before = after = await scrape(session)
        for _ in range(2):
            async with session.post(f"{url}/completions", json=body) as response:
                answer = await response.json()
        expected = before["vllm:prefix_cache_queries_total"] + 2 * answer["usage"]["prompt_tokens"]
        while (  # gpu_runner's counts come with a later heartbeat
            after["vllm:prefix_cache_queries_total"] < expected
            or after["vllm:num_requests_running"]
            or after["vllm:kv_cache_usage_perc"]
        ):
            await asyncio.sleep(0.02)
            after = await scrape(session)
        return {name: after[name] - before[name] for name in before}, after, answer

    async with aiohttp.ClientSession() as session, asyncio.timeout(PATIENCE_SECONDS):
        for number in itertools.count():
            spent, after, answer = await spend(session, number)
            if spent["vllm:prefix_cache_queries_total"] <= spent["vllm:prompt_tokens_total"]:
                break  # else what an earlier test had asked last was counted late
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert spent["vllm:prompt_tokens_total"] == spent["vllm:prefix_cache_queries_total"] == 2 * usage["prompt_tokens"]
    assert spent["vllm:generation_tokens_total"] == 16
    assert spent["vllm:prefix_cache_hits_total"] == cached > 0
    assert spent["vllm:time_to_first_token_seconds_count"] == spent["vllm:request_queue_time_seconds_count"] == 2
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0
    timings = answer["choices"][0]["timings"]
    assert all(timings[f"{part}_ms"] >= 0 for part in PARTS)
    assert timings["prefill_ms"] > 0 < timings["decode_ms"]
    assert sum(timings[f"{part}_ms"] for part in PARTS) == pytest.approx(timings["total_ms"], abs=0.01)
