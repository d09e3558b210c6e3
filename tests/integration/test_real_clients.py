"""Clients as people have them, against a real server: the `openai` package, LangChain's, Pydantic AI, and curl.

The model is the first layers of SmolLM2, whose answers make no sense: each client must get what plain HTTP gets."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import aiohttp
import openai
import pydantic
import pytest
import pytest_asyncio

from asyncengine import AsyncEngine, EngineConfig
from asyncengine.api.app import bound_port, run_app

pytest.importorskip("langchain_openai", reason="LangChain's OpenAI client is not installed")
pytest.importorskip("pydantic_ai", reason="Pydantic AI is not installed")
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.messages.content import create_text_block
from langchain_openai import ChatOpenAI
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from support.shallow_model import NAME as MODEL
from support.shallow_model import shallow_model_file

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

QUESTION = "What is the capital of France?"
ANSWER_TOKENS = 8
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TEMPLATE = """
{%- set task = 'Call <tool_call>{"name": .., "arguments": ..}</tool_call>: ' + tools | tojson if tools else 'SYSTEM' %}
{{- '<|im_start|>system\n' + task + '<|im_end|>\n' }}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
""".replace("SYSTEM", SYSTEM)
"""The model's own, with a place for tools."""


class Weather(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    template: Path = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    config = EngineConfig(
        model=str(shallow_model_file()),
        device="cpu",
        kv_cache_tokens=8192,
        max_model_len=1024,
        max_num_seqs=8,
        chat_template=str(template),
    )
    async with AsyncEngine.start(config) as engine:
        runner = await run_app(engine, "127.0.0.1", 0)
        yield f"http://127.0.0.1:{bound_port(runner)}"
        await runner.cleanup()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def answer(url: str) -> str:
    """To QUESTION, in ANSWER_TOKENS tokens."""
    body = {"model": MODEL, "messages": ASKED, "temperature": 0, "max_tokens": ANSWER_TOKENS}
    async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/chat/completions", json=body) as response:
        text: str = (await response.json())["choices"][0]["message"]["content"]
    assert text.strip()
    return text


# ------------------------------------------------------------------------------------------------------------- openai


async def test_the_synchronous_openai_client_chats_streams_and_gets_log_probabilities(url: str, answer: str) -> None:
    def talk() -> tuple[str | None, str, list[str]]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            asked: Any = {"model": MODEL, "messages": ASKED, "temperature": 0, "max_tokens": ANSWER_TOKENS}
            whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2).choices[0]
            streamed = "".join(
                chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)
            )
            assert whole.logprobs is not None
            assert whole.logprobs.content is not None
            assert all(len(entry.top_logprobs) == 2 for entry in whole.logprobs.content)
            return whole.message.content, streamed, [entry.token for entry in whole.logprobs.content]

    content, streamed, tokens = await asyncio.to_thread(talk)
    assert content == streamed == "".join(tokens) == answer


async def test_the_openai_clients_parse_helper_makes_objects_of_a_type(url: str) -> None:
    def talk() -> Weather | None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.parse(
                model=MODEL, messages=ASKED, temperature=0, max_tokens=80, response_format=Weather
            )
            return answer.choices[0].message.parsed

    weather = await asyncio.to_thread(talk)
    assert isinstance(weather, Weather)


async def test_the_openai_clients_stream_helper_gathers_events_to_an_answer_with_a_tool_call(url: str) -> None:
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(
            model=MODEL,
            messages=ASKED,
            temperature=0,
            max_tokens=80,
            tools=[openai.pydantic_function_tool(Weather)],
            tool_choice="required",
            parallel_tool_calls=False,
            stream_options={"include_usage": True},
        ) as stream,
    ):
        kinds = [event.type async for event in stream]
        answer = await stream.get_final_completion()
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert [type(call.function.parsed_arguments) for call in calls] == [Weather]
    assert kinds.count("tool_calls.function.arguments.done") == 1
    assert "tool_calls.function.arguments.delta" in kinds
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 8


# ---------------------------------------------------------------------------------------------------------- LangChain


@pytest.fixture
def chat(url: str) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL,
        base_url=f"{url}/v1",
        api_key=pydantic.SecretStr("none"),
        temperature=0,
        max_retries=0,
        max_completion_tokens=80,
    )


