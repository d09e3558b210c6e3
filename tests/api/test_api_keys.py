"""With keys, every route is closed but for those that say whether the server lives and the files of the console."""

from __future__ import annotations

import inspect
from asyncio import open_connection
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from api_server import CHAT, COMPLETIONS
from fake_backend import FakeBackend

from asyncengine import api_keys
from asyncengine.api import connections
from asyncengine.api.access import OPEN_ROUTES
from asyncengine.api.app import bound_port, make_app, run_app
from asyncengine.api.console_routes import FILES
from asyncengine.api_keys import API_KEY_VARIABLE, digest_of, known_key, read_api_keys
from asyncengine.client import AsyncClient
from asyncengine.config import ApiKey, HttpOptions, ServiceClass
from asyncengine.errors import InvalidRequestError, StartupError

KEYS = ("first-key-of-two", "second-key~!#$%")
API_KEYS = tuple(ApiKey(digest=digest_of(key), tenant=tenant) for key, tenant in zip(KEYS, "ab", strict=True))


@asynccontextmanager
async def served(backend: FakeBackend) -> AsyncIterator[str]:
    runner = await run_app(backend, "127.0.0.1", 0, HttpOptions(api_keys=API_KEYS))
    yield f"http://127.0.0.1:{bound_port(runner)}"
    await runner.cleanup()


@pytest.fixture
async def url(backend: FakeBackend) -> AsyncIterator[str]:
    async with served(backend) as url:
        yield url


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_every_route_of_the_router_is_closed_unless_it_is_listed(url: str, backend: FakeBackend) -> None:
    routes = [route for route in make_app(backend).router.routes() if route.method != "HEAD"]
    opened = set()
    async with aiohttp.ClientSession() as session:
        for route in routes:
            assert route.resource is not None
            path = route.resource.canonical.replace("{model}", "x").replace("{id}", "x").replace("{session}", "x")
            for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT"):
                async with session.request(method, url + path) as response:
                    if response.status != 401:
                        assert method in ("GET", "HEAD")
                        opened.add(route.name)
                    elif method != "HEAD":
                        assert (await response.json())["error"]["code"] == "invalid_api_key"
                        assert response.headers["WWW-Authenticate"] == "Bearer"
    assert opened == OPEN_ROUTES
    assert len(routes) > 10
    assert backend.calls == []


