"""Whatever is unknown in an object inside a body is named by its place: in options it is refused, in a conversation
reported."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pydantic
import pytest
from api_server import CHAT, COMPLETIONS, Server
from fake_backend import MODEL, FakeBackend

from asyncengine.api import request_messages, structured, tools
from asyncengine.api.schema import ChatRequest, CompletionRequest, StreamOptions
from asyncengine.api.token_schema import DetokenizeRequest, TokenizeRequest
from asyncengine.api.unknown_fields import CONVERSATION

BODIES = {
    COMPLETIONS: CompletionRequest,
    CHAT: ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": "c", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "5"},
]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHOICE: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
SCHEMA: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
SEEN: dict[type, tuple[str, dict[str, Any]]] = {
    StreamOptions: ("stream_options", {"stream": True, "stream_options": {"include_usage": True}}),
    structured.ResponseFormat: ("response_format", {"response_format": SCHEMA}),
    structured.JsonSchema: ("response_format.json_schema", {"response_format": SCHEMA}),
    structured.StructuredOutputs: ("structured_outputs", {"structured_outputs": {"regex": "a"}}),
    request_messages.Message: ("messages[1]", {"messages": TURNS}),
    request_messages.ContentPart: ("messages[0].content[1]", {"messages": TURNS}),
    request_messages.ToolCall: ("messages[1].tool_calls[1]", {"messages": TURNS}),
    request_messages.CalledFunction: ("messages[1].tool_calls[1].function", {"messages": TURNS}),
    tools.ToolJson: ("tools[0]", {"tools": [TOOL]}),
    tools.FunctionJson: ("tools[0].function", {"tools": [TOOL]}),
    tools.ToolChoiceJson: ("tool_choice", {"tools": [TOOL], "tool_choice": CHOICE}),
    tools.NamedFunctionJson: ("tool_choice.function", {"tools": [TOOL], "tool_choice": CHOICE}),
}
"""Where each kind of object is, in what body."""
FREE_FORM = {"chat_template_kwargs", "logit_bias", "arguments", "parameters"}
"""Objects whose names are not of this interface: the two first are checked by name (see `test_api_bad_input.py`), the
others are the functions' own."""


def objects(kind: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The kinds of objects inside a type, and the name of the field that each is in."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield name, kind
        for field in msgspec.structs.fields(kind):
            yield from objects(field.type, field.name)
    elif typing.get_origin(kind) is dict:
        yield name, dict
    for inner in typing.get_args(kind):
        yield from objects(inner, name)


def kinds_in(body: type) -> set[type]:
    return {kind for _, kind in objects(body) if kind is not dict} - {body}


def with_field(body: dict[str, Any], place: str, name: str, value: Any) -> dict[str, Any]:
    body = json.loads(json.dumps(body))
    inside: Any = body
    for key, position in re.findall(r"([^.\[\]]+)|\[(\d+)\]", place):
        inside = inside[int(position)] if position else inside[key]
    inside[name] = value
    return body


def cases() -> list[tuple[str, type]]:
    return [
        (path, kind) for path, body in BODIES.items() for kind in sorted(kinds_in(body), key=lambda kind: kind.__name__)
    ]


def test_every_kind_of_object_is_tried() -> None:
    assert {kind for _, kind in cases()} == SEEN.keys()
    assert {name for body in BODIES.values() for name, kind in objects(body) if kind is dict} == FREE_FORM


@pytest.mark.parametrize(("path", "kind"), [case for case in cases() if case[1] not in CONVERSATION])
async def test_an_unknown_field_of_an_option_is_refused_by_its_place(
    server: Server, backend: FakeBackend, path: str, kind: type
) -> None:
    place, extra = SEEN[kind]
    needed: dict[str, Any] = {"prompt": "a"} if path == COMPLETIONS else {"messages": TURNS}
    for name in ("x_unknown", "", "a.b[0]`\n$"):
        status, answer = await server.post(path, with_field(needed | extra, place, name, {"a": [1]}))
        error = answer["error"]
        assert (status, error["code"], error["param"]) == (400, "unknown_parameter", f"{place}.{name}")
        assert error["message"] == f"{place}.{name}: there is no such field"
    status, answer = await server.post(path, with_field(needed | extra, place, "x" * 5000, 1))
    assert (status, answer["error"]["param"]) == (400, f"{place}.{'x' * 64}")
    assert backend.calls == []
    async with server.session.post(server.url + path, json=needed | extra) as response:
        assert response.status == 200


@pytest.mark.parametrize(("path", "kind"), [case for case in cases() if case[1] in CONVERSATION])
async def test_an_unknown_field_of_a_conversation_is_reported_by_its_place_and_refused_where_asked_for(
    server: Server, backend: FakeBackend, path: str, kind: type
) -> None:
    place, extra = SEEN[kind]
    body = {"messages": TURNS} | extra
    for name in ("x_unknown", "a.b[0]`$"):
        async with server.session.post(server.url + path, json=with_field(body, place, name, {"a": [1]})) as response:
            assert (response.status, response.headers["x-ignored-fields"]) == (200, f"{place}.{name}")
    several = with_field(with_field(with_field(body, place, "x", 1), place, "y", None), "messages[2]", "z", [])
    async with server.session.post(server.url + path, json=several | {"w": 1}) as response:
        named = response.headers["x-ignored-fields"].split(", ")
        assert (response.status, set(named)) == (200, {"w", f"{place}.x", "messages[2].z"})  # null asks for nothing
    async with server.session.post(server.url + path, json=body) as response:
        assert (response.status, "x-ignored-fields" in response.headers) == (200, False)
    assert [call for call in backend.calls if call != backend.calls[-1]] == []
    if path == CHAT:
        status, answer = await server.post(path, several | {"tools": [TOOL], "tool_choice": CHOICE | {"x": 1}})
        assert (status, answer["error"]["param"]) == (400, "tool_choice.x")
    backend.info = msgspec.structs.replace(backend.info, refuse_unknown_fields=True)
    status, answer = await server.post(path, with_field(body, place, "x", 1))
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "unknown_parameter", f"{place}.x")


