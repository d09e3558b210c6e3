"""A fault of ours is in the log with its place and kind, and without what a client sent."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from api_server import CHAT, COMPLETIONS, Server
from fake_backend import FakeBackend

from asyncengine.wire.faults import log_faults_without_texts

SECRET = "zanzibar"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = log_faults_without_texts(stream)
    yield stream
    logging.getLogger().removeHandler(handler)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_no_log_of_a_fault_repeats_what_a_client_sent(
    server: Server, backend: FakeBackend, log: io.StringIO, path: str, stream: bool
) -> None:
    backend.failure, backend.fail_after = ValueError(f"not a number: {SECRET!r}"), 1
    bodies: dict[str, dict[str, Any]] = {
        COMPLETIONS: {"prompt": SECRET},
        CHAT: {"messages": [{"role": "user", "content": SECRET}]},
    }
    async with server.session.post(server.url + path, json={**bodies[path], "stream": stream}) as response:
        answer = await response.read()
    assert b"internal_error" in answer
    assert b"number" not in answer
    assert "ValueError\n" in log.getvalue()
    assert "fake_backend.py" in log.getvalue()
    assert SECRET not in log.getvalue()


async def test_nor_does_that_of_the_event_loop(log: io.StringIO) -> None:
    loop = asyncio.get_running_loop()
    loop.call_soon(int, SECRET)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert "ValueError\n" in log.getvalue()


def test_what_is_no_fault_is_logged_as_it_is(log: io.StringIO) -> None:
    logging.getLogger("asyncengine.some").warning("%s was replaced", "gpu_runner")
    logging.getLogger("asyncengine.some").info("not this")
    assert log.getvalue() == "gpu_runner was replaced\n"
