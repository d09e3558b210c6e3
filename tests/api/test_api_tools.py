"""Tools in a request and tool calls in its answer: what reaches the engine, and what the real `openai` client gets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import openai
import pytest
from api_server import CHAT, Server
from fake_backend import MODEL, FakeBackend

from asyncengine import ChatPrompt, SamplingParams, ToolCallDelta
from asyncengine.api.tools import MAX_SCHEMA_DEPTH, MAX_TOOLS
from asyncengine.client import AsyncClient
from asyncengine.errors import InvalidRequestError
from asyncengine.sampling import MAX_STRUCTURED_BYTES
from asyncengine.wire.requests import Markup

USER: Any = {"role": "user", "content": "Weather in Paris and Köln?"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": CITY}},
    {"type": "function", "function": {"name": "time"}},
]
NAMED: Any = {"type": "function", "function": {"name": "time"}}
CALLS = [("weather", '{"city": "Paris"}'), ("time", "{}"), ("unknown", r'{"a": "</tool_call> \"}"}')]
HERMES = "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>' for name, text in CALLS)
LLAMA3 = "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in CALLS)


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def script(backend: FakeBackend, text: str, size: int, **info: Any) -> None:
    """Have the model write `text`, in tokens of `size` characters."""
    backend.pieces = [text[start : start + size] for start in range(0, len(text), size)]
    backend.numbered = False
    backend.info = msgspec.structs.replace(backend.info, **info)


def function(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


# --------------------------------------------------------------------------------------------------------- the answer


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("format", "text", "content"),
    [
        ("hermes", HERMES, None),
        ("hermes", "I'll look.\n\n" + HERMES, "I'll look."),
        ("llama3", LLAMA3, None),
        ("llama3", "I'll look.<|python_tag|>" + LLAMA3, "I'll look."),
    ],
)
async def test_streamed_calls_are_those_not_streamed(
    client: openai.AsyncOpenAI, backend: FakeBackend, format: str, text: str, content: str | None, size: int
) -> None:
    script(backend, text, size, tool_call_format=format)
    asked: Any = {"model": MODEL, "messages": [USER], "tools": TOOLS, "n": 2}
    whole = await client.chat.completions.create(**asked)
    assert len({call.id for choice in whole.choices for call in choice.message.tool_calls or []}) == 2 * len(CALLS)
    for choice in whole.choices:
        calls = choice.message.tool_calls
        assert calls is not None
        assert [(call.function.name, call.function.arguments) for call in calls if call.type == "function"] == CALLS
        assert all(call.id.startswith("call_") for call in calls)
        assert (choice.message.content, choice.finish_reason) == (content, "tool_calls")
    streamed: list[dict[int, list[str]]] = [{}, {}]
    texts, finishes = ["", ""], [None, None]
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        (choice_chunk,) = chunk.choices
        texts[choice_chunk.index] += choice_chunk.delta.content or ""
        finishes[choice_chunk.index] = choice_chunk.finish_reason or finishes[choice_chunk.index]
        for call in choice_chunk.delta.tool_calls or []:
            assert call.function is not None
            parts = streamed[choice_chunk.index].setdefault(call.index, [])
            if not parts:
                assert call.id is not None
                assert call.id.startswith("call_")
                assert call.type == "function"
                parts.append(call.function.name or "")
            else:
                assert call.id is call.type is call.function.name is None
            parts.append(call.function.arguments or "")
    for choice_calls in streamed:
        assert [(name, "".join(rest)) for name, *rest in choice_calls.values()] == CALLS
    assert texts == [content or ""] * 2
    assert finishes == ["tool_calls"] * 2


async def test_arguments_stream_as_they_are_written(server: Server, backend: FakeBackend) -> None:
    script(backend, "", 1)
    backend.pieces = ["Ok.", "<tool_", 'call>{"name": "f", ', '"arguments": {"a"', ": 1", "}}</tool", "_call>", ""]
    *events, _ = await server.events(CHAT, {"messages": [USER], "tools": [function()]})
    deltas = [event["choices"][0]["delta"] for event in events]
    call = deltas[2]["tool_calls"][0]
    assert call.pop("id").startswith("call_")
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "Ok."},
        {"tool_calls": [{"index": 0, "type": "function", "function": {"name": "f", "arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
        {},
    ]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 5 + ["tool_calls"]


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_logprobs_and_ids_are_those_of_all_tokens(
    server: Server, backend: FakeBackend, stream: bool
) -> None:
    script(backend, HERMES, 4)
    asked = {"messages": [USER], "tools": TOOLS, "logprobs": True, "return_token_ids": True}
    size = len(backend.pieces)
    if stream:
        events = (await server.events(CHAT, asked | {"stream_options": {"include_usage": True}}))[1:-1]
        choices = [event["choices"][0] for event in events[:-1]]
        usage = events[-1]["usage"]
    else:
        status, answer = await server.post(CHAT, asked)
        assert status == 200
        choices, usage = answer["choices"], answer["usage"]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert [entry["token"] for entry in entries] == backend.pieces
    assert [token for choice in choices for token in choice["token_ids"]] == list(range(101, 101 + size))
    assert usage["completion_tokens"] == size


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_no_call_is_content(server: Server, backend: FakeBackend, stream: bool) -> None:
    script(backend, "<tool_call>oops</tool_call>", 2)
    if stream:
        events = await server.events(CHAT, {"messages": [USER], "tools": TOOLS})
        choices = [event["choices"][0] for event in events[:-1]]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        finish = choices[-1]["finish_reason"]
    else:
        _, answer = await server.post(CHAT, {"messages": [USER], "tools": TOOLS})
        text, finish = answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]
        assert "tool_calls" not in answer["choices"][0]["message"]
    assert (text, finish) == ("<tool_call>oops</tool_call>", "stop")


@pytest.mark.parametrize("asked", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_nobody_gets_calls_unasked(server: Server, backend: FakeBackend, asked: dict[str, Any]) -> None:
    script(backend, HERMES, 5)
    _, answer = await server.post(CHAT, {"messages": [USER], **asked})
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": HERMES, "refusal": None}
    assert answer["choices"][0]["finish_reason"] == "stop"
    prompt = backend.calls[0][0]
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.tools, prompt.markup) == ([], None)


@pytest.mark.parametrize(("finish", "reason"), [(("length", None), "length"), (("abort", None), "abort")])
async def test_a_call_that_was_cut_short_is_an_incomplete_one(
    server: Server, backend: FakeBackend, finish: tuple[str, None], reason: str
) -> None:
    script(backend, '<tool_call>{"name": "f", "arguments": {"a": "b', 3)
    backend.finish = finish
    _, answer = await server.post(CHAT, {"messages": [USER], "tools": TOOLS})
    choice = answer["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "b'}
    assert choice["finish_reason"] == reason


# ------------------------------------------------------------------------------------------------------- the reasoning


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("<think>\nhm </thin\n</think>\n\nYes.", "hm </thin", "Yes.", []),
        ("Yes.", None, "Yes.", []),
        ("<think>\n\n</think>\n\nYes.", None, "Yes.", []),
        ("<think>never", "never", "", []),
        ("<think>\nhm\n</think>\n\n" + HERMES, "hm", None, CALLS),
    ],
)
async def test_streamed_reasoning_is_that_not_streamed(
    client: openai.AsyncOpenAI,
    backend: FakeBackend,
    text: str,
    reasoning: str | None,
    content: str | None,
    calls: list[tuple[str, str]],
    size: int,
) -> None:
    script(backend, text, size, reasoning=True)
    asked: Any = {"model": MODEL, "messages": [USER], "tools": TOOLS}
    message = (await client.chat.completions.create(**asked)).choices[0].message
    assert getattr(message, "reasoning", None) == getattr(message, "reasoning_content", None) == reasoning
    assert message.content == content
    assert [call.function.name for call in message.tool_calls or [] if call.type == "function"] == [n for n, _ in calls]
    thought = said = ""
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        delta = chunk.choices[0].delta
        assert getattr(delta, "reasoning", None) == getattr(delta, "reasoning_content", None)
        thought += getattr(delta, "reasoning", None) or ""
        said += chunk.choices[0].delta.content or ""
    assert (thought, said) == (reasoning or "", content or "")
    prompt = backend.calls[0][0]
    assert isinstance(prompt, ChatPrompt)
    assert prompt.markup == Markup(("<tool_call>", "</tool_call>", "<think>", "</think>"), "<think>")


async def test_completions_and_models_that_do_not_think_have_their_text_as_it_is(
    server: Server, backend: FakeBackend
) -> None:
    script(backend, "<think>a</think>b", 3)
    _, answer = await server.post(CHAT, {"messages": [USER]})
    assert answer["choices"][0]["message"]["content"] == "<think>a</think>b"
    script(backend, "<think>a</think>b", 3, reasoning=True)
    _, answer = await server.post("/v1/completions", {"prompt": "x"})
    assert answer["choices"][0]["text"] == "<think>a</think>b"


FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("asked", "info", "start"),
    [
        ({"tools": TOOLS}, {}, "answer | call ("),
        ({"tools": TOOLS, "tool_choice": "required"}, {}, "call ("),
        ({"tools": TOOLS, "tool_choice": "required"}, {"tool_call_format": "llama3"}, "function ("),
        ({"tools": TOOLS}, {"reasoning": True}, "think? (answer | call ("),
        ({}, {"reasoning": True}, "think? (answer)\n"),
    ],
)
async def test_json_is_asked_for_in_place_of_calls_and_behind_reasoning(
    server: Server, backend: FakeBackend, asked: dict[str, Any], info: dict[str, Any], start: str
) -> None:
    script(backend, "5", 5, **info)
    status, answer = await server.post(CHAT, {"messages": [USER], "response_format": FORMAT, **asked})
    assert status == 200, answer
    prompt, params = backend.calls[0]
    assert params.structured is not None
    assert params.structured.text.startswith(f"start: {start}")
    assert isinstance(prompt, ChatPrompt)
    thinking = prompt.markup.structured_thinking if prompt.markup is not None else None
    assert (thinking is not None) == ("reasoning" in info)
    assert thinking is None or thinking.text.startswith("start: think (")


async def test_structures_that_leave_no_place_for_anything_else_are_kept_to_alone(
    server: Server, backend: FakeBackend
) -> None:
    script(backend, "<think>", 5, reasoning=True)
    _, answer = await server.post(CHAT, {"messages": [USER], "structured_outputs": {"regex": "<think>"}})
    assert answer["choices"][0]["message"]["content"] == "<think>"
    script(backend, "5", 5, tool_call_format="llama3")
    status, answer = await server.post(CHAT, {"messages": [USER], "tools": TOOLS, "response_format": FORMAT})
    assert (status, answer["error"]["param"]) == (400, "tools")


# -------------------------------------------------------------------------------------------------------- the request


async def test_tools_and_the_turns_of_calls_reach_the_template(
    client: openai.AsyncOpenAI, backend: FakeBackend
) -> None:
    call: Any = {"id": "call_1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    messages: Any = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "5 pm"},
    ]
    await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    prompt, params = backend.calls[0]
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == [USER, {**messages[1], "content": ""}, messages[2]]
    assert prompt.tools == [
        TOOLS[0],
        function("time", parameters={"type": "object", "properties": {}}),
    ]
    assert prompt.markup == Markup(("<tool_call>", "</tool_call>"))
    assert params == SamplingParams()


@pytest.mark.parametrize(
    ("asked", "kept", "several"),
    [
        ({"tool_choice": "auto"}, None, None),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, None, None),
        ({"tool_choice": "required"}, "call (", True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, "call\n", False),
        ({"tool_choice": NAMED}, "call\n", False),
        ({"parallel_tool_calls": False}, "head function | TEXT", False),
        ({"tools": [function(strict=True, parameters=CITY)]}, "(head function)* TEXT", True),
    ],
)
async def test_answers_are_kept_to_what_was_chosen(
    server: Server, backend: FakeBackend, asked: dict[str, Any], kept: str | None, several: bool | None
) -> None:
    script(backend, HERMES, 5)
    status, answer = await server.post(CHAT, {"messages": [USER], "tools": TOOLS, **asked})
    assert status == 200, answer
    structured = backend.calls[0][1].structured
    if kept is None:
        assert structured is None
        return
    assert structured is not None
    assert structured.kind == "grammar"
    assert structured.text.startswith(f"start: {kept}")
    assert ('\\"weather\\"' in structured.text) == ("tools" not in asked and asked.get("tool_choice") != NAMED)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tools": [function("")]}, "tools[0].function.name"),
        ({"tools": [function("a b")]}, "tools[0].function.name"),
        ({"tools": [function("a\n")]}, "tools[0].function.name"),
        ({"tools": [function("x" * 65)]}, "tools[0].function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [function(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [function(parameters={"type": "array"})]}, "tools[0].function.parameters.type"),
        ({"tools": [function(), function()]}, "tools[1].function.name"),
        ({"tools": [function(f"f{i}") for i in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [function(parameters={"a": "x" * MAX_STRUCTURED_BYTES})]}, "tools[0].function.parameters"),
        ({"tools": {}}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [function()], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [function()], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [function()], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [function()], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tools": [function()], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"tools": [function()], "structured_outputs": {"regex": "a"}}, "tools"),
        (
            {
                "tools": [function(f"f{i}", parameters={"title": "x" * 40_000}) for i in range(2)],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
async def test_malformed_tools_are_named_and_reach_nobody(
    server: Server, backend: FakeBackend, asked: dict[str, Any], param: str, stream: bool
) -> None:
    status, answer = await server.post(CHAT, {"messages": [USER], "stream": stream, **asked})
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert len(answer["error"]["message"]) < 300
    assert backend.calls == []


async def test_schemas_may_be_nested_to_a_limit(server: Server, backend: FakeBackend) -> None:
    def nested(depth: int) -> bytes:
        schema = '{"items":' * (depth - 1) + "{}" + "}" * (depth - 1)
        tool = '{"type":"function","function":{"name":"f","parameters":' + schema + "}}"
        return f'{{"messages":{json.dumps([USER])},"tools":[{tool}]}}'.encode()

    assert (await server.post(CHAT, nested(MAX_SCHEMA_DEPTH)))[0] == 200
    for depth in (MAX_SCHEMA_DEPTH + 2, 100_000):
        status, answer = await server.post(CHAT, nested(depth))
        assert status == 400, answer
    assert len(backend.calls) == 1


async def test_tools_of_a_model_whose_format_is_not_known_are_refused(server: Server, backend: FakeBackend) -> None:
    script(backend, "Yes.", 5, tool_call_format=None)
    status, answer = await server.post(CHAT, {"messages": [USER], "tools": TOOLS})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "unsupported_parameter", "tools")
    assert "--tool-call-parser" in answer["error"]["message"]
    assert (await server.post(CHAT, {"messages": [USER], "tools": TOOLS, "tool_choice": "none"}))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_schema_that_cannot_be_kept_to_is_the_tools_fault(
    server: Server, backend: FakeBackend, stream: bool
) -> None:
    backend.refusal = InvalidRequestError("the grammar cannot be used: x", code="c", param="structured_outputs")
    asked = {"messages": [USER], "tools": TOOLS, "tool_choice": "required", "stream": stream}
    status, answer = await server.post(CHAT, asked)
    error = answer["error"]
    assert (status, error["param"], error["code"]) == (400, "tools", "c")
    assert error["message"] == "the schema of a function cannot be used: x"


# --------------------------------------------------------------------------------------------------------- the client


@pytest.mark.parametrize(
    ("choice", "sent"), [("auto", "auto"), ("none", "none"), ("required", "required"), ("time", NAMED)]
)
async def test_the_client_sends_tools_and_gets_typed_calls(
    server: Server, backend: FakeBackend, choice: str, sent: Any
) -> None:
    script(backend, "<think>hm</think>Ok.\n" + HERMES, 1000, reasoning=True)
    prompt = ChatPrompt(messages=[USER], tools=TOOLS)
    async with AsyncClient(server.url) as client:
        (delta,) = [delta async for delta in client.generate(prompt, tool_choice=choice)]
    assert delta.reasoning == "hm"
    if choice == "none":
        assert (delta.text, delta.tool_calls, delta.finish_reason) == ("Ok.\n" + HERMES, [], "stop")
        return
    assert (delta.text, delta.finish_reason) == ("Ok.", "tool_calls")
    assert [call.name for call in delta.tool_calls] == [name for name, _ in CALLS]
    assert delta.tool_calls[0] == ToolCallDelta(0, delta.tool_calls[0].id, *CALLS[0])
    assert (backend.calls[0][1].structured is None) == (choice == "auto")


async def test_a_conversations_tokens_are_counted_with_its_tools(server: Server) -> None:
    asked = {"messages": [USER], "add_special_tokens": False, "tools": TOOLS}
    assert (await server.post("/tokenize", asked))[0] == 200
    status, answer = await server.post("/tokenize", {**asked, "tools": [function("a b")]})
    assert (status, answer["error"]["param"]) == (400, "tools[0].function.name")
