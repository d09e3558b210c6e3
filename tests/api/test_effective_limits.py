"""Where the KV cache holds less than the model's context, every number that is told is the smaller one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from api_server import CHAT, COMPLETIONS, Server, serving
from support.python_path import PYTHON_PATH

from asyncengine import AsyncEngine, EngineConfig, InvalidRequestError, SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOM = 112
"""Of the 8192 tokens that the model was made for."""


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHON_PATH)
        patch.setenv("ASYNCENGINE_SCRIPT", json.dumps({"max_model_len": ROOM, "num_pages": 8}))
        yield


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine() -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine.start(EngineConfig(), modules={"gpu_runner": "support.scripted_runner"}) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(engine: AsyncEngine) -> AsyncIterator[Server]:
    async with serving(engine) as server:
        yield server


LONG = "word " * 3000
BODIES: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": [5] * ROOM, "max_tokens": 1}, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 100, "max_tokens": 13}, "max_tokens"),
    (COMPLETIONS, {"prompt": [5] * 100, "max_tokens": None, "min_tokens": 13}, "min_tokens"),
    (COMPLETIONS, {"prompt": LONG}, "prompt"),
    (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": ROOM}, "max_tokens"),
    ("/tokenize", {"prompt": LONG}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": LONG}], "add_special_tokens": False}, "messages"),
]


@pytest.mark.parametrize(("path", "body", "param"), BODIES)
async def test_a_refusal_names_the_limit_that_applies(
    server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    status, answer = await server.post(path, body)
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert f"the {ROOM} tokens that the KV cache holds" in error["message"]
    assert "8192" not in error["message"]


async def test_what_is_told_of_the_model_is_what_applies(server: Server, engine: AsyncEngine) -> None:
    async with server.session.get(server.url + "/v1/models") as response:
        assert (await response.json())["data"][0]["max_model_len"] == ROOM
    assert (await server.post("/tokenize", {"prompt": "a"}))[1]["max_model_len"] == ROOM
    body = {"prompt": [5] * 100, "max_tokens": None, "ignore_eos": True}
    assert (await server.post(COMPLETIONS, body))[1]["usage"]["completion_tokens"] == ROOM - 100
    with pytest.raises(InvalidRequestError, match=f"the {ROOM} tokens"):
        async for _ in engine.generate([5] * ROOM, SamplingParams()):
            pass
