"""Penalties, logit bias and log-probabilities in a body: what reaches the engine, and what is refused before."""

from __future__ import annotations

from typing import Any

import pytest
from api_server import CHAT, COMPLETIONS, Server
from fake_backend import FakeBackend

from asyncengine.sampling import SamplingParams

BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
}
PATHS = pytest.mark.parametrize("path", BODIES)


@PATHS
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"presence_penalty": -2, "frequency_penalty": 2.0}, {"presence_penalty": -2, "frequency_penalty": 2}),
        ({"repetition_penalty": 0.01}, {"repetition_penalty": 0.01}),
        ({"repetition_penalty": 10}, {"repetition_penalty": 10}),
        ({"logit_bias": {"50256": -100, "0": 0.5}}, {"logit_bias": ((50256, -100), (0, 0.5))}),
        ({"logit_bias": {}}, {"logit_bias": ()}),
        ({"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}, {}),
    ],
)
async def test_adjustments_reach_the_engine(
    server: Server, backend: FakeBackend, path: str, asked: dict[str, Any], expected: dict[str, Any]
) -> None:
    status, answer = await server.post(path, BODIES[path] | asked | {"max_tokens": 3})
    assert status == 200, answer
    assert backend.calls[0][1] == SamplingParams(max_tokens=3, **expected)


@PATHS
async def test_300_tokens_may_be_biased(server: Server, backend: FakeBackend, path: str) -> None:
    bias = {str(token): -1 for token in range(300)}
    assert (await server.post(path, BODIES[path] | {"logit_bias": bias}))[0] == 200
    assert len(backend.calls[0][1].logit_bias) == 300


@pytest.mark.parametrize(
    ("path", "asked", "logprobs"),
    [
        (COMPLETIONS, {}, None),
        (COMPLETIONS, {"logprobs": None}, None),
        (COMPLETIONS, {"logprobs": 0}, 0),
        (COMPLETIONS, {"logprobs": 20}, 20),
        (CHAT, {}, None),
        (CHAT, {"logprobs": False}, None),
        (CHAT, {"logprobs": False, "top_logprobs": 0}, None),
        (CHAT, {"logprobs": True}, 0),
        (CHAT, {"logprobs": True, "top_logprobs": None}, 0),
        (CHAT, {"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
async def test_each_endpoint_asks_for_logprobs_its_own_way(
    server: Server, backend: FakeBackend, path: str, asked: dict[str, Any], logprobs: int | None
) -> None:
    status, answer = await server.post(path, BODIES[path] | asked)
    assert status == 200
    assert backend.calls[0][1].logprobs == logprobs
    assert (answer["choices"][0]["logprobs"] is None) == (logprobs is None)


@PATHS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 2.5),
        ("presence_penalty", "1"),
        ("presence_penalty", False),
        ("frequency_penalty", -2.001),
        ("frequency_penalty", [0]),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", 10.5),
        ("logit_bias", [[5, 1]]),
        ("logit_bias", "5:1"),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": -100.5}),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", {"5": None}),
        ("logit_bias", {"5": True}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"2147483648": 1}),
        ("logit_bias", {"1" * 400: 1}),
        ("logit_bias", {"1.5": 1}),
        ("logit_bias", {" 5": 1}),
        ("logit_bias", {"": 1}),
        ("logit_bias", {"hello": 1}),
        ("logit_bias", {str(token): 1 for token in range(301)}),
    ],
)
async def test_a_malformed_adjustment_is_named_and_reaches_nobody(
    server: Server, backend: FakeBackend, path: str, stream: bool, name: str, value: Any
) -> None:
    status, answer = await server.post(path, BODIES[path] | {name: value, "stream": stream})
    assert status == 400
    assert answer["error"]["param"] == name
    assert answer["error"]["message"].startswith(f"{name}: ")
    assert backend.calls == []


@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        (COMPLETIONS, {"logprobs": -1}, "logprobs"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"logprobs": 1.5}, "logprobs"),
        (COMPLETIONS, {"logprobs": "5"}, "logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": True}, "prompt_logprobs"),
        (CHAT, {"logprobs": 1}, "logprobs"),
        (CHAT, {"logprobs": "true"}, "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": None, "top_logprobs": 2}, "top_logprobs"),
    ],
)
async def test_a_malformed_request_for_logprobs_is_named_and_reaches_nobody(
    server: Server, backend: FakeBackend, path: str, asked: dict[str, Any], param: str
) -> None:
    status, answer = await server.post(path, BODIES[path] | asked)
    assert (status, answer["error"]["param"]) == (400, param)
    assert backend.calls == []


async def test_the_size_of_an_answer_with_logprobs_is_bounded(server: Server, backend: FakeBackend) -> None:
    body = {"prompt": ["a"] * 65, "n": 3, "max_tokens": 1}
    assert (await server.post(COMPLETIONS, body | {"logprobs": 20}))[0] == 200
    backend.calls.clear()
    status, answer = await server.post(COMPLETIONS, body | {"logprobs": 20, "prompt": ["a"] * 66})
    assert (status, answer["error"]["param"]) == (400, "logprobs")
    assert backend.calls == []
    assert (await server.post(COMPLETIONS, body | {"logprobs": None, "n": 15}))[0] == 200


async def test_a_bad_name_and_a_bad_value_of_a_bias_are_told_apart(server: Server) -> None:
    messages = []
    for bias in ({"x": 1}, {"5": 101}):
        _, answer = await server.post(COMPLETIONS, {"prompt": "a", "logit_bias": bias})
        messages.append(answer["error"]["message"])
    assert messages == ["logit_bias: a name in it: Expected `int`, got `str`", "logit_bias: Expected `float` <= 100.0"]


@pytest.mark.parametrize(
    ("number", "param"),
    [(b"1e999", "presence_penalty"), (b"-1e999", "frequency_penalty"), (b"1" + b"0" * 400, "repetition_penalty")],
)
async def test_no_number_is_too_large_to_be_refused(server: Server, number: bytes, param: str) -> None:
    body = b'{"prompt":"a","%b":%b}' % (param.encode(), number)
    assert (await server.post(COMPLETIONS, body))[1]["error"]["param"]
    assert (await server.post(COMPLETIONS, b'{"prompt":"a","logit_bias":{"5":%b}}' % number))[0] == 400