@pytest.mark.parametrize(
    ("place", "name", "same", "others"),
    [
        ("messages[1]", "refusal", "", [5]),
        ("messages[1]", "audio", None, [{"id": "a"}]),
        ("messages[1]", "function_call", None, [{"name": "f", "arguments": "{}"}]),
        ("messages[1]", "annotations", [], [{"a": []}]),
        ("messages[1]", "cache_control", {"type": "ephemeral"}, []),
        ("messages[1]", "id", 1947269257, []),
        ("messages[1]", "metadata", {"trimmed_by": "a plugin"}, []),
        ("messages[1]", "provider_specific_fields", {"refusal": None}, []),
        ("messages[1]", "parsed", {"a": [1]}, []),
        ("messages[0].content[0]", "id", "lc_1", [5]),
        ("messages[0].content[0]", "index", "lc_txt_0", []),
        ("messages[0].content[0]", "annotations", [{"type": "citation"}], []),
        ("messages[0].content[0]", "extras", {"a": 1}, []),
        ("messages[0].content[0]", "cache_control", {"type": "ephemeral", "ttl": "1h"}, []),
        ("messages[1].tool_calls[1]", "index", 1, []),
        ("messages[1].tool_calls[1].function", "parsed_arguments", {"a": 1}, []),
        ("tools[0]", "cache_control", {"type": "ephemeral"}, []),
        ("stream_options", "include_obfuscation", False, [True]),
    ],
)
async def test_what_clients_send_along_changes_nothing_or_is_refused(
    server: Server, backend: FakeBackend, place: str, name: str, same: Any, others: list[Any]
) -> None:
    body = {"messages": TURNS, "tools": [TOOL], "stream": True, "stream_options": {"include_usage": True}}
    without = await server.events(CHAT, body)
    for value in (None, same):
        assert len(await server.events(CHAT, with_field(body, place, name, value))) == len(without)
    assert backend.calls[1:] == backend.calls[:1] * 2
    for value in others:
        status, answer = await server.post(CHAT, with_field(body, place, name, value))
        error = answer["error"]
        assert (status, error["param"]) == (400, f"{place}.{name}")
        assert error["code"] == "invalid_value" if name in ("id", "annotations", "refusal") else "unsupported_parameter"


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        ("messages[1]", "annotations", [{"type": "url_citation", "url_citation": {"title": "a", "url": "http://b"}}]),
        ("messages[0]", "annotations", [1]),
        ("messages[1]", "refusal", "no"),
        ("messages[0]", "refusal", "no"),
    ],
)
async def test_what_another_server_has_put_beside_a_messages_content_is_reported(
    server: Server, backend: FakeBackend, path: str, place: str, name: str, value: Any
) -> None:
    body = {"messages": TURNS} | ({"add_special_tokens": False} if path == "/tokenize" else {})
    await server.post(path, body)
    async with server.session.post(server.url + path, json=with_field(body, place, name, value)) as response:
        assert (response.status, response.headers.get("x-ignored-fields")) == (200, f"{place}.{name}")
    assert backend.calls[1:] == backend.calls[:1] * (len(backend.calls) - 1)
    backend.info = msgspec.structs.replace(backend.info, refuse_unknown_fields=True)
    status, answer = await server.post(path, with_field(body, place, name, value))
    assert (status, answer["error"]["param"]) == (400, f"{place}.{name}")


