"""A text that crashes a tokenizer, or takes it too long, costs one process and one request: its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.eventually import eventually
from support.poisoned_tokenizer import CRASH, SPIN
from support.python_path import PYTHON_PATH

from asyncengine import AsyncEngine, EngineConfig, SamplingParams
from asyncengine.chat_prompt import ChatPrompt
from asyncengine.errors import InvalidRequestError

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine() -> AsyncIterator[AsyncEngine]:
    """Two crashes end it; that a limit of time was kept is no crash."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHON_PATH)
        patch.setenv("ASYNCENGINE_SCRIPT", "{}")
        modules = {"gpu_runner": "support.scripted_runner", "tokenizer_proc": "support.poisoned_tokenizer"}
        async with AsyncEngine.start(EngineConfig(max_crashes=2), modules=modules) as engine:  # type: ignore[arg-type]
            yield engine


async def answer(engine: AsyncEngine, prompt: str | ChatPrompt) -> str:
    """What the scripted runner gives back, or the code of the refusal."""
    try:
        return "".join([delta.text async for delta in engine.generate(prompt, SamplingParams(max_tokens=90))])
    except InvalidRequestError as error:
        return f"{error.status} {error.code}"


async def ask(engine: AsyncEngine, text: str) -> str:
    try:
        return f"{len((await engine.tokenize(text)).ids)} tokens"
    except InvalidRequestError as error:
        return f"{error.status} {error.code}"


REJECTED = "400 prompt_rejected"


async def test_each_poisonous_text_fails_alone_whatever_it_is_sent_as(engine: AsyncEngine) -> None:
    for restarts, poison in enumerate((SPIN, CRASH), 1):
        innocent = [f"innocent {i} of {restarts}" for i in range(12)]
        chat = ChatPrompt(messages=[{"role": "user", "content": poison}])
        prompts: list[str | ChatPrompt] = [*innocent[:5], f"some {poison}", *innocent[5:], f"more {poison}", chat]
        async with asyncio.timeout(120):
            answers = await asyncio.gather(*(answer(engine, prompt) for prompt in prompts))
        assert answers == [each if each in innocent else REJECTED for each in prompts]
        await eventually(lambda: engine.health.state == "ready")
        assert engine.gauges()["tokenizer_proc_restarts"] == restarts
    assert await answer(engine, "still here") == "still here"
    engine._requests.check_integrity()
    assert engine._requests.count == 0


async def test_a_poisonous_question_costs_no_further_process(engine: AsyncEngine) -> None:
    before = engine.gauges()["tokenizer_proc_restarts"]
    async with asyncio.timeout(120):
        answers = await asyncio.gather(*(ask(engine, text) for text in ("abc", f"a {CRASH}", "abc", f"a {SPIN}")))
    assert answers == ["1 tokens", REJECTED, "1 tokens", REJECTED]
    assert engine.gauges()["tokenizer_proc_restarts"] == before
