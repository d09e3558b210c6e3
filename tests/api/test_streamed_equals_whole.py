"""What is streamed is, put together, what comes as a whole: for every parameter, and for many sets of them."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from api_server import CHAT, COMPLETIONS, Server, serving
from parameter_table import BOTH, OWN
from support.folded_stream import of_events, of_whole
from support.python_path import PYTHON_PATH

from asyncengine import AsyncEngine, EngineConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = 'Grüße, 世界! 👨‍👩‍👧 <think>so</think> <tool_call>{"name": "f", "arguments": {"a": "}"}}</tool_call>\r\n'
PROMPTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": [TEXT, "b"], "max_tokens": 100},
    CHAT: {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 150},
}
SETS = 60
"""Of each endpoint, at random: always the same ones."""
AT_ONCE = 16


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHON_PATH)
        patch.setenv("ASYNCENGINE_SCRIPT", json.dumps({"step_ms": 0.2}))
        yield


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server() -> AsyncIterator[Server]:
    config = EngineConfig(
        max_model_len=2048, tool_call_parser="hermes", reasoning_parser="think", scheduling_policy="priority"
    )
    async with (
        AsyncEngine.start(config, modules={"gpu_runner": "support.scripted_runner"}) as engine,
        serving(engine) as server,
    ):
        yield server


def bodies(path: str) -> list[dict[str, Any]]:
    """Each parameter by itself, and sets of 2 to 7 of them."""
    table = {name: extra for name, extra in (BOTH | OWN[path]).items() if name not in ("model", "prompt", "messages")}
    draw, names = random.Random(0), sorted(table)
    chosen = [[name] for name in names] + [draw.sample(names, draw.randint(2, 7)) for _ in range(SETS)]
    return [{key: value for name in each for key, value in table[name].items()} for each in chosen]


async def both_ways(server: Server, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answer whole, and streamed, in the same form."""
    options = {**body.pop("stream_options", {}), "include_usage": True}
    async with server.session.post(server.url + path, json=body | {"stream": False}) as response:
        whole = await response.json()
    async with server.session.post(
        server.url + path, json=body | {"stream": True, "stream_options": options}
    ) as response:
        text = await response.text()
        if response.status != 200:
            return of_whole(whole), json.loads(text)
    *events, done = text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return of_whole(whole), of_events([json.loads(event.removeprefix("data: ")) for event in events])


@pytest.mark.parametrize("path", PROMPTS)
async def test_answers_are_equal_streamed_and_whole_for_every_set_of_parameters(server: Server, path: str) -> None:
    room = asyncio.Semaphore(AT_ONCE)

    async def is_refused(body: dict[str, Any]) -> bool:
        async with room:
            whole, streamed = await both_ways(server, path, PROMPTS[path] | {"seed": 1} | body)
        assert streamed == whole, body
        return "error" in whole

    assert sum(await asyncio.gather(*map(is_refused, bodies(path)))) < SETS // 2


async def test_parameters_that_exclude_each_other_are_refused_alike(server: Server) -> None:
    for body in ({"top_logprobs": 2}, {"structured_outputs": {"regex": "a", "choice": ["a"]}}, {"min_tokens": 9000}):
        whole, streamed = await both_ways(server, CHAT, PROMPTS[CHAT] | body)
        assert streamed == whole
        assert whole["error"]["param"] in body or whole["error"]["param"] == "structured_outputs"
