"""Whatever a body holds, the answer is 200 or a 4xx in OpenAI's error shape, and the next request is served."""

from __future__ import annotations

import asyncio
import types
import typing
from typing import Any

import msgspec
import pytest
from api_server import CHAT, COMPLETIONS, Server, serving
from fake_backend import MODEL, VOCAB_SIZE, FakeBackend
from refusals import USER, error_of, refused

from asyncengine.api import connections, request_body
from asyncengine.api.schema import ChatRequest, CompletionRequest
from asyncengine.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"", "byte 0"),
        (b'{"prompt":"a"} x', "byte 16"),
        (b"\xef\xbb\xbf{}", "byte 0"),
        (b"\xe9", "byte 0"),
        (b'{"prompt":"\xe4\xb8', "byte 11"),
        (b'{"prompt":"a"', "byte 13"),
        (b'{"prompt":"x\\ud800y"}', "byte 12"),
        (b'{"prompt":"x\\ud800"}', "byte 12"),
        (b'{"prompt":"x\\udc00 and more text"}', "byte 12"),
        (b'{"prompt":"\\ud83d\\ude00\\\\\\ud800"}', "byte 25"),
        (b'{"prompt":NaN}', "byte 10"),
        (b'{"prompt":"a","\xff":1}', "byte 15"),
    ],
)
async def test_a_body_that_is_not_json_is_told_where(server: Server, body: bytes, where: str) -> None:
    error = await refused(server, COMPLETIONS, body)
    assert error["code"] == "invalid_json"
    assert f"({where})" in error["message"]


@pytest.mark.parametrize("body", [b"[]", b'"x"', b"5", b"null", b"true"])
async def test_a_body_that_is_no_object_is_refused(server: Server, body: bytes) -> None:
    assert "must be a JSON object" in (await refused(server, COMPLETIONS, body))["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt":' + b"[" * 100_000,
        b'{"x":' * 100_000,
        b'{"messages":[{"role":"assistant","tool_calls":[' + b'{"a":' * 100_000,
    ],
)
async def test_deep_nesting_is_refused(server: Server, path: str, body: bytes) -> None:
    await refused(server, path, body)


async def test_the_connection_survives_a_bad_body(server: Server) -> None:
    for body in (b"{", b"[]", b'{"prompt": 5}'):
        await refused(server, COMPLETIONS, body)
    assert (await server.post(COMPLETIONS, {"prompt": "a"}))[0] == 200
    connector = server.session.connector
    assert connector is not None
    assert sum(map(len, connector._conns.values())) == 1  # one connection has carried all four


async def test_other_content_types_are_refused(server: Server) -> None:
    for content_type in ("text/plain", "application/x-www-form-urlencoded"):
        headers = {"Content-Type": content_type}
        async with server.session.post(server.url + COMPLETIONS, data=b'{"prompt":"a"}', headers=headers) as response:
            assert error_of(response.status, await response.json())["code"] == "invalid_content_type"


async def test_a_body_over_the_limit_is_413(server: Server) -> None:
    status, answer = await server.post(COMPLETIONS, b" " * (4 * 1024 * 1024 + 1))
    assert status == 413
    assert error_of(status, answer)["code"] == "request_too_large"
    assert (await server.post(COMPLETIONS, {"prompt": "a"}))[0] == 200


async def test_a_128k_id_prompt_fits(server: Server, backend: FakeBackend) -> None:
    assert (await server.post(COMPLETIONS, {"prompt": [999] * 131_072}))[0] == 200
    assert len(typing.cast("list[int]", backend.calls[0][0])) == 131_072


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([""], "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([[1], []], "prompt[1]"),
        (None, "prompt"),
        ({}, "prompt"),
        (5, "prompt"),
        (["a", 5], "prompt"),
        (["a", [5]], "prompt"),
        ([[["a"]]], "prompt[0][0]"),
    ],
)
async def test_empty_and_mixed_prompts_are_refused(server: Server, prompt: Any, param: str) -> None:
    assert (await refused(server, COMPLETIONS, {"prompt": prompt}))["param"] == param
    assert (await server.post(COMPLETIONS, {"prompt": "a"}))[0] == 200


async def test_a_missing_prompt_is_refused(server: Server) -> None:
    error = await refused(server, COMPLETIONS, {})
    assert (error["param"], error["message"]) == ("prompt", "prompt is required")


