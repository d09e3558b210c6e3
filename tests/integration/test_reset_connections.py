"""A load generator that is killed, again and again: nothing is held for it any more."""

from __future__ import annotations

import asyncio
import random
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.exchange import Client, Reply, request_bytes
from chaos.processes import family
from support.command_line import running

ROUNDS, CONNECTIONS = 5, 200
ENDLESS = {"prompt": "one two three", "max_tokens": 1900, "ignore_eos": True}
GAUGE = re.compile(r"^# TYPE (\S+) gauge$", re.MULTILINE)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """An empty directory whose name leaves room for the names of sockets; it must be left empty."""
    with tempfile.TemporaryDirectory(prefix="r-") as path:
        yield Path(path)


async def reset(client: Client, draw: random.Random) -> Reply:
    """A request of some kind, whose connection is reset at some moment."""
    after = draw.choice((0.0, 0.01, 0.05, 0.3)) * draw.random()
    body = ENDLESS | {"stream": draw.random() < 0.7, "n": draw.choice((1, 1, 3))}
    if draw.random() < 0.2:  # within its body
        whole = request_bytes("/v1/completions", b'{"prompt": "one two three"}')
        return await client.send(whole[:-10], manner="reset", leave_after=after)
    return await client.post("/v1/completions", body, manner="reset", leave_after=after)


async def gauges(client: Client) -> dict[str, set[float]]:
    """All values of every gauge but the one that says that all is well."""
    text = (await client.get("/metrics")).body.decode()
    names = [name for name in GAUGE.findall(text) if name != "asyncengine:ready"]
    return {
        name: {
            float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))
        }
        for name in names
    }


def is_idle(found: dict[str, set[float]]) -> bool:
    """All are 0, and no page is in use."""
    pages = {"asyncengine:kv_cache_pages", "asyncengine:kv_cache_free_pages"}
    whole = found["asyncengine:kv_cache_pages"] == found["asyncengine:kv_cache_free_pages"]
    return whole and all(values == {0.0} for name, values in found.items() if name not in pages)


def descriptors(pid: int) -> dict[str, int]:
    return {process.role: process.fds for process in family(pid)}


async def test_after_a_thousand_resets_every_gauge_is_0_and_a_request_is_served(short_path: Path) -> None:
    draw = random.Random(20)
    options = ["--port", "0", "--max-num-seqs", "32", "--no-console"]
    with running(short_path, "serve", *options, step_ms=5, endless_from=1900) as command:
        port = int(command.read_until(r"Ready: \S+ at http://127.0.0.1:(\d+)")[1])
        client, pid = Client(port), command.process.pid

        async def answer() -> Reply:
            return await client.post("/v1/completions", {"prompt": "one two three", "max_tokens": 50})

        assert b'"text":"one two three"' in (await answer()).body
        before = descriptors(pid)
        assert (await gauges(client)).keys() >= {"vllm:num_requests_running", "vllm:num_requests_waiting"}
        for _ in range(ROUNDS):
            replies = await asyncio.gather(*(reset(client, draw) for _ in range(CONNECTIONS)))
            assert {reply.status for reply in replies} <= {0, 200}
            assert sum(reply.left for reply in replies) == CONNECTIONS
        async with asyncio.timeout(60):
            while not is_idle(await gauges(client)):
                await asyncio.sleep(0.1)
            while descriptors(pid) != before:
                await asyncio.sleep(0.1)
        assert b'"text":"one two three"' in (await answer()).body
        command.process.terminate()
        code, _, err = command.finish()
    assert code == 0
    assert "Traceback" not in err
