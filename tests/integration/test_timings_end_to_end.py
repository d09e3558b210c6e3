"""Where a request's time went, told by all processes of a small model: chunks of prefill, preemptions, their sum."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from support.babbling_model import write_babbling_model

from asyncengine import AsyncEngine, EngineConfig
from asyncengine.api.app import bound_port, run_app
from asyncengine.api.timings import PARTS

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

CACHE_TOKENS = 80
BUDGET = 16
"""Tokens of a step."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    config = EngineConfig(
        model=write_babbling_model(tmp_path_factory.mktemp("model")),
        load_format="dummy",
        device="cpu",
        kv_cache_tokens=CACHE_TOKENS,
        max_model_len=CACHE_TOKENS,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=4,
        enable_prefix_caching=False,
    )
    async with AsyncEngine.start(config) as engine:
        runner = await run_app(engine, "127.0.0.1", 0)
        yield f"http://127.0.0.1:{bound_port(runner)}/v1/completions"
        await runner.cleanup()


async def ask(session: aiohttp.ClientSession, url: str, **body: Any) -> tuple[dict[str, Any], float]:
    """The timings of the answer's one choice, and the milliseconds that its client counted."""
    body = {"temperature": 0, "ignore_eos": True, "timings": True} | body
    begin = time.monotonic()
    async with session.post(url, json=body) as response:
        text = (await response.read()).decode()
    counted = 1000 * (time.monotonic() - begin)
    answer = json.loads(text.split("\n\n")[-3].removeprefix("data: ") if body.get("stream") else text)
    return answer["choices"][0]["timings"], counted


@pytest.mark.parametrize("stream", [False, True])
async def test_the_parts_add_up_to_no_more_than_the_client_counted(url: str, stream: bool) -> None:
    async with aiohttp.ClientSession() as session:
        spent, counted = await ask(session, url, prompt=list(range(50, 100)), max_tokens=4, stream=stream)
    parts = [spent[f"{part}_ms"] for part in PARTS]
    assert sum(parts) + spent["preempted_ms"] == pytest.approx(spent["total_ms"], abs=0.01)
    assert spent["total_ms"] <= counted


async def test_a_prompt_longer_than_a_steps_budget_shows_its_chunks(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        spent, _ = await ask(session, url, prompt=list(range(50, 125)), max_tokens=2)
    chunks = spent["prefill_chunks"]
    assert [chunk["tokens"] for chunk in chunks] == [BUDGET] * 4 + [75 - 4 * BUDGET]
    for chunk, following in pairwise(chunks):
        assert chunk["at_ms"] + chunk["ms"] == pytest.approx(following["at_ms"], abs=0.01)
    assert sum(chunk["ms"] for chunk in chunks) == pytest.approx(spent["prefill_ms"], abs=0.5)
    before = spent["accept_ms"] + spent["tokenize_ms"] + spent["queue_ms"]
    assert before <= chunks[0]["at_ms"] + 0.01
    assert (spent["preemptions"], spent["preempted_ms"]) == ([], 0)


async def test_a_preempted_choice_shows_the_gap_and_what_it_computed_again(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        body = {"prompt": list(range(50, 97)), "n": 2, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        async with session.post(url, json=body | {"timings": True}) as response:
            answer = await response.json()
    both = [choice["timings"] for choice in answer["choices"]]
    (preempted,) = [spent for spent in both if spent["preemptions"]]
    for gap in preempted["preemptions"]:
        (first, *_) = [chunk for chunk in preempted["prefill_chunks"] if chunk["at_ms"] > gap["at_ms"]]
        assert first["at_ms"] == pytest.approx(gap["at_ms"] + gap["ms"], abs=0.01)
    assert sum(gap["ms"] for gap in preempted["preemptions"]) == pytest.approx(preempted["preempted_ms"], abs=0.01)
    assert preempted["preempted_ms"] > 0
    for spent in both:
        parts = [spent[f"{part}_ms"] for part in (*PARTS, "preempted")]
        assert sum(parts) == pytest.approx(spent["total_ms"], abs=0.01)