@pytest.mark.parametrize(
    ("prompt", "param", "value"),
    [
        ([5, -1], "prompt[1]", "-1"),
        ([1.5], "prompt[0]", "1.5"),
        ([7, True], "prompt[1]", "true"),
        ([4294967296], "prompt[0]", "4294967296"),
        ([[1], [2, -7]], "prompt[1][1]", "-7"),
    ],
)
async def test_a_prompt_id_of_a_wrong_kind_is_named(server: Server, prompt: list, param: str, value: str) -> None:
    error = await refused(server, COMPLETIONS, {"prompt": prompt})
    assert error["param"] == param
    assert param in error["message"]
    assert f"({value})" in error["message"]


async def test_a_prompt_id_outside_the_vocabulary_is_the_engines_refusal(server: Server) -> None:
    error = await refused(server, COMPLETIONS, {"prompt": [5, 1000]})
    assert error["message"] == "prompt[1] is 1000, the vocabulary has 1000"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (None, "messages"),
        ([{}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([USER, {"role": "user", "content": None}], "messages[1].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "wizard", "content": "a"}], "messages[0].role"),
        ([{"role": "assistant"}], "messages[0].content"),
        ([5], "messages[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"text": "a"}]}], "messages[0].content[0].type"),
    ],
)
async def test_odd_messages_are_refused_by_name(server: Server, messages: Any, param: str) -> None:
    assert (await refused(server, CHAT, {"messages": messages}))["param"] == param
    assert (await server.post(CHAT, {"messages": [USER]}))[0] == 200


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
    ],
)
async def test_media_is_refused(server: Server, part: dict) -> None:
    error = await refused(
        server, CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]}
    )
    assert (error["code"], error["param"]) == ("unsupported_content", "messages[0].content[1]")


@pytest.mark.parametrize(
    "extra",
    [
        {"chat_template": "x"},
        {"chat_template_kwargs": {"chat_template": "{{'x'*10**9}}"}},
        {"chat_template_kwargs": {"messages": "x"}},
        {"chat_template_kwargs": {"enable_thinking": 1}},
        {"chat_template_kwargs": {"date_string": "x" * 65}},
        {"chat_template_kwargs": {"date_string": ["x"]}},
    ],
)
async def test_templates_do_not_come_from_requests(server: Server, extra: dict) -> None:
    assert (await refused(server, CHAT, {"messages": [USER], **extra}))["param"].startswith("chat_template")


async def test_plain_data_for_the_template_is_bounded_in_depth(server: Server) -> None:
    def call(depth: int) -> dict[str, Any]:
        data: Any = {}
        for _ in range(depth):
            data = {"a": [data]}
        function = {"name": "f", "arguments": data}
        return {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": function}]}]}

    assert (await server.post(CHAT, call(10)))[0] == 200
    assert (await refused(server, CHAT, call(20)))["param"] == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "n": 3_000_000}, "n"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": ["a"] * 2000, "n": 16}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 16}, "prompt"),
        ({"prompt": "a", "max_tokens": 10**12}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 0, "prompt_logprobs": 1}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ({"prompt": ["a" * 2**14, "b"], "echo": True, "logprobs": 3, "n": 16}, "prompt"),
        ({"prompt": [[1] * 2**15, [2]], "prompt_logprobs": 3, "n": 8}, "prompt"),
        ({"prompt": [1, 1000], "echo": True}, "prompt"),
        ({"prompt": "a", "max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 5.0}, "max_tokens"),
        ({"prompt": "a", "temperature": -0.1}, "temperature"),
        ({"prompt": "a", "temperature": 2.1}, "temperature"),
        ({"prompt": "a", "temperature": True}, "temperature"),
        ({"prompt": "a", "top_p": 1.1}, "top_p"),
        ({"prompt": "a", "min_p": -1}, "min_p"),
        ({"prompt": "a", "stop": ["a"] * 17}, "stop"),
        ({"prompt": "a", "stop": ["a", ""]}, "stop[1]"),
        ({"prompt": "a", "stop": "a" * 513}, "stop"),
        ({"prompt": "a", "stop_token_ids": [1] * 9}, "stop_token_ids"),
        ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"prompt": "a", "stream": 1}, "stream"),
        ({"prompt": "a", "user": "u" * 513}, "user"),
    ],
)
async def test_values_out_of_bounds_are_refused_before_anything_runs(
    server: Server, backend: FakeBackend, body: dict, param: str
) -> None:
    assert (await refused(server, COMPLETIONS, body))["param"] == param
    assert backend.calls == []


