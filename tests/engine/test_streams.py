"""The stream of one request: what arrives while its caller is busy becomes one delta per choice."""

from __future__ import annotations

import asyncio
from array import array

import pytest

from asyncengine.delta import Delta
from asyncengine.errors import EngineDeadError, EngineError
from asyncengine.logprobs import TokenLogprob
from asyncengine.streams import RequestStream
from asyncengine.wire.base import Finish


def make_stream(n: int = 1, stop: tuple[str, ...] = (), stop_token_ids: tuple[int, ...] = ()) -> RequestStream:
    return RequestStream(n=n, stop=stop, stop_token_ids=stop_token_ids)


def feed(stream: RequestStream, index: int, text: str, ids: list[int], finish: int = 0, stop_reason: int = -1) -> None:
    stream.feed(
        index,
        memoryview(text.encode()),
        memoryview(array("i", ids).tobytes()),
        finish=finish,
        stop_reason=stop_reason,
        prompt_tokens=5,
        cached_tokens=3,
    )


async def take_all(stream: RequestStream) -> list[Delta]:
    deltas = []
    while (delta := await stream.next()) is not None:
        deltas.append(delta)
    return deltas


async def test_deltas_that_arrive_while_the_caller_is_busy_become_one() -> None:
    stream = make_stream()
    feed(stream, 0, "é", [1])
    feed(stream, 0, "😀", [2, 3])
    feed(stream, 0, "!", [4], Finish.LENGTH)
    assert await take_all(stream) == [
        Delta(
            index=0,
            text="é😀!",
            token_ids=[1, 2, 3, 4],
            prompt_tokens=5,
            cached_tokens=3,
            completion_tokens=4,
            finish_reason="length",
        )
    ]


async def test_a_waiting_caller_gets_each_delta_as_it_comes_with_total_counts() -> None:
    stream = make_stream()
    taking = asyncio.create_task(take_all(stream))
    for token in range(3):
        await asyncio.sleep(0)
        feed(stream, 0, f"{token} ", [token], Finish.LENGTH if token == 2 else 0)
        await asyncio.sleep(0)
    deltas = await taking
    assert [delta.text for delta in deltas] == ["0 ", "1 ", "2 "]
    assert [delta.token_ids for delta in deltas] == [[0], [1], [2]]
    assert [delta.completion_tokens for delta in deltas] == [1, 2, 3]
    assert [delta.finish_reason for delta in deltas] == [None, None, "length"]


def entry(token: int) -> TokenLogprob:
    return TokenLogprob(token_id=token, token=b"x", logprob=-0.5, text_offset=0)


async def test_log_probabilities_merge_like_text_and_are_told_once() -> None:
    stream = make_stream()
    for token in (1, 2):
        stream.feed(
            0,
            memoryview(b"x"),
            memoryview(array("i", [token]).tobytes()),
            finish=0,
            stop_reason=-1,
            prompt_tokens=5,
            cached_tokens=3,
            logprobs=[entry(token)],
        )
    feed(stream, 0, "y", [3])
    first = await stream.next()
    feed(stream, 0, "z", [4], Finish.LENGTH)
    second = await stream.next()
    assert first is not None
    assert second is not None
    assert (first.logprobs, second.logprobs) == ([entry(1), entry(2)], [])


async def test_each_choice_has_at_most_one_pending_delta_and_the_oldest_goes_first() -> None:
    stream = make_stream(n=3)
    for text in "ab":
        feed(stream, 2, text, [1])
        feed(stream, 0, text, [1])
    first, second = await stream.next(), await stream.next()
    assert first is not None
    assert second is not None
    assert (first.index, first.text, second.index, second.text) == (2, "ab", 0, "ab")
    assert stream.unfinished == [0, 1, 2]


async def test_the_stream_ends_when_every_choice_has() -> None:
    stream = make_stream(n=2)
    feed(stream, 1, "x", [1], Finish.STOP, 2)
    assert stream.unfinished == [0]
    feed(stream, 0, "", [], Finish.LENGTH)
    deltas = await take_all(stream)
    assert [(delta.index, delta.finish_reason) for delta in deltas] == [(1, "stop"), (0, "length")]
    assert await stream.next() is None


