"""Processes that are killed while requests run, with the real tokenizers and detokenizers and the scripted runner."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
import pytest
import pytest_asyncio
from support.python_path import PYTHON_PATH

from asyncengine import AsyncEngine, Delta, EngineConfig, SamplingParams
from asyncengine.config import Role

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODULES: dict[Role, str] = {"gpu_runner": "support.scripted_runner"}
TEXT = "Grüße, 世界! 👨‍👩‍👧 in 3 tokens? "
LONG = SamplingParams(max_tokens=90, ignore_eos=True)
REQUESTS = [
    LONG,
    msgspec.structs.replace(LONG, n=3),
    msgspec.structs.replace(LONG, logprobs=2),
    msgspec.structs.replace(LONG, stop=("3 tokens? Grüße, 世界?", "no such")),
    msgspec.structs.replace(LONG, logprobs=0, n=2, stop=("3 tokens? Grüße, 世界?",), max_tokens=60),
    SamplingParams(max_tokens=90),
]
Answers = list[list[dict[str, object]]]
PROCESSES = ("tokenizer_proc 0", "tokenizer_proc 1", "detokenizer_proc 0", "detokenizer_proc 1", "gpu_runner")


def start(config: EngineConfig, **script: object) -> AsyncEngine:
    os.environ["ASYNCENGINE_SCRIPT"] = msgspec.json.encode(script).decode()
    return AsyncEngine.start(config, modules=MODULES)


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHON_PATH)
        patch.setenv("ASYNCENGINE_SCRIPT", "{}")
        yield


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine() -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(tokenizer_workers=2, detokenizer_workers=2, max_crashes=1000)
    async with start(config, step_ms=4) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def undisturbed(engine: AsyncEngine) -> Answers:
    return await Load(engine).run(1)


class Answer:
    """All that a caller was told of one choice."""

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.logprobs: list[object] = []
        self.ends: list[object] = []

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.ids += delta.token_ids
        self.logprobs += delta.logprobs
        assert delta.completion_tokens == len(self.ids)
        if delta.finish_reason:
            self.ends.append((delta.finish_reason, delta.stop_reason, delta.prompt_tokens))


class Load:
    """All of `REQUESTS` so many times at once; `tokens` that have arrived so far."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.tokens = 0
        self._engine = engine

    async def run(self, times: int) -> Answers:
        return await asyncio.gather(*(self._request(i, params) for i, params in enumerate(REQUESTS * times)))

    async def _request(self, number: int, params: SamplingParams) -> list[dict[str, object]]:
        answers = [Answer() for _ in range(params.n)]
        async for delta in self._engine.generate(TEXT + "x" * (number % 3), params):
            self.tokens += len(delta.token_ids)
            answers[delta.index].add(delta)
        return [vars(answer) for answer in answers]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize(("tokens", "times"), [(0, 3), (1500, 8)])  # 27 and 72 choices
@pytest.mark.parametrize("name", PROCESSES)
async def test_nobody_notices_that_a_process_was_killed(
    engine: AsyncEngine, undisturbed: Answers, name: str, tokens: int, times: int
) -> None:
    load = Load(engine)
    running = asyncio.create_task(load.run(times))
    await until(lambda: load.tokens >= tokens)
    await asyncio.sleep(0)
    pid = engine._supervisor.pids()[name]
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        assert await running == undisturbed * times
    await until(lambda: engine._supervisor.pids()[name] != pid and engine.health.state == "ready")
    await until(lambda: engine.gauges()["running"] == engine.gauges()["waiting"] == 0)
    engine._requests.check_integrity()
    assert engine._requests.count == 0
    await until(lambda: [link.unacked_bytes for link in engine._tokenizers] == [0, 0])


async def test_all_that_ran_waits_while_gpu_runner_is_replaced(engine: AsyncEngine) -> None:
    load = Load(engine)
    running = asyncio.create_task(load.run(4))  # 36 choices
    await until(lambda: engine.gauges()["running"] > 0)
    os.kill(engine._supervisor.pids()["gpu_runner"], signal.SIGKILL)
    await until(lambda: engine.health.state == "recovering")
    unfinished = sum(len(request.stream.unfinished) for request in engine._requests)
    gauges = engine.gauges()
    assert (gauges["running"], gauges["waiting"]) == (0, unfinished)
    assert 0 < unfinished <= 36
    await running
    await until(lambda: engine.health.state == "ready")
    await until(lambda: engine.gauges()["running"] == engine.gauges()["waiting"] == 0)


async def test_all_processes_are_killed_at_once(engine: AsyncEngine, undisturbed: Answers) -> None:
    load = Load(engine)
    running = asyncio.create_task(load.run(8))
    await until(lambda: load.tokens >= 1500)
    for name in PROCESSES:
        os.kill(engine._supervisor.pids()[name], signal.SIGKILL)
    async with asyncio.timeout(60):
        assert await running == undisturbed * 8


async def test_questions_to_a_killed_tokenizer_are_answered_by_its_successor(engine: AsyncEngine) -> None:
    for name in PROCESSES[:2]:
        os.kill(engine._supervisor.pids()[name], signal.SIGKILL)
    asked = [engine.tokenize(f"{TEXT}{i}") for i in range(20)]
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*asked)
    texts = await asyncio.gather(*(engine.detokenize(answer.ids) for answer in answers))
    assert texts == [f"{TEXT}{i}" for i in range(20)]


async def test_a_runner_that_dies_at_some_step_twice_is_replaced_twice(undisturbed: Answers) -> None:
    async with start(EngineConfig(), crash_at_step=20, crash_lives=[0, 1], step_ms=4) as engine:
        assert await Load(engine).run(3) == undisturbed * 3
        assert engine.gauges()["gpu_runner_restarts"] == 2