async def test_numbers_no_float_can_hold_are_refused(server: Server) -> None:
    for number in (b"1e999", b"-1e999", b"1" + b"0" * 400):
        assert (await refused(server, COMPLETIONS, b'{"prompt":"a","temperature":%b}' % number))["param"]


def integer_fields() -> list[tuple[str, str]]:
    def holds_int(kind: Any) -> bool:
        if typing.get_origin(kind) is typing.Annotated:
            return holds_int(kind.__origin__)
        if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
            return any(map(holds_int, typing.get_args(kind)))
        return kind is int

    bodies = ((COMPLETIONS, CompletionRequest), (CHAT, ChatRequest))
    return [
        (path, field.name) for path, body in bodies for field in msgspec.structs.fields(body) if holds_int(field.type)
    ]


@pytest.mark.parametrize(("path", "field"), integer_fields())
@pytest.mark.parametrize("value", [-1, 0, 2**31, 2**63, 2**64, -(2**63), -(2**63) - 1, 10**300])
async def test_no_integer_breaks_the_server(server: Server, path: str, field: str, value: int) -> None:
    body: dict[str, Any] = {"prompt": "a"} if path == COMPLETIONS else {"messages": [USER]}
    status, answer = await server.post(path, {**body, field: value})
    if status != 200:
        assert status == 400
        assert error_of(status, answer)["param"] == field


@pytest.mark.parametrize(
    ("path", "field", "holder"),
    [
        (COMPLETIONS, "prompt", lambda token: [token]),
        (COMPLETIONS, "prompt", lambda token: [[1], [1, token]]),
        (COMPLETIONS, "stop_token_ids", lambda token: [token]),
        (COMPLETIONS, "logit_bias", lambda token: {str(token): 1}),
        ("/detokenize", "tokens", lambda token: [1, token]),
    ],
)
@pytest.mark.parametrize("value", [-1, 0, VOCAB_SIZE, 2**31, 2**63, 2**64, -(2**63) - 1, 10**300])
async def test_no_token_id_breaks_the_server(server: Server, path: str, field: str, holder: Any, value: int) -> None:
    body: dict[str, Any] = {"prompt": "a"} if path == COMPLETIONS else {}
    status, answer = await server.post(path, {**body, field: holder(value)})
    # which ids the vocabulary has only the engine knows; this one looks at prompts
    if value == 0 or (value == VOCAB_SIZE and field in ("stop_token_ids", "logit_bias")):
        assert status == 200
    else:
        assert status == 400
        assert error_of(status, answer)["param"].startswith(("prompt", field))


def test_the_generated_test_covers_the_integer_fields() -> None:
    names = {"max_tokens", "max_completion_tokens", "min_tokens", "top_k", "n", "seed", "priority", "prompt_logprobs"}
    own = {(COMPLETIONS, "logprobs"), (CHAT, "top_logprobs")}
    assert set(integer_fields()) == own | {(path, name) for path in (COMPLETIONS, CHAT) for name in names}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tool_choice": "any"}, "tool_choice: Invalid enum value 'any', expected 'auto', 'none', 'required'"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type: Invalid enum value 'custom', expected 'function'"),
        (
            {"messages": [USER, {"role": "User", "content": "a"}]},
            "messages[1].role: Invalid enum value 'User', expected 'assistant', 'developer', 'system', 'tool', 'user'",
        ),
        (
            {"response_format": {"type": "x"}},
            "response_format.type: Invalid enum value 'x', expected 'json_object', 'json_schema', 'text'",
        ),
    ],
)
async def test_a_text_that_is_none_of_some_is_answered_with_those(server: Server, wrong: dict, message: str) -> None:
    assert (await refused(server, CHAT, {"messages": [USER], **wrong}))["message"] == message


async def test_null_is_the_default_of_every_field(server: Server, backend: FakeBackend) -> None:
    skipped = {"prompt", "messages", "max_tokens"}
    for path, kind, body in (
        (COMPLETIONS, CompletionRequest, {"prompt": "a"}),
        (CHAT, ChatRequest, {"messages": [USER]}),
    ):
        nulls = {name: None for name in kind.__struct_fields__ if name not in skipped}
        assert (await server.post(path, body))[0] == 200
        assert (await server.post(path, {**body, **nulls}))[0] == 200
        plain, with_nulls = (params for _, params in backend.calls[-2:])
        assert plain == with_nulls