@pytest.mark.parametrize(
    "path",
    [
        *("/nowhere", "//v1/models", "/v1/models/", "/V1/models", "/v1%2fmodels", "/health/../v1/models", "/healthy"),
        *("//", "/index.html", "/console", "/console/", "/console/timeline", "/console/chat.js/../timeline"),
    ],
)
async def test_a_path_that_only_looks_like_an_open_one_is_closed(url: str, path: str) -> None:
    port = int(url.rsplit(":", 1)[1])
    for target in (path, f"http://evil{path}"):
        reader, writer = await open_connection("127.0.0.1", port)
        writer.write(f"GET {target} HTTP/1.1\r\nHost: x/health?\r\nConnection: close\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()


async def test_each_of_the_keys_opens_and_nothing_else_does(url: str, backend: FakeBackend) -> None:
    async with aiohttp.ClientSession() as session:
        for key in KEYS:
            for headers in (bearer(key), {"Authorization": f"bearer {key}"}):
                async with session.post(url + COMPLETIONS, json={"prompt": "a"}, headers=headers) as response:
                    assert response.status == 200
        others: list[dict[str, str] | list[tuple[str, str]]] = [
            {},
            bearer(""),
            bearer(KEYS[0][:-1]),
            bearer(KEYS[0] + "x"),
            bearer(KEYS[0].upper()),
            bearer(API_KEYS[0].digest.hex()),
            bearer("é" * 8),
            {"Authorization": KEYS[0]},
            {"Authorization": f"Basic {KEYS[0]}"},
            {"X-Api-Key": KEYS[0]},
            [("Authorization", f"Bearer {KEYS[0]}"), ("Authorization", "Bearer x")],
        ]
        calls = len(backend.calls)
        for refused in others:
            async with session.post(url + CHAT, json={"messages": []}, headers=refused) as response:
                assert response.status == 401
                assert KEYS[0] not in await response.text()
        assert len(backend.calls) == calls


@pytest.mark.parametrize(
    ("asked", "status"), [(b"POST /v1/completions", b"401"), (b"GET /", b"200"), (b"GET /health", b"200")]
)
async def test_a_strangers_body_is_not_waited_for(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, asked: bytes, status: bytes
) -> None:
    monkeypatch.setattr(connections, "LINGER_SECONDS", 0.05)
    async with served(backend) as url:
        reader, writer = await open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(asked + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n{")
        answer = await reader.read()  # to the end: the server closes
        assert answer.startswith(b"HTTP/1.1 " + status)
        writer.close()


async def test_the_console_is_for_strangers_and_what_it_shows_is_not(url: str, backend: FakeBackend) -> None:
    async with aiohttp.ClientSession() as session:
        for path in FILES:
            texts = []
            for headers in ({}, bearer(KEYS[0]), bearer("not-a-key")):
                async with session.get(url + path, headers=headers) as response:
                    assert (response.status, response.headers["Cache-Control"]) == (200, "no-cache")
                    texts.append(await response.text())
            assert texts == texts[:1] * 3
            assert backend.info.model not in texts[0]
        async with session.get(url + "/console/timeline", headers=bearer(KEYS[1])) as response:
            assert response.status == 200


async def test_a_client_without_a_key_may_send_its_body_to_the_end_before_it_reads_the_answer(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "LINGER_SECONDS", 60.0)
    async with served(backend) as url:
        reader, writer = await open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        for _ in range(20):
            writer.write(bytes(100_000))
            await writer.drain()
        assert b"invalid_api_key" in await reader.read()  # to the end: the server closes
        writer.close()
    assert caplog.records == []


async def test_our_own_client_shows_its_key(url: str) -> None:
    async with AsyncClient(url, api_key=KEYS[1]) as client:
        assert await client.models() == ["org/fake-model"]
    async with AsyncClient(url) as client:
        with pytest.raises(InvalidRequestError, match="wants an API key"):
            await client.models()


def read(path: Path | None, **environ: str) -> list[tuple[bytes, str, ServiceClass | None]]:
    keys = read_api_keys(None if path is None else str(path), environ)
    return [(key.digest, key.tenant, key.service_class) for key in keys]


def test_keys_come_from_a_file_and_from_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"\n{KEYS[0]}\n  {KEYS[1]}  \r\n")
    first, second = (digest_of(key) for key in KEYS)
    another = {API_KEY_VARIABLE: "another-key"}
    assert read(None) == []
    assert [digest for digest, _, _ in read(path)] == [first, second]
    assert [digest for digest, _, _ in read(path, **another)] == [first, second, digest_of("another-key")]
    assert [digest for digest, _, _ in read(None, **another)] == [digest_of("another-key")]
    assert read(path, **{API_KEY_VARIABLE: KEYS[1]}) == read(path)


def test_a_key_says_whose_it_is_and_what_for(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(
        "first-key-of-team tenant=team.A_1-x\nsecond-key-of-team  class=background\ttenant=team.A_1-x\n"
        "a-person's-key class=interactive\nnobody's-key\n"
    )
    person, nobody = "key-c9e964f2d9d3", "key-4c1337177af8"
    assert read(path) == [
        (digest_of("first-key-of-team"), "team.A_1-x", None),
        (digest_of("second-key-of-team"), "team.A_1-x", "background"),
        (digest_of("a-person's-key"), person, "interactive"),
        (digest_of("nobody's-key"), nobody, None),
    ]
    assert nobody.removeprefix("key-") not in digest_of("nobody's-key").hex()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "holds no API key; write one on each line"),
        (b"\n \n", "holds no API key; write one on each line"),
        (b"good-enough\nshort", "line 2 of "),
        (b"with a space in it", "line 1 of "),
        (b"\xff" * 9, "it is not UTF-8"),
        ("schlüssel-mit-ü".encode(), "line 1 of "),
        (b"good-enough tenant=", "behind the API key in line 1 of "),
        (b"good-enough tenant=a/b", "behind the API key in line 1 of "),
        (b"good-enough tenant=" + b"a" * 65, "behind the API key in line 1 of "),
        (b"good-enough class=best", "behind the API key in line 1 of "),
        (b"good-enough short", "behind the API key in line 1 of "),
        (b"good-enough\ngood-enough tenant=a", "line 2 of "),
    ],
)
def test_a_file_that_holds_no_keys_is_refused_without_showing_it(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(text)
    with pytest.raises(StartupError) as caught:
        read_api_keys(str(path), {})
    assert said in caught.value.message
    assert all(word not in caught.value.message for word in ("good-enough", "short", "with a space", "schl"))


def test_an_absent_file_of_keys_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"cannot read the API keys in .*: No such file"):
        read_api_keys(str(tmp_path / "absent"), {})


