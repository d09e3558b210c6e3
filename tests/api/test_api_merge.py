"""Several streams read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from api_server import eventually

from asyncengine.api.merge import merge
from asyncengine.delta import Delta
from asyncengine.errors import InvalidRequestError


class Source:
    """Yields `count` deltas over `n` choices, then ends or raises; counts what was taken and whether it was closed."""

    def __init__(self, count: int, *, n: int = 1, error: Exception | None = None) -> None:
        self.taken = 0
        self.closed = False
        self._count, self._n, self._error = count, n, error

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        try:
            for step in range(self._count):
                self.taken += 1
                yield Delta(
                    index=step % self._n,
                    text=str(step),
                    token_ids=[],
                    prompt_tokens=1,
                    cached_tokens=0,
                    completion_tokens=step,
                )
            if self._error is not None:
                raise self._error
        finally:
            self.closed = True


async def texts(sources: list[Source], n: int) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    async with aclosing(merge([source.deltas() for source in sources], n)) as batches:
        async for news in batches:
            for index, delta in news:
                found.setdefault(index, []).append(delta.text)
    return found


async def test_each_choice_keeps_its_order() -> None:
    assert await texts([Source(3)], 1) == {0: ["0", "1", "2"]}
    assert await texts([Source(4, n=2)], 2) == {0: ["0", "2"], 1: ["1", "3"]}
    assert await texts([Source(4, n=2), Source(2, n=2)], 2) == {0: ["0", "2"], 1: ["1", "3"], 2: ["0"], 3: ["1"]}


async def test_a_reader_that_is_behind_stops_the_sources() -> None:
    sources = [Source(1000), Source(1000), Source(1000)]
    async with aclosing(merge([source.deltas() for source in sources], 1)) as batches:
        await anext(batches)
        for _ in range(100):
            await asyncio.sleep(0)
        # the batch that was read, what waits now (at most one delta a choice plus the last pump's one), no more
        assert sum(source.taken for source in sources) <= 12
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 2])
async def test_an_error_of_one_source_closes_the_others(count: int) -> None:
    sources = [Source(1000) for _ in range(count)] + [Source(0, error=InvalidRequestError("no"))]
    with pytest.raises(InvalidRequestError, match="no"):
        await texts(sources, 1)
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_cancelling_the_reader_closes_the_sources(count: int) -> None:
    started = closed = 0

    async def silent() -> AsyncGenerator[Delta, None]:
        nonlocal started, closed
        started += 1
        try:
            await asyncio.Event().wait()
            yield Delta(index=0, text="", token_ids=[], prompt_tokens=0, cached_tokens=0, completion_tokens=0)
        finally:
            closed += 1

    async def read() -> None:
        async with aclosing(merge([silent() for _ in range(count)], 1)) as batches:
            await anext(batches)

    reader = asyncio.create_task(read())
    await eventually(lambda: started == count)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert closed == count
