from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from api_server import Server, serving
from fake_backend import FakeBackend


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def server(backend: FakeBackend) -> AsyncIterator[Server]:
    """The real application on a free port, over a fake engine."""
    async with serving(backend) as server:
        yield server