@pytest.mark.parametrize(
    ("path", "extra", "max_tokens"),
    [
        (COMPLETIONS, {}, 16),
        (COMPLETIONS, {"max_tokens": None}, None),
        (COMPLETIONS, {"max_tokens": 7}, 7),
        (COMPLETIONS, {"max_completion_tokens": 5}, 5),
        (CHAT, {}, None),
        (CHAT, {"max_tokens": 7}, 7),
        (CHAT, {"max_tokens": 7, "max_completion_tokens": 5}, 5),
    ],
)
async def test_the_token_limit_has_two_names(
    server: Server, backend: FakeBackend, path: str, extra: dict, max_tokens: int | None
) -> None:
    body: dict[str, Any] = {"prompt": "a"} if path == COMPLETIONS else {"messages": [USER]}
    assert (await server.post(path, {**body, **extra}))[0] == 200
    assert backend.calls[0][1].max_tokens == max_tokens


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_a_limit_that_does_not_fit_is_named_as_the_client_named_it(
    server: Server, backend: FakeBackend, name: str
) -> None:
    backend.refusal = InvalidRequestError("max_tokens 5000 is too much", param="max_tokens")
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": [USER]})):
        error = await refused(server, path, {**body, name: 5000})
        assert (error["param"], error["message"]) == (name, f"{name} 5000 is too much")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_the_limit_that_min_tokens_exceeds_is_named_as_the_client_named_it(server: Server, name: str) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": [USER]})):
        error = await refused(server, path, {**body, name: 3, "min_tokens": 5})
        assert (error["param"], error["message"]) == ("min_tokens", f"min_tokens (5) must not exceed {name} (3)")


async def test_a_nul_is_a_character_like_any_other(server: Server, backend: FakeBackend) -> None:
    backend.pieces = ("a\0b",)
    status, answer = await server.post(COMPLETIONS, {"prompt": "AB\0CD"})
    assert (status, answer["choices"][0]["text"], answer["usage"]["prompt_tokens"]) == (200, "0:a\0b", 5)
    assert backend.calls[0][0] == "AB\0CD"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_another_models_name_is_404(server: Server, path: str) -> None:
    body: dict[str, Any] = {"prompt": "a"} if path == COMPLETIONS else {"messages": [USER]}
    status, answer = await server.post(path, {**body, "model": "other"})
    assert status == 404
    assert error_of(status, answer)["code"] == "model_not_found"
    assert (await server.post(path, {**body, "model": MODEL}))[0] == 200


async def test_messages_reach_the_template_as_plain_turns(server: Server, backend: FakeBackend) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
    ]
    kwargs = {"enable_thinking": False, "date_string": "1 May"}
    body = {"messages": messages, "chat_template_kwargs": kwargs, "add_generation_prompt": False}
    assert (await server.post(CHAT, body))[0] == 200
    prompt: Any = backend.calls[0][0]
    assert prompt.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "name": "ann", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
    ]
    assert prompt.template_kwargs == kwargs
    assert prompt.add_generation_prompt is False


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/completions HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\nHost: localhost\nContent-Length: 19\n\n" + b'{"prompt":"secret"}',
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nsecret",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"secret" * 11_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X-Many: secret\r\n" * 1000 + b"\r\n",
        b"GET /\xc3\xa9secret HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
async def test_bytes_that_are_not_http_are_refused_and_not_logged(
    server: Server, head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    writer.write(head)
    status, body = (await reader.read()).split(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.0 400 ")
    error = error_of(400, msgspec.json.decode(body))
    assert (error["code"], b"secret" in body) == ("invalid_http", False)
    writer.close()
    assert caplog.records == []
    status, _ = await server.post(COMPLETIONS, {"prompt": "a"})
    assert status == 200


async def test_a_head_that_does_not_arrive_ends_its_connection(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.05)
    async with serving(backend) as server:
        for heads in (
            b"GET /health HT",
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /health HTTP/1.1\r\nHost:",
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
            writer.write(heads)
            assert (await reader.read()).count(b"HTTP/1.1 200 OK") == heads.count(b"\r\n\r\n")  # to the end
            writer.close()
    assert caplog.records == []


async def test_a_body_that_does_not_arrive_ends_its_connection(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(request_body, "BODY_SECONDS", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    writer.write(
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    )
    head, body = (await reader.read()).split(b"\r\n\r\n")  # to the end: the server closes
    writer.close()
    assert head.startswith(b"HTTP/1.1 408 ")
    assert error_of(408, msgspec.json.decode(body))["message"] == "the request body did not arrive within 0.05 seconds"
    assert caplog.records == []