@pytest.mark.parametrize("turn", [{}, {"content": None}, {"content": ""}])
async def test_a_refusal_stands_in_the_place_of_content(
    server: Server, backend: FakeBackend, turn: dict[str, Any]
) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "refusal": "No.", **turn}]
    async with server.session.post(server.url + CHAT, json={"messages": messages}) as response:
        assert (response.status, "x-ignored-fields" in response.headers) == (200, False)
    assert typing.cast("Any", backend.calls[0][0]).messages[1] == {"role": "assistant", "content": "No."}


@pytest.mark.parametrize(
    "turn",
    [
        {"content": "", "reasoning_content": "Hm."},
        {"content": None, "reasoning_content": "Hm."},
        {"content": None, "reasoning": "Hm."},
        {"content": None, "reasoning": "Hm.", "reasoning_content": "Hm."},
        {"content": None, "reasoning": "Hm.", "reasoning_content": "older"},
        {"content": "", "reasoning": "Hm.", "reasoning_content": None},
        {"content": "", "reasoning": "", "reasoning_content": "Hm."},
    ],
)
async def test_an_answer_that_is_all_reasoning_goes_back_by_whatever_name(
    server: Server, backend: FakeBackend, turn: dict[str, Any]
) -> None:
    user = {"role": "user", "content": "a"}
    status, _ = await server.post(CHAT, {"messages": [user, {"role": "assistant", **turn}, user]})
    assert status == 200
    assert typing.cast("Any", backend.calls[0][0]).messages[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm.",
    }


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "thinking"])
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_a_part_that_is_no_text_is_refused_as_such_wherever_its_type_is(
    server: Server, path: str, kind: str
) -> None:
    for part in ({"type": kind, kind: {}}, {kind: {}, "type": kind}):
        status, answer = await server.post(path, {"messages": [{"role": "user", "content": [part]}]})
        error = answer["error"]
        assert (status, error["code"], error["param"]) == (400, "unsupported_content", "messages[0].content[0]")


@pytest.mark.parametrize("kind", ["text", "json_object"])
async def test_a_schema_that_would_not_be_kept_to_is_refused(server: Server, kind: str) -> None:
    asked = {"prompt": "a", "response_format": SCHEMA | {"type": kind}}
    status, answer = await server.post(COMPLETIONS, asked)
    assert (status, answer["error"]["param"]) == (400, "response_format.json_schema")


class Weather(pydantic.BaseModel):
    city: str


async def test_an_answers_message_goes_back_as_the_openai_client_holds_it(server: Server, backend: FakeBackend) -> None:
    call = '<tool_call>{"name": "Weather", "arguments": {"city": "Rome"}}</tool_call>'
    backend.pieces, backend.numbered = ["<think>Hm.</think>", "I look.", call], False
    backend.info = msgspec.structs.replace(backend.info, reasoning=True)
    asked: Any = {"model": MODEL, "tools": [openai.pydantic_function_tool(Weather)]}
    messages: Any = [{"role": "user", "content": "The weather in Rome?"}]
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        created: Any = await client.chat.completions.create(**asked, messages=messages)
        parsed: Any = await client.chat.completions.parse(**asked, messages=messages)
        async with client.chat.completions.stream(**asked, messages=messages) as stream:
            streamed: Any = await stream.get_final_completion()
        messages_of = [answer.choices[0].message for answer in (created, parsed, streamed)]
        assert messages_of[1].tool_calls[0].function.parsed_arguments == Weather(city="Rome")
        backend.calls.clear()
        for message in messages_of:
            for form in (message, message.model_dump(), message.model_dump(exclude_unset=True)):
                result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
                await client.chat.completions.create(**asked, messages=[*messages, form, result])
    turns = [typing.cast("Any", prompt).messages for prompt, _ in backend.calls]
    assert len(turns) == 9
    for _, assistant, _ in turns:
        assert assistant.pop("tool_calls")[0]["function"] == {"name": "Weather", "arguments": '{"city": "Rome"}'}
        assert assistant == {"role": "assistant", "content": "I look.", "reasoning_content": "Hm."}


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
async def test_a_parsed_answer_goes_back_as_its_text(server: Server, backend: FakeBackend) -> None:
    backend.pieces, backend.numbered = ['{"city": ', '"Rome"}'], False
    messages: Any = [{"role": "user", "content": "Where?"}]
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.parse(model=MODEL, messages=messages, response_format=Weather)
        message: Any = answer.choices[0].message
        assert message.parsed == Weather(city="Rome")
        backend.calls.clear()
        await client.chat.completions.create(model=MODEL, messages=[*messages, message, *messages])
    assert typing.cast("Any", backend.calls[0][0]).messages[1] == {"role": "assistant", "content": '{"city": "Rome"}'}
