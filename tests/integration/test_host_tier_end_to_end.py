"""The host tier and sessions through the real server on the CPU: a KV cache of 16 pages, and host memory for 72 more.

Pages of it are copied in well under a millisecond and computed in many, so what can be loaded is.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families
from support.eventually import PATIENCE_SECONDS
from support.python_path import PYTHON_PATH
from support.shallow_model import shallow_model_file

from asyncengine import AsyncEngine, EngineConfig, InvalidRequestError, SamplingParams, collect
from asyncengine.api.app import bound_port, run_app
from asyncengine.api_keys import digest_of
from asyncengine.config import PAGE_SIZE, ApiKey, HttpOptions

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

CACHE_TOKENS = 16 * PAGE_SIZE
HOST_GIB = 0.005
KEYS = {"a": "the-key-of-tenant-a", "b": "the-key-of-tenant-b"}
STORED, LOADED = "asyncengine:kv_pages_stored_total", "asyncengine:kv_pages_loaded_total"
PINNED = "asyncengine:host_session_pinned_pages"
PREEMPTED = "vllm:num_preemptions_total"
TOLERANCE = 1e-3
"""Of log-probabilities: a prompt is computed in other chunks beside other requests, and rounded otherwise."""


class Server:
    def __init__(self, engine: AsyncEngine, http: aiohttp.ClientSession) -> None:
        self.engine = engine
        self._http = http
        self._floods = 0

    async def post(self, path: str, body: dict[str, Any], *, tenant: str = "a") -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {KEYS[tenant]}"}
        async with self._http.post(path, json=body, headers=headers) as response:
            answer: dict[str, Any] = await response.json()
            assert response.status == 200, answer
            return answer

    async def ask(self, prompt: list[int], max_tokens: int, *, tenant: str = "a", **asked: Any) -> Answer:
        own = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return Answer(
            prompt, await self.post("/v1/completions", own | {"return_token_ids": True} | asked, tenant=tenant)
        )

    async def flood(self, count: int) -> None:
        """Requests of 14 pages each, none of which was ever there before."""
        for _ in range(count):
            self._floods += 1
            await self.ask(random_ids(14 * PAGE_SIZE, 1000 + self._floods), 1, tenant="b")

    async def metrics(self) -> dict[str, float]:
        """Those that have no labels of their own."""
        async with self._http.get("/metrics", headers={"Authorization": f"Bearer {KEYS['a']}"}) as response:
            families = text_string_to_metric_families(await response.text())
        samples = [sample for family in families for sample in family.samples]
        return {sample.name: sample.value for sample in samples if sample.labels.keys() == {"model_name", "engine"}}

    async def at_least(self, name: str, least: float) -> None:
        """Returns once a metric is so high, of which the engine's next sign of life may tell."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await self.metrics())[name] < least:
                await asyncio.sleep(0.05)


class Answer:
    def __init__(self, prompt: list[int], body: dict[str, Any]) -> None:
        (choice,) = body["choices"]
        self.text: str = choice["text"]
        self.ids: list[int] = choice["token_ids"]
        self.logprobs: list[float] = (choice["logprobs"] or {}).get("token_logprobs", [])
        self.details: dict[str, Any] = body["usage"]["prompt_tokens_details"]
        self.history = prompt + self.ids


