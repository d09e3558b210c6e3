from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
from api_server import Server
from fake_backend import FakeBackend

from asyncengine.api.app import bound_port, run_app


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def server(backend: FakeBackend) -> AsyncIterator[Server]:
    """The real application on a free port, over a fake engine."""
    runner = await run_app(backend, "127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as session:
            yield Server(f"http://127.0.0.1:{bound_port(runner)}", session)
    finally:
        await runner.cleanup()
