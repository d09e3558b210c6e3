"""Naming and cancelling requests, tokens without running a model, and what an operator asks."""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest
from api_server import CHAT, COMPLETIONS, Server
from fake_backend import MODEL, FakeBackend

from asyncengine.client import AsyncClient
from asyncengine.engine_info import Health
from asyncengine.errors import CrashingRequestError, OverloadedError

MESSAGES = [{"role": "user", "content": "hello"}]
BODIES = [(COMPLETIONS, {"prompt": "abc"}, "cmpl"), (CHAT, {"messages": MESSAGES}, "chatcmpl")]


async def get(server: Server, path: str) -> tuple[int, dict]:
    async with server.session.get(server.url + path) as response:
        return response.status, await response.json()


# -------------------------------------------------------------------------------------------------- names, cancelling


@pytest.mark.parametrize(("path", "body", "prefix"), BODIES)
async def test_an_answers_id_is_the_requests_name_in_the_engine(
    server: Server, backend: FakeBackend, path: str, body: dict, prefix: str
) -> None:
    _, whole = await server.post(path, body)
    first, *_ = await server.events(path, body)
    assert [name for _, name in backend.names] == [whole["id"], first["id"]]
    assert whole["id"].startswith(f"{prefix}-")
    assert whole["id"] != first["id"]


@pytest.mark.parametrize(("path", "body", "prefix"), BODIES)
async def test_a_client_may_name_its_request(
    server: Server, backend: FakeBackend, path: str, body: dict, prefix: str
) -> None:
    _, whole = await server.post(path, {**body, "request_id": "job-7.a:b_C"})
    assert whole["id"] == f"{prefix}-job-7.a:b_C"
    headers = {"X-Request-Id": "from-the-header"}
    async with server.session.post(server.url + path, json={**body, "request_id": "x"}, headers=headers) as response:
        assert (await response.json())["id"] == f"{prefix}-from-the-header"
    assert [name for _, name in backend.names] == [f"{prefix}-job-7.a:b_C", f"{prefix}-from-the-header"]


@pytest.mark.parametrize("name", ["", "a b", "ü", "x" * 129, "a/b", "a\n", 5])
async def test_names_that_are_none_are_refused(server: Server, backend: FakeBackend, name: object) -> None:
    status, answer = await server.post(COMPLETIONS, {"prompt": "a", "request_id": name})
    assert (status, answer["error"]["param"]) == (400, "request_id")
    assert backend.calls == []


@pytest.mark.parametrize("name", ["Zm9v/YmF+cg==", "{}<\"'>%2F?#;,&\\", "x" * 128])
async def test_a_proxys_name_is_taken_and_cancels(server: Server, backend: FakeBackend, name: str) -> None:
    headers = {"X-Request-Id": name}
    async with server.session.post(server.url + COMPLETIONS, json={"prompt": "a"}, headers=headers) as response:
        assert (response.status, (await response.json())["id"]) == (200, f"cmpl-{name}")
    async with AsyncClient(server.url) as client:
        assert await client.cancel(name)
    assert ("", f"cmpl-{name}") in backend.cancelled


@pytest.mark.parametrize("name", ["", "a b", "\xfc", "x" * 129])
async def test_a_header_that_is_no_name_is_as_if_it_were_not_there(
    server: Server, backend: FakeBackend, name: str
) -> None:
    headers = {"X-Request-Id": name}
    for body, expected in (({}, r"cmpl-[0-9a-f]{24}"), ({"request_id": "own"}, "cmpl-own")):
        async with server.session.post(
            server.url + COMPLETIONS, json={"prompt": "a"} | body, headers=headers
        ) as response:
            assert response.status == 200
            assert re.fullmatch(expected, (await response.json())["id"])


async def test_a_session_of_any_name_is_released(server: Server, backend: FakeBackend) -> None:
    async with AsyncClient(server.url) as client:
        await client.release_session("{a}/%2F ü")
    assert backend.released == [("", "{a}/%2F ü")]


async def test_a_running_request_is_cancelled_by_its_id_and_no_other_is_found(
    server: Server, backend: FakeBackend
) -> None:
    assert await server.post("/v1/requests/cmpl-7/cancel", {}) == (
        200,
        {"id": "cmpl-7", "object": "request", "status": "cancelled"},
    )
    status, answer = await server.post("/v1/requests/other/cancel", {})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "request_not_found", "id")
    assert backend.cancelled == [("", "cmpl-7"), ("", "other")]
    async with server.session.get(server.url + "/v1/requests/cmpl-7/cancel") as response:
        assert response.status == 405