def random_ids(count: int, seed: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(1000, 40_000, count).tolist()
    return ids


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server() -> AsyncIterator[Server]:
    config = EngineConfig(
        model=str(shallow_model_file()),
        device="cpu",
        kv_cache_tokens=CACHE_TOKENS,
        max_model_len=CACHE_TOKENS,
        max_num_seqs=4,
        max_num_batched_tokens=CACHE_TOKENS,
        kv_host_memory_gib=HOST_GIB,
    )
    keys = tuple(ApiKey(digest=digest_of(key), tenant=tenant) for tenant, key in KEYS.items())
    async with AsyncEngine.start(config) as engine:
        runner = await run_app(engine, "127.0.0.1", 0, HttpOptions(api_keys=keys))
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{bound_port(runner)}") as http:
                yield Server(engine, http)
        finally:
            await runner.cleanup()


async def test_retracted_rows_whose_pages_come_back_from_host_memory_answer_as_they_do_alone(server: Server) -> None:
    async def answer(number: int, salt: str) -> Answer:
        sampled: dict[str, Any] = {"temperature": 1, "seed": 7} if number % 2 else {}
        return await server.ask(random_ids(20, number), 52, logprobs=0, cache_salt=salt, **sampled)

    assert (await server.metrics())["asyncengine:host_kv_cache_pages"] == 72
    busy = await asyncio.gather(*(answer(number, "together") for number in range(4)))  # five pages each in the end
    for name in (PREEMPTED, STORED, LOADED):
        await server.at_least(name, 1)
    # a greedy one and a seeded one, which fit side by side; the newest were retracted
    for number, alone in zip((2, 3), await asyncio.gather(answer(2, "alone"), answer(3, "alone")), strict=True):
        assert alone.details["cached_tokens"] == 0
        assert (busy[number].text, busy[number].ids) == (alone.text, alone.ids)
        assert len(alone.ids) == 52
        assert busy[number].logprobs == pytest.approx(alone.logprobs, abs=TOLERANCE)


async def test_a_prefix_that_others_pushed_off_the_device_comes_back_from_host_memory(server: Server) -> None:
    prompt = random_ids(9 * PAGE_SIZE + 5, 10)
    first = await server.ask(prompt, 8, logprobs=0, session="stored", session_ttl_seconds=600)
    await server.at_least(PINNED, 9)  # all that is in host memory
    await server.post("/v1/sessions/stored/release", {})
    loads = (await server.metrics())[LOADED]
    await server.flood(2)
    again = await server.ask(prompt, 8, logprobs=0)
    assert (first.details["cached_tokens"], again.details["cached_tokens"]) == (0, 9 * PAGE_SIZE)
    assert again.text == first.text
    assert again.logprobs == pytest.approx(first.logprobs, abs=TOLERANCE)
    await server.at_least(LOADED, loads + 1)


async def test_the_next_turn_of_a_session_finds_it_after_a_flood_and_each_tenant_has_its_own(server: Server) -> None:
    turn: dict[str, Any] = {"session": "agent", "session_ttl_seconds": 600}
    first = await server.ask(random_ids(153, 20), 8, **turn)
    assert "session_tokens" not in first.details
    await server.at_least(PINNED, 10)
    await server.flood(4)
    second = await server.ask([*first.history, *random_ids(10, 22)], 8, **turn)
    assert second.details["cached_tokens"] == 160 >= 0.95 * len(first.history)
    assert second.details["session_tokens"] == len(first.history) == 161
    assert "first_differing_token" not in second.details

    rewritten = [*second.history, 5, 6, 7]
    rewritten[70] += 1
    third = await server.ask(rewritten, 4, **turn)
    assert third.details == {"cached_tokens": 64, "session_tokens": 179, "first_differing_token": 70}

    elses = await server.ask(random_ids(20, 23), 4, tenant="b", **turn)
    assert "session_tokens" not in elses.details
    assert (await server.ask(elses.history, 1, tenant="b", **turn)).details["session_tokens"] == 24
    await server.post("/v1/sessions/agent/release", {}, tenant="b")
    fourth = await server.ask(third.history, 1, **turn)
    assert fourth.details["session_tokens"] == len(third.history), "the other's session ended, not this one's"
    await server.post("/v1/sessions/agent/release", {})
    assert "session_tokens" not in (await server.ask(third.history, 1)).details
    assert "session_tokens" not in (await server.ask(third.history, 1, **turn)).details


async def test_when_the_gpu_process_was_killed_no_session_is_known_and_answers_are_the_same(server: Server) -> None:
    turn: dict[str, Any] = {"session": "survivor", "session_ttl_seconds": 600}
    first = await server.ask(random_ids(100, 30), 8, logprobs=0, **turn)
    os.kill(server.engine._supervisor.pids()["gpu_runner"], signal.SIGKILL)
    again = await server.ask(random_ids(100, 30), 8, logprobs=0, **turn)
    assert again.details == {"cached_tokens": 0}
    assert (again.text, again.ids) == (first.text, first.ids)
    assert again.logprobs == pytest.approx(first.logprobs, abs=TOLERANCE)
    known = await server.ask(again.history, 1, **turn)
    assert known.details["session_tokens"] == 108


async def test_a_request_larger_than_the_kv_cache_is_refused_at_once_and_blocks_nobody(server: Server) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        await collect(server.engine.generate([5] * (CACHE_TOKENS + 1), SamplingParams(max_tokens=1)))
    assert str(CACHE_TOKENS + 1) in refused.value.message
    assert str(CACHE_TOKENS) in refused.value.message
    assert len((await server.ask([5] * (CACHE_TOKENS - 10), 3)).ids) == 3


async def test_more_host_memory_than_the_machine_has_is_refused_in_one_line() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "asyncengine.cli", "serve", "--port", "0", "--device", "cpu"),
        *("--kv-host-memory-gib", "1000000"),
        env=os.environ | {"PYTHONPATH": PYTHON_PATH},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    _, err = await process.communicate()
    assert process.returncode == 1
    assert re.search(
        r"^.*kv_host_memory_gib 1000000\.0 is more than this machine can give: \d+\.\d\d GiB of its memory are "
        r"available, of which 90% may be used; \d+(\.\d+)? would fit$",
        err.decode(),
        re.MULTILINE,
    ), err.decode()
    assert b"Traceback" not in err
