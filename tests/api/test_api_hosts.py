"""Without keys, only what is of this machine is answered: no page of another site, whatever its name resolves to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from api_server import CHAT, COMPLETIONS, Server, serving
from fake_backend import FakeBackend

from asyncengine.api import connections
from asyncengine.api.app import make_app
from asyncengine.api_keys import digest_of
from asyncengine.config import ApiKey, HttpOptions
from asyncengine.errors import StartupError
from asyncengine.host_names import read_allowed_hosts

OURS = (
    *("localhost", "LocalHost:8000", "localhost.", "localhost:", "llm.localhost:9000"),
    *("127.0.0.1", "127.0.0.1:1", "127.8.7.6:8000", "[::1]", "[::1]:8000", "[0:0::1]:8000", "0.0.0.0:8000"),
    *("box", "box:8000", "x", "gpu-1.:80"),  # what /etc/hosts says
)
OTHERS = (
    *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "a" * 64),
    *("192.168.1.7:8000", "[fe80::1]:8000", "[2001:db8::1]", "127.1", "x/health?", ""),
    *("localhost@evil.example", "evil.example@localhost", "localhost, evil.example", "localhost:80:80", "::1", "[::1"),
)
ORIGINS = ("http://localhost:3000", "https://127.0.0.1", "http://[::1]:9", "chrome-extension://abc", "app://-")
OTHER_ORIGINS = (
    *("http://evil.example", "HTTP://evil.example:8000", "https://localhost.evil.example", "null", "http://"),
    *("http://localhost@evil.example", "http://localhost http://evil.example", "http://192.168.1.7", "http://box:8000"),
)


@pytest.fixture
async def allowing(backend: FakeBackend) -> AsyncIterator[Server]:
    names = read_allowed_hosts(["LLM.example.org", "192.168.1.7", "fd00::0:7"])
    async with serving(backend, HttpOptions(allowed_hosts=names)) as server:
        yield server


async def ask(server: Server, *headers: str, asked: str = "GET /v1/models", version: str = "1.1") -> tuple[int, str]:
    """Status and the error's code, "" for none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    lines = [f"{asked} HTTP/{version}", *headers, "Connection: close", "", ""]
    writer.write("\r\n".join(lines).encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b"access-control" not in head.lower()
    error = json.loads(body).get("error", {})
    assert {"message", "type", "param", "code"} == set(error) or not error
    return int(head.split()[1]), error.get("code", "")


async def test_only_loopback_names_are_answered(server: Server) -> None:
    for host in OURS:
        assert await ask(server, f"Host: {host}") == (200, ""), host
    for host in OTHERS:
        assert await ask(server, f"Host: {host}") == (403, "host_not_allowed"), host
    assert await ask(server, version="1.0") == (200, "")  # of old tools, never of a browser


async def test_only_pages_of_this_machine_are_answered_and_no_web_pages_programs(server: Server) -> None:
    for origin in ORIGINS:
        assert await ask(server, "Host: localhost:9000", f"Origin: {origin}") == (200, ""), origin
    for origin in OTHER_ORIGINS:
        answer = await ask(server, "Host: localhost:9000", f"Origin: {origin}")
        assert answer == (403, "origin_not_allowed"), origin
    assert await ask(server, "Host: localhost", "Origin: http://localhost", "Origin: null") == (
        403,
        "origin_not_allowed",
    )


async def test_a_name_that_the_operator_gives_is_answered_and_so_are_its_pages(allowing: Server) -> None:
    for host in ("llm.example.org", "LLM.example.org.:80", "192.168.1.7:9000", "[fd00::7]:80", "[FD00:0::7]", *OURS):
        assert await ask(allowing, f"Host: {host}") == (200, ""), host
    # a proxy that passes no name on leaves the page's
    assert await ask(allowing, "Host: 127.0.0.1:8000", "Origin: https://llm.example.org") == (200, "")
    for host in ("evil.example", "x.llm.example.org", "example.org", "192.168.1.8"):
        assert await ask(allowing, f"Host: {host}") == (403, "host_not_allowed"), host
        assert (await ask(allowing, "Host: localhost", f"Origin: http://{host}"))[1] == "origin_not_allowed", host


async def test_no_route_is_open_to_other_sites_and_nothing_reaches_the_engine(
    server: Server, backend: FakeBackend
) -> None:
    routes = make_app(backend).router.routes()
    paths = {route.resource.canonical for route in routes if route.resource is not None} | {"/nowhere"}
    assert len(paths) > 20
    for path in paths:
        for method in ("GET", "POST", "OPTIONS"):
            asked = f"{method} {path.replace('{', '').replace('}', '')}"
            assert await ask(server, "Host: evil.example", asked=asked) == (403, "host_not_allowed"), asked
            answer = await ask(server, "Host: localhost", "Origin: http://evil.example", asked=asked)
            assert answer == (403, "origin_not_allowed"), asked
    assert (backend.calls, backend.cancelled, backend.released) == ([], [], [])


@pytest.mark.parametrize(
    "path", [COMPLETIONS, CHAT, "/tokenize", "/v1/requests/cmpl-1/cancel", "/v1/sessions/s/release"]
)
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_what_a_browser_sends_for_any_page_without_asking_is_refused(
    server: Server, backend: FakeBackend, path: str, kind: str
) -> None:
    headers = {"Origin": "http://evil.example", "Content-Type": kind}
    async with server.session.post(server.url + path, data=b'{"prompt": "a"}', headers=headers) as response:
        error = (await response.json())["error"]
        assert (response.status, error["type"], error["code"]) == (403, "invalid_request_error", "origin_not_allowed")
        assert "--allowed-host" in error["message"]
    assert (backend.calls, backend.cancelled, backend.released) == ([], [], [])


async def test_the_question_whether_a_page_may_ask_is_never_answered_with_yes(server: Server) -> None:
    asks = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: content-type")
    for origin in ("http://localhost:3000", "http://evil.example"):
        status, _ = await ask(server, "Host: localhost", f"Origin: {origin}", *asks, asked=f"OPTIONS {COMPLETIONS}")
        assert status in (403, 405)  # and no header, as for all answers here


async def test_a_body_from_another_site_is_not_waited_for(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LINGER_SECONDS", 0.05)
    async with serving(backend) as server:
        asked = "POST /v1/completions"
        assert await ask(server, "Host: evil.example", "Content-Length: 4000000", asked=asked) == (
            403,
            "host_not_allowed",
        )


async def test_with_keys_it_is_the_key_that_counts(backend: FakeBackend) -> None:
    keys = (ApiKey(digest=digest_of("the-only-key"), tenant="a"),)
    async with serving(backend, HttpOptions(api_keys=keys)) as server:
        headers = ("Host: llm.example.org", "Origin: https://elsewhere.example")
        assert await ask(server, *headers) == (401, "invalid_api_key")
        assert await ask(server, *headers, "Authorization: Bearer the-only-key") == (200, "")


async def test_a_long_name_is_not_repeated(server: Server) -> None:
    async with server.session.get(server.url + "/health", headers={"Host": "a" * 5000}) as response:
        message = (await response.json())["error"]["message"]
        assert (response.status, message.count("a" * 128), "a" * 129 in message) == (403, 1, False)


@pytest.mark.parametrize(
    "name", ["", "http://a.example", "a.example:8000", "a/b", "*", "[::1]:80", "a b", "a,b", "[::1"]
)
def test_what_is_no_name_of_a_host_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(StartupError, match="--allowed-host must be a name or an address, without a scheme and a port"):
        read_allowed_hosts([name])