def test_keys_are_compared_in_constant_time_and_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(shown: bytes, digest: bytes) -> bool:
        compared.append((shown, digest))
        return shown == digest

    monkeypatch.setattr(api_keys.hmac, "compare_digest", compare)
    assert known_key(KEYS[0], API_KEYS) is API_KEYS[0]
    assert len(compared) == 2
    assert {len(side) for pair in compared for side in pair} == {32}
    assert "==" not in inspect.getsource(known_key)


# ------------------------------------------------------------------------------------------------------------ tenants


async def test_a_request_is_its_keys_tenants_whatever_it_says(url: str, backend: FakeBackend) -> None:
    async with aiohttp.ClientSession() as session:
        for key in KEYS:
            body = {"prompt": "a", "tenant": "b", "session": "s"}
            async with session.post(url + COMPLETIONS, json=body, headers=bearer(key)) as response:
                assert response.status == 200
                assert response.headers["x-ignored-fields"] == "tenant"
            async with session.post(f"{url}/v1/requests/cmpl-x/cancel", headers=bearer(key)) as response:
                assert response.status == 200
            async with session.post(f"{url}/v1/sessions/s/release", headers=bearer(key)) as response:
                assert await response.json() == {"session": "s", "released": True}
    assert [(terms.tenant, terms.session) for terms in backend.terms] == [("a", "s"), ("b", "s")]
    assert backend.cancelled == [("a", "cmpl-x"), ("b", "cmpl-x")]
    assert backend.released == [("a", "s"), ("b", "s")]


@pytest.mark.parametrize(
    ("of_key", "asked", "given"),
    [
        (None, None, "interactive"),
        (None, "background", "background"),
        ("interactive", None, "interactive"),
        ("interactive", "background", "background"),
        ("background", None, "background"),
        ("background", "background", "background"),
        ("background", "interactive", None),
    ],
)
async def test_a_keys_class_is_that_of_its_requests_and_they_may_ask_for_less(
    backend: FakeBackend, of_key: ServiceClass | None, asked: ServiceClass | None, given: ServiceClass | None
) -> None:
    key = ApiKey(digest=digest_of(KEYS[0]), tenant="a", service_class=of_key)
    runner = await run_app(backend, "127.0.0.1", 0, HttpOptions(api_keys=(key,)))
    async with aiohttp.ClientSession(f"http://127.0.0.1:{bound_port(runner)}", headers=bearer(KEYS[0])) as session:
        for stream in (False, True):
            body = {"prompt": "a", "service_class": asked, "stream": stream}
            async with session.post(COMPLETIONS, json=body) as response:
                assert response.status == (403 if given is None else 200)
                if given is None:
                    error = (await response.json())["error"]
                    assert (error["code"], error["param"]) == ("service_class_not_allowed", "service_class")
    assert [terms.service_class for terms in backend.terms] == [given] * 2 * (given is not None)
    await runner.cleanup()
