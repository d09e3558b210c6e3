"""The console's files as they are served: all from here, none of them with anything inline."""

from __future__ import annotations

import re

import pytest
from api_server import Server
from fake_backend import FakeBackend

from asyncengine.api.app import make_app
from asyncengine.api.console_routes import FILES
from asyncengine.config import HttpOptions


async def test_every_file_of_the_page_is_served_under_a_strict_policy(server: Server) -> None:
    for path, (_, content_type) in FILES.items():
        async with server.session.get(server.url + path) as response:
            assert response.status == 200
            assert response.content_type == content_type
            policy = response.headers["Content-Security-Policy"].split("; ")
            assert policy == ["default-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"]
            assert response.headers["X-Content-Type-Options"] == "nosniff"


async def test_the_page_refers_to_nothing_but_its_own_files_and_has_nothing_inline(server: Server) -> None:
    async with server.session.get(f"{server.url}/") as response:
        page = await response.text()
    assert set(re.findall(r'(?:src|href)="([^"#][^"]*)"', page)) <= set(FILES)
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", page) == []
    for path in FILES:
        async with server.session.get(server.url + path) as response:
            text = await response.text()
        others = [url for url in re.findall(r"https?://[^\s\"']+", text) if url != "http://www.w3.org/2000/svg"]
        assert others == []
        assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval)\b", text)
        for name in re.findall(r'from "\./([^"]+)"', text):
            assert f"/console/{name}" in FILES


@pytest.mark.parametrize(
    "path", ["/console/__init__.py", "/console/../config.py", "/console/%2e%2e/config.py", "/console/"]
)
async def test_nothing_else_is_served(server: Server, path: str) -> None:
    async with server.session.get(server.url + path) as response:
        assert response.status == 404


def test_without_the_console_there_is_no_such_route() -> None:
    def paths(*, console: bool) -> set[str]:
        routes = make_app(FakeBackend(), HttpOptions(console=console)).router.routes()
        return {route.resource.canonical for route in routes if route.resource is not None}

    assert paths(console=True) - paths(console=False) == {*FILES, "/console/timeline"}
