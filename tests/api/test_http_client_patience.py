"""How long `AsyncClient` waits and how often it asks, against a server that plays a script. Nobody sleeps: waits
between attempts are injected, and limits pass because the event loop's clock is put forward."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web
from api_server import eventually

from asyncengine.client import AsyncClient, RetryPolicy, Timeouts
from asyncengine.errors import EngineDeadError, EngineError, InvalidRequestError, OverloadedError, RequestTimeoutError
from asyncengine.retries import seconds_of

Act = Callable[[web.Request], Awaitable[web.StreamResponse]]
MODELS = {"data": [{"id": "m"}]}


class Script:
    """Answers the first request with the first act and so on, the last one for ever."""

    def __init__(self) -> None:
        self.acts: list[Act] = []
        self.requests = self.at_once = self.most_at_once = self.left = 0
        self.url = ""
        self.waits: list[float] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        act = self.acts[min(self.requests, len(self.acts) - 1)]
        self.requests += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await act(request)
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.at_once -= 1

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)

    def client(self, **options: Any) -> AsyncClient:
        return AsyncClient(self.url, **{"sleep": self.sleep, "chance": lambda: 0.5} | options)


class Clock:
    """The event loop's, which can be put forward."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        loop = asyncio.get_running_loop()
        real = loop.time
        patch.setattr(loop, "time", lambda: real() + self.ahead)

    def forward(self, seconds: float) -> None:
        self.ahead += seconds


@pytest.fixture
async def script() -> AsyncIterator[Script]:
    script = Script()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", script.handle)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    script.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield script
    await runner.cleanup()


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def refuse(status: int, **headers: str) -> Act:
    async def act(request: web.Request) -> web.StreamResponse:
        error = {"error": {"message": f"refused with {status}", "code": "overloaded"}}
        return web.json_response(error, status=status, headers=headers)

    return act


def event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "token_ids": [1], "finish_reason": finish}
    body = {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def stream(*steps: bytes | Callable[[], object]) -> Act:
    """Sends bytes, calls what is to be called, and then never ends unless the last event did."""

    async def act(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for step in steps:
            if isinstance(step, bytes):
                await response.write(step)
            else:
                step()
        if not isinstance(steps[-1], bytes):
            await asyncio.Event().wait()
        return response

    return act


async def answer_models(request: web.Request) -> web.StreamResponse:
    return web.json_response(MODELS)


ANSWER = stream(event("a"), event("b", "stop"), b"data: [DONE]\n\n")


async def texts(client: AsyncClient, **options: Any) -> list[str]:
    return [delta.text async for delta in client.generate("hi", **options)]


@asynccontextmanager
async def raising(code: str, message: str) -> AsyncIterator[None]:
    with pytest.raises(RequestTimeoutError) as raised:
        yield
    assert (raised.value.code, raised.value.message) == (code, message)


# ---------------------------------------------------------------------------------------------------- asking again


@pytest.mark.parametrize("status", [429, 503])
async def test_it_asks_again_while_there_is_no_room_and_waits_twice_as_long_each_time(
    script: Script, status: int
) -> None:
    script.acts = [refuse(status)] * 4 + [ANSWER]
    async with script.client(retry=RetryPolicy(attempts=5, first_wait=1.0, longest_wait=3.0)) as client:
        assert await texts(client) == ["a", "b"]
    assert script.requests == 5
    assert script.waits == [0.75, 1.5, 2.25, 2.25], "a quarter is left out, and no wait is longer than three"


async def test_it_gives_up_with_what_the_server_said_last(script: Script) -> None:
    script.acts = [refuse(429), refuse(503)]
    async with script.client() as client:
        with pytest.raises(OverloadedError, match=r"^refused with 503$"):
            await texts(client)
        assert (script.requests, script.waits) == (3, [0.375, 0.75])
        with pytest.raises(OverloadedError):
            await client.models()
        assert script.requests == 6


async def test_it_comes_back_when_the_server_says(script: Script) -> None:
    script.acts = [refuse(503, **{"Retry-After": "7"}), refuse(503, **{"Retry-After": "soon"}), ANSWER]
    async with script.client() as client:
        assert await texts(client) == ["a", "b"]
    assert script.waits == [7.25, 0.75], "never earlier, and not all at once"


async def test_it_does_not_wait_longer_than_it_may(script: Script) -> None:
    script.acts = [refuse(503, **{"Retry-After": "31"}), ANSWER]
    async with script.client() as client:
        with pytest.raises(OverloadedError):
            await texts(client)
    assert (script.requests, script.waits) == (1, [])


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (refuse(400), InvalidRequestError),
        (refuse(500), EngineError),
        (stream(b'data: {"error": {"message": "full", "type": "overloaded_error"}}\n\n'), OverloadedError),
        (stream(event("a"), b'data: {"error": {"message": "full", "type": "overloaded_error"}}\n\n'), OverloadedError),
        (stream(event("a")), EngineDeadError),
    ],
)
async def test_it_asks_once_where_asking_again_would_not_help_or_an_answer_has_begun(
    script: Script, act: Act, error: type[EngineError]
) -> None:
    script.acts = [act]
    async with script.client() as client:
        with pytest.raises(error):
            await texts(client)
    assert (script.requests, script.waits) == (1, [])