async def test_a_cancelled_stream_ends_behind_what_it_has_and_hears_no_more() -> None:
    stream = make_stream(n=3)
    feed(stream, 1, "x", [1], Finish.STOP, 2)
    feed(stream, 2, "y", [5])
    assert stream.cancel(9) == [0, 2]
    feed(stream, 2, "late", [6], Finish.LENGTH)
    deltas = await take_all(stream)
    assert [(delta.index, delta.text, delta.finish_reason) for delta in deltas] == [
        (1, "x", "stop"),
        (2, "y", "abort"),
        (0, "", "abort"),
    ]
    assert stream.cancel(10) == []
    assert stream.over


async def test_cancelling_wakes_a_caller_and_calls_a_listener() -> None:
    stream = make_stream()
    heard = []
    stream.listener = lambda: heard.append(stream.take())
    stream.cancel(9)
    assert [delta.finish_reason for (delta,) in heard] == ["abort"]
    stream = make_stream()
    taking = asyncio.create_task(take_all(stream))
    await asyncio.sleep(0)
    stream.cancel(9)
    assert [delta.finish_reason for delta in await taking] == ["abort"]


async def test_a_stream_that_has_failed_cannot_be_cancelled() -> None:
    stream = make_stream()
    stream.fail(EngineError("no"))
    assert stream.cancel(9) == []
    with pytest.raises(EngineError, match="no"):
        await stream.next()


async def test_an_abort_that_nobody_here_asked_for_is_an_error() -> None:
    stream = make_stream(n=2)
    feed(stream, 0, "a", [1])
    feed(stream, 0, "", [], Finish.ABORT)
    assert [delta.text for delta in stream.take()] == ["a"]
    with pytest.raises(EngineDeadError) as error:
        stream.take()
    assert error.value.code == "aborted"
    assert stream.unfinished == [1]


@pytest.mark.parametrize(
    ("finish", "given", "reason"),
    [(Finish.STOP, 9, 9), (Finish.STOP, 2, None), (Finish.STOP_STRING, 1, "END"), (Finish.LENGTH, -1, None)],
)
async def test_the_stop_reason_is_the_callers_own_stop(finish: int, given: int, reason: int | str | None) -> None:
    stream = make_stream(stop=("x", "END"), stop_token_ids=(9,))
    feed(stream, 0, "", [1], finish, given)
    delta = await stream.next()
    assert delta is not None
    assert delta.stop_reason == reason


async def test_news_of_a_choice_that_has_ended_is_ignored() -> None:
    stream = make_stream()
    feed(stream, 0, "a", [1], Finish.STOP)
    feed(stream, 0, "b", [2])
    assert [delta.text for delta in await take_all(stream)] == ["a"]


async def test_a_failure_wakes_the_caller_and_comes_after_the_pending_text() -> None:
    stream = make_stream()
    taking = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    stream.fail(EngineDeadError("gpu_runner was killed"))
    with pytest.raises(EngineDeadError, match="gpu_runner was killed"):
        await taking

    stream = make_stream()
    feed(stream, 0, "a", [1])
    stream.fail(EngineDeadError("first"))
    stream.fail(EngineDeadError("second"))
    delta = await stream.next()
    assert delta is not None
    assert delta.text == "a"
    with pytest.raises(EngineDeadError, match="first"):
        await stream.next()


async def test_a_caller_that_was_cancelled_can_come_back() -> None:
    stream = make_stream()
    taking = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    feed(stream, 0, "a", [1])
    delta = await stream.next()
    assert delta is not None
    assert delta.text == "a"


async def test_a_token_outside_the_vocabulary_fails_the_request_by_name() -> None:
    stream = make_stream()
    feed(stream, 0, "a", [1])
    feed(stream, 0, "", [], Finish.ERROR, 777)
    delta = await stream.next()
    assert delta is not None
    assert delta.text == "a"
    with pytest.raises(EngineError, match="777"):
        await stream.next()
    assert stream.unfinished == []


def test_what_waits_to_be_taken_is_measured() -> None:
    stream = make_stream(n=2)
    assert stream.pending_bytes == 0
    feed(stream, 0, "abc", [1, 2])
    feed(stream, 1, "é", [3])
    assert stream.pending_bytes == 3 + 8 + 2 + 4
    stream.take()
    assert stream.pending_bytes == 0
