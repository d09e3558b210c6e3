"""Questions whose answers come back on a pipe that brings everything."""

from __future__ import annotations

import asyncio

import pytest

from asyncengine.errors import EngineError
from asyncengine.questions import Questions


async def test_each_question_gets_its_own_answer_or_error_in_any_order() -> None:
    questions = Questions()
    asked = [questions.ask(number) for number in range(3)]
    questions.answer(2, "two")
    questions.fail(0, EngineError("no"))
    questions.answer(1, "one")
    assert (await asked[2], await asked[1]) == ("two", "one")
    with pytest.raises(EngineError, match="no"):
        await asked[0]
    assert questions._waiting == {}


async def test_answers_to_nobody_are_dropped() -> None:
    questions = Questions()
    waiting = asyncio.create_task(asyncio.wait_for(questions.ask(7), 60))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert questions._waiting == {}
    questions.answer(7, "late")
    questions.fail(8, EngineError("of nothing"))


async def test_all_that_wait_can_be_failed_at_once() -> None:
    questions = Questions()
    asked = [questions.ask(number) for number in range(3)]
    questions.answer(0, "in time")
    questions.fail_all(EngineError("over"))
    assert await asked[0] == "in time"
    assert [str(error) for error in await asyncio.gather(*asked[1:], return_exceptions=True)] == ["over", "over"]
    assert questions._waiting == {}