async def test_a_cancelled_choice_ends_with_abort(server: Server, backend: FakeBackend) -> None:
    backend.pieces, backend.finish = ("a", "b"), ("abort", None)
    status, whole = await server.post(COMPLETIONS, {"prompt": "x"})
    *chunks, done = await server.events(CHAT, {"messages": MESSAGES})
    (choice,) = whole["choices"]
    assert (status, choice["text"], choice["finish_reason"]) == (200, "0:ab", "abort")
    assert chunks[-1]["choices"][0]["finish_reason"] == "abort"
    assert done == "[DONE]"


# ------------------------------------------------------------------------------------------------------------- tokens


async def test_a_text_is_tokenized_with_the_special_tokens_unless_told_not_to(server: Server) -> None:
    expected = {"count": 3, "max_model_len": 4096, "tokens": [1, 97, 98], "token_strs": None}
    for extra in ({}, {"add_special_tokens": True}, {"add_special_tokens": None}, {"model": MODEL}):
        assert await server.post("/tokenize", {"prompt": "ab", **extra}) == (200, expected)
    status, answer = await server.post("/tokenize", {"prompt": "ab", "add_special_tokens": False})
    assert (status, answer["tokens"], answer["count"]) == (200, [97, 98], 2)


async def test_each_tokens_own_text_comes_on_request(server: Server) -> None:
    _, answer = await server.post("/tokenize", {"prompt": "ab", "add_special_tokens": False, "return_token_strs": True})
    assert answer["token_strs"] == ["a", "b"]


async def test_a_conversation_is_tokenized(server: Server) -> None:
    status, answer = await server.post("/tokenize", {"messages": MESSAGES, "add_special_tokens": False})
    assert (status, bytes(answer["tokens"][-5:])) == (200, b"hello")


async def test_tokens_become_text(server: Server) -> None:
    assert await server.post("/detokenize", {"tokens": [97, 98]}) == (200, {"prompt": "ab"})
    assert await server.post("/detokenize", {"tokens": []}) == (200, {"prompt": ""})


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": [], "add_special_tokens": False}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{}]}, "tools"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[...]"),
        ("/detokenize", {"tokens": [True]}, "tokens[...]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
async def test_wrong_bodies_are_refused_by_the_field(server: Server, path: str, body: dict, param: str) -> None:
    status, answer = await server.post(path, body)
    assert status == 400
    assert answer["error"]["param"].split("[")[0] == param.split("[")[0]


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]})])
async def test_an_unknown_field_is_named_and_an_unknown_model_is_not_found(
    server: Server, path: str, body: dict
) -> None:
    async with server.session.post(server.url + path, json={**body, "colour": 1}) as response:
        assert (response.status, response.headers["x-ignored-fields"]) == (200, "colour")
    status, answer = await server.post(path, {**body, "model": "other"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    async with server.session.post(server.url + path, data=b"{}", headers={"Content-Type": "text/plain"}) as response:
        assert response.status == 400


async def test_an_engine_without_room_says_when_to_ask_again(server: Server, backend: FakeBackend) -> None:
    backend.refusal = OverloadedError("no room", code="overloaded")
    async with server.session.post(server.url + "/tokenize", json={"prompt": "a"}) as response:
        answer = await response.json()
    assert (response.status, answer["error"]["code"], response.headers["Retry-After"]) == (503, "overloaded", "1")


async def test_clients_are_told_not_to_repeat_what_crashes_the_engine(server: Server, backend: FakeBackend) -> None:
    backend.refusal = CrashingRequestError("no more", code="request_crashes_engine")
    for body in ({}, {"stream": True}):
        async with server.session.post(server.url + COMPLETIONS, json={"prompt": "a", **body}) as response:
            code = (await response.json())["error"]["code"]
        assert (response.status, code, response.headers["x-should-retry"]) == (500, "request_crashes_engine", "false")


# ------------------------------------------------------------------------------------------------------ for operators


async def test_readiness_follows_the_engines_state(server: Server, backend: FakeBackend) -> None:
    assert await get(server, "/ready") == (200, {"status": "ready"})
    for state in ("starting", "stalled", "failed", "closed"):
        backend.health = Health(state=state, detail="why")  # type: ignore[arg-type]
        assert await get(server, "/ready") == (503, {"status": state, "reason": "why"})


async def test_the_version_is_the_packages(server: Server) -> None:
    assert await get(server, "/version") == (200, {"version": version("asyncengine")})
