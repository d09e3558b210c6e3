"""The way from the engine's call to the client's socket: pushed while the client keeps up, merged while it does not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncengine.api.merge import News
from asyncengine.api.relay import Relay
from asyncengine.errors import EngineDeadError, InvalidRequestError
from asyncengine.sampling import SamplingParams
from asyncengine.streams import RequestStream
from asyncengine.wire.base import Finish

ASKED: Any = {"namespace": "", "request_id": "", "terms": {}}


class Out:
    """Stands in for `EventStream`; a client that is `behind` is so until `room` is set."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.behind = False
        self.drains = 0
        self.room = asyncio.Event()

    def push(self, events: bytes) -> None:
        self.written.append(events)

    async def drain(self) -> None:
        self.drains += 1
        if self.behind:
            await self.room.wait()


class Engine:
    """Streams by hand: what `subscribe` returned, and which of them were closed."""

    def __init__(self) -> None:
        self.streams: list[RequestStream] = []
        self.closed: list[RequestStream] = []
        self.refuse_after: int | None = None

    def subscribe(self, prompt, params, *, listener, **asked) -> RequestStream:  # type: ignore[no-untyped-def]
        if len(self.streams) == self.refuse_after:
            raise InvalidRequestError("no")
        stream = RequestStream(n=params.n, stop=(), stop_token_ids=())
        stream.listener = listener
        stream.forget = lambda: self.closed.append(stream)
        self.streams.append(stream)
        return stream


def feed(stream: RequestStream, text: str, *, index: int = 0, finish: Finish = Finish.NONE) -> None:
    stream.feed(
        index,
        memoryview(text.encode()),
        memoryview(bytes(4)),
        finish=finish,
        stop_reason=-1,
        prompt_tokens=1,
        cached_tokens=0,
    )


def say(stream: RequestStream, text: str, *, index: int = 0, finish: Finish = Finish.NONE) -> None:
    feed(stream, text, index=index, finish=finish)
    stream.notify()


def events(news: News) -> bytes:
    return b"".join(b"%d:%s;" % (index, delta.text.encode()) for index, delta in news)


def relay_of(engine: Engine, out: Out, *, prompts: int = 1, n: int = 1) -> Relay:
    params = SamplingParams(n=n)
    return Relay(engine, ["p"] * prompts, params, events=events, out=out, **ASKED)  # type: ignore[arg-type]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_news_are_written_within_the_engines_call() -> None:
    engine, out = Engine(), Out()
    relay = relay_of(engine, out)
    (stream,) = engine.streams
    say(stream, "a")
    assert await relay.first() == b"0:a;"
    say(stream, "b")
    running = asyncio.create_task(relay.run())
    await settle()
    assert out.written == [b"0:b;"], "what came before anybody listened"
    say(stream, "c")
    assert out.written == [b"0:b;", b"0:c;"], "no task had to wake up"
    say(stream, "d", finish=Finish.LENGTH)
    await running
    assert out.written == [b"0:b;", b"0:c;", b"0:d;"]
    relay.close()
    relay.close()
    assert engine.closed == [stream]


async def test_a_client_that_is_behind_gets_one_longer_event() -> None:
    engine, out = Engine(), Out()
    relay = relay_of(engine, out)
    (stream,) = engine.streams
    running = asyncio.create_task(relay.run())
    await settle()
    out.behind = True
    for text in "abc":
        say(stream, text)
        await settle()
    assert (out.written, out.drains) == ([], 1)
    out.behind = False
    out.room.set()
    await settle()
    assert out.written == [b"0:abc;"]
    say(stream, "d", finish=Finish.STOP)
    await running
    assert out.written == [b"0:abc;", b"0:d;"]


async def test_an_end_that_finds_the_client_behind_is_still_written() -> None:
    engine, out = Engine(), Out()
    relay = relay_of(engine, out)
    running = asyncio.create_task(relay.run())
    await settle()
    out.behind = True
    say(engine.streams[0], "a", finish=Finish.STOP)
    await settle()
    out.behind = False
    out.room.set()
    await running
    assert out.written == [b"0:a;"]


async def test_choices_of_one_frame_are_one_write_and_several_prompts_are_numbered_through() -> None:
    engine, out = Engine(), Out()
    relay = relay_of(engine, out, prompts=2, n=2)
    first, second = engine.streams
    running = asyncio.create_task(relay.run())
    await settle()
    feed(first, "a", index=0)
    feed(first, "b", index=1)
    first.notify()
    say(second, "c", index=1)
    assert out.written == [b"0:a;1:b;", b"3:c;"]
    for stream in engine.streams:
        for index in range(2):
            say(stream, "!", index=index, finish=Finish.STOP)
    await running


@pytest.mark.parametrize("pending", [False, True])
async def test_a_failure_comes_after_the_news_before_it(pending: bool) -> None:
    engine, out = Engine(), Out()
    relay = relay_of(engine, out)
    (stream,) = engine.streams
    running = asyncio.create_task(relay.run())
    await settle()
    if pending:
        feed(stream, "a")
    stream.fail(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError, match="gone"):
        await running
    assert out.written == [b"0:a;"] * pending


async def test_what_events_raises_ends_the_relay_in_its_own_task() -> None:
    engine, out = Engine(), Out()

    def broken(news: News) -> bytes:
        if news:
            raise ValueError("a fault")
        return b""

    relay = Relay(engine, ["p"], SamplingParams(), events=broken, out=out, **ASKED)  # type: ignore[arg-type]
    running = asyncio.create_task(relay.run())
    await settle()
    say(engine.streams[0], "a")
    say(engine.streams[0], "b")
    with pytest.raises(ValueError, match="a fault"):
        await running


async def test_a_refused_prompt_takes_back_those_before_it() -> None:
    engine = Engine()
    engine.refuse_after = 2
    with pytest.raises(InvalidRequestError):
        relay_of(engine, Out(), prompts=3)
    assert engine.closed == engine.streams
    assert len(engine.closed) == 2


async def test_after_closing_nobody_is_called() -> None:
    engine, out = Engine(), Out()
    relay = relay_of(engine, out)
    running = asyncio.create_task(relay.run())
    await settle()
    running.cancel()
    relay.close()
    say(engine.streams[0], "late")
    assert out.written == []
