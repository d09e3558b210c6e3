"""What a request may ask for of how it is served, and what it is told of its session."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import openai
import pytest
from api_server import CHAT, COMPLETIONS, Server
from fake_backend import FakeBackend
from parameter_table import BASE

from asyncengine import Delta, InvalidRequestError, collect
from asyncengine.client import AsyncClient
from asyncengine.terms import Terms

PATHS = [COMPLETIONS, CHAT]


@pytest.mark.parametrize("path", PATHS)
async def test_the_engine_is_told_what_a_request_asks_for(server: Server, backend: FakeBackend, path: str) -> None:
    for asked in (
        {},
        {"service_class": None, "session": None, "session_ttl_seconds": None},
        {"service_class": "background"},
        {"session": "x" * 128},
        {"session": "s", "session_ttl_seconds": 3600},
    ):
        status, answer = await server.post(path, BASE[path] | asked)
        assert status == 200, answer
        await server.events(path, BASE[path] | asked)
    assert backend.terms[::2] == backend.terms[1::2]
    assert backend.terms[::2] == [
        Terms(),
        Terms(),
        Terms(service_class="background"),
        Terms(session="x" * 128, session_ttl_seconds=300),
        Terms(session="s", session_ttl_seconds=3600),
    ]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"service_class": "batch"}, "service_class"),
        ({"service_class": ""}, "service_class"),
        ({"session": ""}, "session"),
        ({"session": "x" * 129}, "session"),
        ({"session": 7}, "session"),
        ({"session": "s", "session_ttl_seconds": 0}, "session_ttl_seconds"),
        ({"session": "s", "session_ttl_seconds": -1}, "session_ttl_seconds"),
        ({"session": "s", "session_ttl_seconds": 3600.5}, "session_ttl_seconds"),
        ({"session": "s", "session_ttl_seconds": "60"}, "session_ttl_seconds"),
        ({"session_ttl_seconds": 60}, "session_ttl_seconds"),
    ],
)
async def test_what_is_no_such_thing_is_refused_by_name(
    server: Server, backend: FakeBackend, path: str, asked: dict[str, Any], param: str
) -> None:
    status, answer = await server.post(path, BASE[path] | asked)
    assert (status, answer["error"]["param"]) == (400, param)
    assert backend.terms == []


async def test_a_session_is_of_one_prompt(server: Server, backend: FakeBackend) -> None:
    status, answer = await server.post(COMPLETIONS, {"prompt": ["a", "b"], "session": "s"})
    assert (status, answer["error"]["param"]) == (400, "session")
    for prompt in (["a"], [[1, 2]], [1, 2]):
        assert (await server.post(COMPLETIONS, {"prompt": prompt, "session": "s"}))[0] == 200
    assert len(backend.terms) == 3


@pytest.mark.parametrize("name", ["agent-7", "a/b?c#d%e", "ü 世界", "x" * 128])
async def test_a_session_is_released_by_its_name(server: Server, backend: FakeBackend, name: str) -> None:
    for _ in range(2):
        status, answer = await server.post(f"/v1/sessions/{quote(name, safe='')}/release", b"")
        assert (status, answer) == (200, {"session": name, "released": True})
    async with AsyncClient(server.url) as client:
        await client.release_session(name)
    assert backend.released == [("", name)] * 3


async def test_what_is_no_sessions_name_is_not_released(server: Server, backend: FakeBackend) -> None:
    status, answer = await server.post(f"/v1/sessions/{'x' * 129}/release", b"")
    assert (status, answer["error"]["param"]) == (400, "session")
    async with AsyncClient(server.url) as client:
        with pytest.raises(InvalidRequestError, match="1 to 128"):
            await client.release_session("")
    assert backend.released == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("known", "told"),
    [
        ((None, None), {}),
        ((0, None), {"session_tokens": 0}),
        ((80, None), {"session_tokens": 80}),
        ((80, 0), {"session_tokens": 80, "first_differing_token": 0}),
        ((80, 31), {"session_tokens": 80, "first_differing_token": 31}),
    ],
)
async def test_usage_tells_what_the_session_had_and_where_the_prompt_differs(
    server: Server, backend: FakeBackend, path: str, known: tuple[int | None, int | None], told: dict[str, int]
) -> None:
    backend.session = known
    body = BASE[path] | {"session": "s", "n": 2}
    cached = {"cached_tokens": 2 if path == COMPLETIONS else 0}
    _, whole = await server.post(path, body)
    assert whole["usage"]["prompt_tokens_details"] == cached | told
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = await server.events(path, body | {"stream_options": options})
    details = [chunk["usage"]["prompt_tokens_details"] for chunk in chunks if chunk.get("usage")]
    assert len(details) > 8
    assert all(detail == cached | told for detail in details)


async def test_our_own_client_asks_and_is_told(server: Server, backend: FakeBackend) -> None:
    backend.session = (80, 31)
    async with AsyncClient(server.url) as client:
        asked = client.generate("abc", service_class="background", session="s", session_ttl_seconds=60)
        deltas: list[Delta] = [delta async for delta in asked]
        backend.session = (None, None)
        answer = await collect(client.generate("abc"))
        with pytest.raises(InvalidRequestError, match="session_ttl_seconds"):
            await collect(client.generate("abc", session_ttl_seconds=60))
    assert backend.terms == [Terms("", "background", "s", 60), Terms()]
    assert {(delta.session_tokens, delta.first_differing_token) for delta in deltas} == {(80, 31)}
    assert (answer.session_tokens, answer.first_differing_token) == (None, None)


async def test_the_openai_client_asks_in_its_extra_body(server: Server, backend: FakeBackend) -> None:
    backend.session = (80, 31)
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        extra = {"service_class": "background", "session": "s"}
        answer = await client.chat.completions.create(
            model=backend.info.model, messages=[{"role": "user", "content": "a"}], extra_body=extra
        )
    assert backend.terms == [Terms("", "background", "s", 300)]
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    assert details is not None
    assert details.model_extra == {"session_tokens": 80, "first_differing_token": 31}