async def test_langchain_chats_streams_and_gets_log_probabilities(chat: ChatOpenAI, answer: str) -> None:
    short = chat.bind(max_tokens=ANSWER_TOKENS)

    async def stream() -> list[str]:
        return [str(chunk.content) async for chunk in short.astream(QUESTION)]

    whole, chunks, (batched,) = await asyncio.gather(
        short.ainvoke(QUESTION, logprobs=True), stream(), asyncio.to_thread(short.batch, [QUESTION])
    )
    assert "".join(chunks) == batched.content == answer
    assert whole.content == answer
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == ANSWER_TOKENS
    assert "".join(entry["token"] for entry in whole.response_metadata["logprobs"]["content"]) == answer


async def test_langchains_content_blocks_are_text_with_an_id(chat: ChatOpenAI, answer: str) -> None:
    message = HumanMessage(content_blocks=[create_text_block(QUESTION)])
    assert "id" in message.content[0]
    assert (await chat.ainvoke([message], max_tokens=ANSWER_TOKENS)).content == answer


async def test_langchain_calls_tools_whole_and_streamed_and_hands_back_results(chat: ChatOpenAI) -> None:
    model = chat.bind_tools([Weather], tool_choice="Weather")

    async def stream() -> Any:
        gathered = AIMessageChunk(content="")
        async for chunk in model.astream(QUESTION):
            gathered += chunk  # type: ignore[assignment]
        return gathered

    answer, gathered = await asyncio.gather(model.ainvoke(QUESTION), stream())
    assert isinstance(answer, AIMessage)
    (call,) = answer.tool_calls
    assert call["name"] == "Weather"
    Weather.model_validate(call["args"])
    assert [(again["name"], again["args"]) for again in gathered.tool_calls] == [("Weather", call["args"])]
    result = ToolMessage("21 degrees", tool_call_id=call["id"] or "")
    assert (await chat.ainvoke([("user", QUESTION), answer, result], max_tokens=4)).content


async def test_langchains_structured_output_is_an_object_of_the_type(chat: ChatOpenAI) -> None:
    answer = await chat.with_structured_output(Weather).ainvoke(QUESTION)
    assert isinstance(answer, Weather)


# -------------------------------------------------------------------------------------------------------- Pydantic AI


@pytest.fixture
def model(url: str) -> OpenAIChatModel:
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    return OpenAIChatModel(MODEL, provider=provider, settings=ModelSettings(temperature=0, max_tokens=80))


async def test_pydantic_ai_chats_and_streams(model: OpenAIChatModel, answer: str) -> None:
    agent = Agent(model, retries=0, model_settings=ModelSettings(max_tokens=ANSWER_TOKENS))
    whole = await agent.run(QUESTION)
    async with agent.run_stream(QUESTION) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    assert whole.output == "".join(pieces) == answer
    assert whole.usage.output_tokens == stream.usage.output_tokens == ANSWER_TOKENS


async def test_pydantic_ai_gets_objects_by_tools_and_by_json_schema_whole_and_streamed(model: OpenAIChatModel) -> None:
    async def streamed(agent: Agent[None, Weather]) -> Weather:
        async with agent.run_stream(QUESTION) as stream:
            return await stream.get_output()

    async def ask(kind: Any) -> None:
        agent: Agent[None, Weather] = Agent(model, output_type=kind, retries=0)
        whole, again = await asyncio.gather(agent.run(QUESTION), streamed(agent))
        assert isinstance(whole.output, Weather)
        assert again == whole.output

    await asyncio.gather(ask(Weather), ask(NativeOutput(Weather, strict=True)))


# --------------------------------------------------------------------------------------------------------------- curl


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl_gets_answers_whole_and_streamed_and_refusals_with_their_status(url: str, answer: str) -> None:
    async def post(options: str, **body: Any) -> str:
        json_body = json.dumps(body)
        command = f"curl -sSN {options} {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json_body}'"
        process = await asyncio.create_subprocess_shell(command, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        assert process.returncode == 0
        return output.decode()

    asked: dict[str, Any] = {"messages": ASKED, "temperature": 0, "max_tokens": ANSWER_TOKENS}
    whole = json.loads(await post("--fail", **asked))
    assert whole["choices"][0]["message"]["content"] == answer
    *events, done = (await post("--fail", **asked, stream=True)).strip().split("\n\n")
    assert done == "data: [DONE]"
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == answer
    assert await post("-o /dev/null -w '%{http_code}'") == "400"