async def test_a_connection_that_breaks_before_the_answer_is_not_tried_again(script: Script) -> None:
    async def hang_up(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    script.acts = [hang_up]
    async with script.client() as client:
        with pytest.raises(EngineError) as raised:
            await texts(client)
    assert raised.value.code == "connection_error"
    assert (script.requests, script.waits) == (1, [])


async def test_refused_connections_are_tried_again_until_somebody_listens(script: Script) -> None:
    script.acts = [ANSWER]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        absent = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with AsyncClient(absent, sleep=script.sleep, chance=lambda: 0.0) as client:
            with pytest.raises(EngineError) as raised:
                await texts(client)
            assert raised.value.code == "connection_error"
            assert script.waits == [0.5, 1.0]

            async def arrive(seconds: float) -> None:
                client._base_url = script.url

            client._sleep = arrive
            assert await texts(client) == ["a", "b"]
            assert script.requests == 1


async def test_health_is_asked_once(script: Script) -> None:
    script.acts = [refuse(500)]
    async with script.client() as client:
        with pytest.raises(EngineError, match="refused with 500"):
            await client.health()
    assert (script.requests, script.waits) == (1, [])


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("0", 0.0),
        ("120", 120.0),
        ("-1", None),
        ("1.5", None),
        ("soon", None),
        ("²", None),
        ("Sun, 29 Nov 2026 12:00:30 GMT", 30.0),
        ("Sun, 29 Nov 2026 11:00:00 GMT", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(header: str | None, seconds: float | None) -> None:
    assert seconds_of(header, datetime(2026, 11, 29, 12, tzinfo=UTC)) == seconds


def test_waits_are_bounded_whatever_chance_says() -> None:
    policy = RetryPolicy(attempts=100, first_wait=1.0, longest_wait=8.0)
    waits = [policy.wait(attempt, retry_after=None, chance=0.0) for attempt in range(1, 101)]
    assert waits == [1.0, 2.0, 4.0, *[8.0] * 96, None]
    assert policy.wait(1, retry_after=None, chance=0.999) == pytest.approx(0.5005)
    assert policy.wait(1, retry_after=8.0, chance=0.5) == 8.5
    for bad in ({"attempts": 0}, {"attempts": 101}, {"first_wait": -1.0}, {"longest_wait": 0.1}):
        with pytest.raises(InvalidRequestError):
            RetryPolicy(**bad)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- limits of time


async def test_the_first_token_has_a_limit_that_what_is_no_output_does_not_extend(script: Script, clock: Clock) -> None:
    opening = b'data: {"choices": [{"index": 0, "delta": {}}]}\n\n'
    script.acts = [stream(opening, lambda: clock.forward(61))]
    async with script.client(timeouts=Timeouts(first_token=60)) as client:
        async with raising("first_token_timeout", "there was no output after 60 s"):
            await texts(client)
        await eventually(lambda: script.left == 1)
    assert (script.requests, script.waits) == (1, [])


async def test_the_first_token_is_waited_for_from_the_attempt_on(script: Script, clock: Clock) -> None:
    async def sleep(seconds: float) -> None:
        clock.forward(100)

    script.acts = [refuse(503), ANSWER]
    async with script.client(timeouts=Timeouts(first_token=60), sleep=sleep) as client:
        assert await texts(client) == ["a", "b"]


async def test_later_output_has_a_limit_of_its_own(script: Script, clock: Clock) -> None:
    script.acts = [stream(event("a"), lambda: None)]
    async with script.client(timeouts=Timeouts(first_token=60, between_chunks=5)) as client:
        got = []
        async with raising("chunk_timeout", "nothing more came for 5 s"), aclosing(client.generate("hi")) as deltas:
            async for delta in deltas:
                got.append(delta.text)
                asyncio.get_running_loop().call_soon(clock.forward, 6)  # once the next chunk is waited for
        assert got == ["a"]
        await eventually(lambda: script.left == 1)


async def test_the_callers_own_pause_is_no_wait_for_the_next_chunk(script: Script, clock: Clock) -> None:
    script.acts = [ANSWER]
    async with script.client(timeouts=Timeouts(first_token=5, between_chunks=5)) as client:
        async for _ in client.generate("hi"):
            clock.forward(100)


async def test_the_total_covers_the_whole_answer_and_a_caller_that_pauses(script: Script, clock: Clock) -> None:
    script.acts = [stream(event("a"), lambda: clock.forward(31)), ANSWER]
    limits = Timeouts(first_token=60, between_chunks=60, total=30)
    async with script.client() as client:
        async with raising("total_timeout", "the answer was not complete after 30 s"):
            await texts(client, timeouts=limits)
        await eventually(lambda: script.left == 1)
        async with raising("total_timeout", "the answer was not complete after 30 s"):
            async for _ in client.generate("hi", timeouts=limits):
                clock.forward(31)


async def test_the_total_covers_the_waits_between_attempts(script: Script, clock: Clock) -> None:
    async def sleep(seconds: float) -> None:
        clock.forward(31)
        await asyncio.Event().wait()

    script.acts = [refuse(503)]
    client = script.client(timeouts=Timeouts(total=30), sleep=sleep)
    async with client, raising("total_timeout", "the answer was not complete after 30 s"):
        await texts(client)
    assert script.requests == 1


async def test_models_and_health_have_the_limits_too(script: Script, clock: Clock) -> None:
    async def never(request: web.Request) -> web.StreamResponse:
        clock.forward(31)
        await asyncio.Event().wait()
        raise AssertionError

    script.acts = [never, never, answer_models]
    async with script.client(timeouts=Timeouts(total=30)) as client:
        for ask in (client.models, client.health):
            async with raising("total_timeout", "the answer was not complete after 30 s"):
                await ask()
        assert await client.models() == ["m"]


async def test_connecting_has_a_limit(script: Script, clock: Clock) -> None:
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for waiting in (first, second):  # nobody accepts, and there is room for one to wait: the system drops the rest
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with AsyncClient(url, timeouts=Timeouts(connect=4)) as client:
            asyncio.get_running_loop().call_later(0.05, clock.forward, 5)
            async with raising("connect_timeout", f"there was no connection to {url} after 4 s"):
                await texts(client)


def test_limits_are_checked() -> None:
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InvalidRequestError, match="the timeout total must be above 0 seconds"):
            Timeouts(total=bad)


# -------------------------------------------------------------------------------------------- leaving, and the pool


async def test_closing_the_stream_or_cancelling_its_task_cancels_the_request_at_the_server(script: Script) -> None:
    script.acts = [stream(event("a"), lambda: None)]
    async with script.client() as client:
        async with aclosing(client.generate("hi")) as deltas:
            assert (await anext(deltas)).text == "a"
        await eventually(lambda: script.left == 1)
        task = asyncio.create_task(texts(client))
        await eventually(lambda: script.at_once == 1)
        task.cancel()
        await eventually(lambda: script.left == 2)


async def test_at_most_so_many_requests_are_at_the_server(script: Script) -> None:
    script.acts = [stream(event("a"), lambda: None)]
    async with script.client(max_connections=3) as client:
        tasks = [asyncio.create_task(texts(client)) for _ in range(5)]
        await eventually(lambda: script.at_once == 3)
        tasks[0].cancel()
        await eventually(lambda: script.requests == 4)
        assert script.at_once <= 3
        for task in tasks:
            task.cancel()
    assert script.most_at_once == 3
