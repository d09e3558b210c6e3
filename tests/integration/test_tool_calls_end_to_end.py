"""Tool calls behind the real HTTP endpoint, asked for by the real `openai` client.

The model has no sense of its own (`support.babbling_model`); more clients call tools in `test_real_clients.py`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from support.babbling_model import write_babbling_model

from asyncengine import AsyncEngine, EngineConfig
from asyncengine.api.app import bound_port, run_app

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

MODEL = "a-model"
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\nCall a function as <tool_call>{"name": ..., "arguments": ...}</tool_call>:\n' }}
{%- for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
USER: Any = {"role": "user", "content": "What is the weather in Paris, and what time is it there?"}


def tool(name: str, properties: dict[str, Any], **more: Any) -> Any:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        "$defs": {"unit": {"enum": ["celsius", "fahrenheit"]}},
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


WEATHER = tool("weather", {"city": {"type": "string", "maxLength": 12}, "unit": {"$ref": "#/$defs/unit"}})
TIME = tool("time", {"zone": {"type": "integer", "minimum": -12, "maximum": 12}})


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[openai.AsyncOpenAI]:
    template: Path = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    config = EngineConfig(
        model=write_babbling_model(template.parent),
        load_format="dummy",
        served_model_name=MODEL,
        device="cpu",
        kv_cache_tokens=16384,
        max_num_seqs=8,
        chat_template=str(template),
    )
    async with AsyncEngine.start(config) as engine:
        assert (engine.info.tool_call_format, engine.info.reasoning) == ("hermes", False)
        runner = await run_app(engine, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{bound_port(runner)}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client
        await runner.cleanup()


def calls_of(message: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]


def check(name: str, arguments: dict[str, Any]) -> None:
    if name == "weather":
        assert set(arguments) == {"city", "unit"}
        assert len(arguments["city"]) <= 12
        assert arguments["unit"] in ("celsius", "fahrenheit")
    else:
        assert (name, set(arguments)) == ("time", {"zone"})
        assert -12 <= arguments["zone"] <= 12


async def test_a_required_call_keeps_to_the_schema_of_the_function_it_names(client: openai.AsyncOpenAI) -> None:
    async def ask(seed: int) -> None:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[USER],
            tools=[WEATHER, TIME],
            tool_choice="required",
            parallel_tool_calls=False,
            seed=seed,
            max_tokens=300,
        )
        (choice,) = answer.choices
        ((name, arguments),) = calls_of(choice.message)
        check(name, arguments)
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")

    await asyncio.gather(*(ask(seed) for seed in (1, 2, 3)))


async def test_a_named_function_is_called_and_its_call_streamed_is_the_same(client: openai.AsyncOpenAI) -> None:
    async def ask(named: str) -> None:
        asked: Any = {
            "model": MODEL,
            "messages": [USER],
            "tools": [WEATHER, TIME],
            "tool_choice": {"type": "function", "function": {"name": named}},
            "temperature": 0,
            "max_tokens": 300,
        }
        whole, (text, finish) = await asyncio.gather(client.chat.completions.create(**asked), streamed(client, asked))
        ((name, arguments),) = calls_of(whole.choices[0].message)
        assert name == named
        check(name, arguments)
        assert json.loads(text) == arguments
        assert finish == "tool_calls"

    await asyncio.gather(ask("weather"), ask("time"))


async def streamed(client: openai.AsyncOpenAI, asked: Any) -> tuple[str, str | None]:
    """The arguments of the one call of an answer, and why it ended."""
    text, finish = "", None
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        finish = chunk.choices[0].finish_reason
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.index == 0
            assert call.function is not None
            text += call.function.arguments or ""
    return text, finish


async def test_an_answer_of_free_choice_keeps_to_strict_schemas_and_may_be_text(client: openai.AsyncOpenAI) -> None:
    strict = tool("weather", WEATHER["function"]["parameters"]["properties"], strict=True)
    begun: Any = {"role": "assistant", "content": "Of course."}
    answer = await client.chat.completions.create(
        model=MODEL, messages=[USER, begun, USER], tools=[strict], n=4, seed=5, max_tokens=40
    )
    for choice in answer.choices:
        if choice.finish_reason == "tool_calls":
            for name, arguments in calls_of(choice.message):
                check(name, arguments)
        else:
            assert choice.message.content or choice.message.tool_calls


async def test_calls_and_their_results_go_back_into_the_conversation(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "tools": [WEATHER, TIME], "temperature": 0, "max_tokens": 300}
    first = await client.chat.completions.create(
        **asked, messages=[USER], tool_choice={"type": "function", "function": {"name": "time"}}
    )
    message = first.choices[0].message
    assert message.tool_calls is not None
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": '{"time": "5 pm"}'}
    asked["max_tokens"] = 8
    second = await client.chat.completions.create(**asked, messages=[USER, message.model_dump(), result])
    assert second.choices[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize(
    "parameters", [{"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}}, {"properties": 5}]
)
async def test_a_schema_that_is_none_is_refused_by_name(client: openai.AsyncOpenAI, parameters: Any) -> None:
    broken: Any = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model=MODEL, messages=[USER], tools=[broken], tool_choice="required")
    assert refused.value.param == "tools"
