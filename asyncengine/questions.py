"""Questions to other processes whose answers come back on the pipe that brings everything."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncengine.errors import EngineError


class Questions:
    """Each has a number of its own. Whoever no longer waits is forgotten, and an answer that comes later is dropped.

    asker   send question 7, ask(7) | await ........................... | value
    pipe                                     answer(7, value) or fail(7)
    """

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    def ask(self, number: int) -> asyncio.Future[Any]:
        """Its answer, or an `EngineError`. For a question that is sent in this turn of the event loop."""
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._waiting.pop(number, None))
        return future

    def answer(self, number: int, value: object) -> None:
        future = self._waiting.pop(number, None)
        if future is not None and not future.done():
            future.set_result(value)

    def fail(self, number: int, error: EngineError) -> None:
        future = self._waiting.pop(number, None)
        if future is not None and not future.done():
            future.set_exception(error)

    def fail_all(self, error: EngineError) -> None:
        for number in list(self._waiting):
            self.fail(number, error)
