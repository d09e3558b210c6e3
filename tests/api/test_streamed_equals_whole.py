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


# --------------------------------------------------------------------------------- values that act on each other
#
# Above, most values change nothing that the scripted runner puts out. Here stop strings and ids are taken from the
# answer itself, so that they cut special tokens, characters of several bytes, reasoning and calls.

ANSWER = (
    "Grüße, 世界! 👨‍👩‍👧<|im_end|> <think>so</think> "
    '<tool_call>{"name": "f", "arguments": {"a": "}"}}</tool_call>\n'
    '<tool_call>{"name": "ünï", "arguments": {}}</tool_call>\r\n<repo_name>end'
)
MIXED_SETS = 60


def mixed_body(draw: random.Random, path: str, ids: list[int]) -> dict[str, Any]:
    """A request whose answer is (unless it is cut) its prompt, with any of the parameters that act on what is shown."""

    def piece() -> str:
        start = draw.randrange(len(ANSWER))
        return ANSWER[start : start + draw.choice([1, 2, 3, 7, 20])]

    choices: dict[str, tuple[float, list[Any]]] = {
        "n": (0.4, [1, 2, 3]),
        "stop": (0.4, [piece(), [piece(), piece()], ["zzz"], [piece() for _ in range(16)]]),
        "stop_token_ids": (0.3, [[draw.choice(ids)], [draw.choice(ids), draw.choice(ids)]]),
        "include_stop_str_in_output": (0.5, [True, False]),
        "skip_special_tokens": (0.6, [True, False]),
        "min_tokens": (0.3, [1, 5]),
        "ignore_eos": (0.2, [True]),
        "return_token_ids": (0.7, [True, False]),
        "return_prompt_token_ids": (0.3, [True, False]),
        "timings": (0.2, [True]),
        "stream_options": (0.4, [{"continuous_usage_stats": True}]),
    }
    body: dict[str, Any] = {"max_tokens": draw.choice([5, 20, len(ids), len(ids) + 1, 150])}
    if path == COMPLETIONS:
        prompts = [ANSWER, [ANSWER], ids, [ids], [ANSWER, "b<|im_end|>c"], [ids, [5, 6]], ids[::-1]]
        body |= {"prompt": draw.choice(prompts)}
        choices |= {"echo": (0.5, [True, False]), "logprobs": (0.4, [0, 1, 5])}
    else:
        body |= {"messages": [{"role": "user", "content": ANSWER}]}
        calls = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
        if draw.random() < 0.5:
            named = {"type": "function", "function": {"name": "f"}}
            body |= {"tools": calls, "tool_choice": draw.choice(["auto", "none", "required", named])}
            choices |= {"parallel_tool_calls": (0.4, [True, False])}
        if draw.random() < 0.5:
            body |= {"logprobs": True, "top_logprobs": draw.choice([0, 1, 3])}
        choices |= {"add_generation_prompt": (0.3, [False])}
    for name, (share, values) in choices.items():
        if draw.random() < share:
            body[name] = draw.choice(values)
    if body.get("tool_choice") not in (None, "auto", "none"):  # a structure says where such an answer ends
        body = {name: value for name, value in body.items() if name not in ("min_tokens", "ignore_eos")}
    if body.get("echo") and draw.random() < 0.2 and "min_tokens" not in body:
        body["max_tokens"] = 0
    return body


async def check_choice(server: Server, body: dict[str, Any], choice: dict[str, Any]) -> None:
    """What is true of a completion's choice whatever was asked for."""
    prompt, text = body["prompt"], choice["text"]
    if not isinstance(prompt, str) and not isinstance(prompt[0], int):
        prompt = prompt[choice["index"] // body.get("n", 1)]
    if body.get("echo"):
        before = prompt if isinstance(prompt, str) else await text_of(server, prompt)
        assert text.startswith(before)
        text = text.removeprefix(before)
    stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop", [])
    if body.get("include_stop_str_in_output"):
        assert text.endswith(choice["stop_reason"]) if choice["stop_reason"] in stops else True
    else:
        assert not [stop for stop in stops if stop in text]
    assert choice["finish_reason"] == ("stop" if choice["stop_reason"] is not None else choice["finish_reason"])
    if body.get("return_token_ids") and body.get("skip_special_tokens") is False and "\ufffd" not in text:
        written = await text_of(server, choice["token_ids"])
        assert written == text if choice["finish_reason"] == "length" else written.startswith(text)


async def text_of(server: Server, ids: list[int]) -> str:
    _, answer = await server.post("/detokenize", {"tokens": ids})
    text: str = answer["prompt"]
    return text


@pytest.mark.parametrize("path", PROMPTS)
async def test_answers_are_equal_and_right_where_parameters_act_on_each_other(server: Server, path: str) -> None:
    _, tokens = await server.post("/tokenize", {"prompt": ANSWER})
    draw, ends = random.Random(1), set()
    for _ in range(MIXED_SETS):
        body = mixed_body(draw, path, tokens["tokens"])
        whole, streamed = await both_ways(server, path, dict(body))
        assert streamed == whole, body
        assert "error" not in whole, (body, whole)
        for choice in whole["choices"]:
            if path == COMPLETIONS:
                await check_choice(server, body, choice)
            ends.add((choice["finish_reason"], type(choice["stop_reason"])))
        if body.get("return_token_ids"):
            counted = sum(len(choice["token_ids"]) for choice in whole["choices"])
            assert whole["usage"]["completion_tokens"] == counted, body
    calls = set() if path == COMPLETIONS else {("tool_calls", type(None))}
    assert ends >= {("stop", str), ("stop", int), ("stop", type(None)), ("length", type(None))} | calls
