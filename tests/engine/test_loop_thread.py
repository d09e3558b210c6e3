"""An interrupt that wakes nobody, as one does that comes just before its thread falls asleep, is heard all the same."""

import _thread
import asyncio

import pytest

from asyncengine.errors import EngineDeadError
from asyncengine.loop_thread import LoopThread


def test_an_interrupt_that_does_not_wake_the_caller_cancels_its_work() -> None:
    loop, heard = LoopThread("test"), []

    async def endless() -> None:
        # the caller is asleep, or will be before it looks for signals; this marks one as arrived and wakes no thread
        asyncio.get_running_loop().call_later(0.05, _thread.interrupt_main)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            heard.append("cancelled")
            raise

    async def answer() -> int:
        return 7

    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run(endless())
        assert heard == ["cancelled"]
        assert loop.run(answer()) == 7
    finally:
        loop.close()
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        loop.run(answer())
