"""A request that crashes gpu_runner whenever it runs ends alone: nobody else's answer changes, and the engine lives."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator, Sequence

import aiohttp
import pytest
import pytest_asyncio
from support.eventually import eventually
from support.poisoned_runner import AFTER_40, AFTER_200, EXCEPTION, LATE, LATE_POSITION, LEAK, SEGFAULT
from support.python_path import PYTHON_PATH

from asyncengine import AsyncEngine, EngineConfig, SamplingParams
from asyncengine.api.app import bind
from asyncengine.api.worker_group import WorkerGroup
from asyncengine.config import Role
from asyncengine.errors import CrashingRequestError, EngineDeadError

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODULES: dict[Role, str] = {"gpu_runner": "support.poisoned_runner"}
INNOCENT = [list(range(10 * i, 10 * i + 30 + i)) for i in range(8)]
PARAMS = [SamplingParams(max_tokens=120 + i, n=1 + (i == 3)) for i in range(8)]
ENDED = "500 request_crashes_engine"
Answer = dict[int, list[int]]


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHON_PATH)
        yield


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine() -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine.start(EngineConfig(), modules=MODULES) as engine:
        yield engine


class Load:
    """The innocent requests at once; `begun` so many of them have had a token."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.begun = 0
        self._engine = engine
        self.answers: asyncio.Future[list[Answer]] = asyncio.gather(*map(self._answer, INNOCENT, PARAMS))

    async def _answer(self, prompt: list[int], params: SamplingParams) -> Answer:
        ids: Answer = {index: [] for index in range(params.n)}
        first = True
        async for delta in self._engine.generate(prompt, params):
            ids[delta.index] += delta.token_ids
            self.begun += first
            first = False
        return ids


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def in_peace(engine: AsyncEngine) -> list[Answer]:
    answers = await Load(engine).answers
    assert [{index: len(ids) for index, ids in answer.items()} for answer in answers] == [
        dict.fromkeys(range(params.n), params.max_tokens) for params in PARAMS
    ]
    return answers


async def poisoned(engine: AsyncEngine, prompt: Sequence[int], params: SamplingParams) -> tuple[str, list[int]]:
    """How it ended, and the tokens of its first choice before that."""
    ids: list[int] = []
    try:
        async for delta in engine.generate(prompt, params, request_id="poison"):
            ids += delta.token_ids if delta.index == 0 else []
    except CrashingRequestError as error:
        return f"{error.status} {error.code}", ids
    return "answered", ids


@pytest.mark.parametrize(
    ("prompts", "n"),
    [([[5, EXCEPTION]], 1), ([[5, SEGFAULT], [LATE, 7]], 2)],
    ids=["one", "two at once, of two choices each"],
)
async def test_exactly_the_requests_that_crash_it_end(
    engine: AsyncEngine, in_peace: list[Answer], prompts: list[list[int]], n: int, caplog: pytest.LogCaptureFixture
) -> None:
    convicted = engine.gauges()["convicted_requests"]
    load = Load(engine)
    await eventually(lambda: load.begun == len(INNOCENT))
    async with asyncio.timeout(300):
        ends = await asyncio.gather(
            *(poisoned(engine, prompt, SamplingParams(n=n, max_tokens=90)) for prompt in prompts)
        )
        assert await load.answers == in_peace
    for prompt, (end, ids) in zip(prompts, ends, strict=True):
        assert end == ENDED
        assert bool(ids) == (LATE in prompt)
        assert len(ids) <= LATE_POSITION - len(prompt)
    await eventually(lambda: engine.health.state == "ready")
    assert engine.gauges()["convicted_requests"] == convicted + len(prompts)
    named = "gpu_runner crashes each time it runs request poison, which has been ended"
    assert caplog.messages.count(named) == len(prompts)
    await eventually(lambda: engine.gauges()["running"] == 0)
    engine._requests.check_integrity()
    assert engine._requests.count == 0


async def test_one_that_passes_a_trial_and_crashes_it_later_ends_alone_also_while_the_engine_drains(
    in_peace: list[Answer],
) -> None:
    """It is tried for what another one does at once."""
    async with AsyncEngine.start(EngineConfig(max_crashes=8), modules=MODULES) as engine, asyncio.timeout(300):
        ends = asyncio.gather(
            *(poisoned(engine, prompt, SamplingParams(n=2, max_tokens=1500)) for prompt in ([AFTER_40, 3], [EXCEPTION]))
        )
        load = Load(engine)
        await eventually(lambda: engine.gauges()["gpu_runner_restarts"] == 2)
        assert await engine.drain(300)
        assert [end for end, _ in await ends] == [ENDED] * 2
        assert await load.answers == in_peace
        assert engine.gauges()["convicted_requests"] == 2


async def test_a_page_that_the_cache_lost_is_found_and_the_same_process_serves_on(
    engine: AsyncEngine, in_peace: list[Answer]
) -> None:
    pid = engine._supervisor.pids()["gpu_runner"]
    end, ids = await poisoned(engine, [5, LEAK], SamplingParams(max_tokens=2))
    assert (end, len(ids)) == ("answered", 2)
    await eventually(lambda: engine.gauges()["cache_repairs"] == 1)
    gauges = engine.gauges()
    assert gauges["free_pages"] + gauges["cached_pages"] == gauges["total_pages"]
    assert await Load(engine).answers == in_peace
    assert engine._supervisor.pids()["gpu_runner"] == pid


async def test_losses_from_outside_convict_nobody_and_are_counted() -> None:
    async with AsyncEngine.start(EngineConfig(), modules=MODULES) as engine:
        load = Load(engine)
        await eventually(lambda: load.begun == len(INNOCENT))
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
            await eventually(lambda: engine.health.state == "ready")
            os.kill(engine._supervisor.pids()["gpu_runner"], number)
            await eventually(lambda: engine.health.state != "ready")
        with pytest.raises(EngineDeadError, match="3 processes were lost within 60 s"):
            await load.answers
        assert engine.gauges()["convicted_requests"] == 0


async def completion(session: aiohttp.ClientSession, url: str, prompt: list[int], max_tokens: int = 120) -> str:
    """A stream's text, or how it ended instead."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        text = await response.text()
    *chunks, last = text.strip().split("\n\n")
    if last != "data: [DONE]":
        return f"event {json.loads(last.removeprefix('data: '))['error']['code']}"
    return "".join(json.loads(chunk.removeprefix("data: "))["choices"][0]["text"] for chunk in chunks)


async def test_of_several_api_workers_the_one_that_has_it_ends_it() -> None:
    group = WorkerGroup(EngineConfig(max_crashes=8), bind("127.0.0.1", 0), workers=2, modules=MODULES)
    try:
        await group.start()
        url = f"http://127.0.0.1:{group.port}"
        async with asyncio.timeout(300), aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            in_peace = await asyncio.gather(*(completion(session, url, prompt) for prompt in INNOCENT))
            load = asyncio.gather(*(completion(session, url, prompt) for prompt in INNOCENT))
            assert await completion(session, url, [AFTER_200, 1], 1500) == "event request_crashes_engine"
            assert await load == in_peace
            async with session.get(f"{url}/metrics") as response:
                counted = re.findall(r"^asyncengine:convicted_requests_total\S* (\S+)$", await response.text(), re.M)
            assert counted == ["1"]
    finally:
        await group.close()
