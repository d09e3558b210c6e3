"""An event loop in a thread of its own, for callers that have none or whose own must not be taken."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import uvloop

from asyncengine.errors import EngineDeadError, EngineError

T = TypeVar("T")

INTERRUPT_SECONDS = 0.2
"""A signal that comes just before its thread falls asleep does not wake it, so the sleeper looks up this often."""


class LoopThread:
    """Runs coroutines for other threads, which wait meanwhile.

        caller   run(work) sleeps ................ | KeyboardInterrupt sleeps | raises it
        thread          | begin, work .................. | cancel, work ends |

    A caller that is interrupted gets control back only once its work has ended, so nothing of it goes on.
    """

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._open = True  # under the lock: what was begun before `close` is heard of, what comes later is refused
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that has the thread: nobody would answer here."""
        return os.getpid() != self._pid

    @property
    def is_current(self) -> bool:
        """Whether the caller is this thread itself, which must not wait for itself."""
        return threading.current_thread() is self._thread

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns or raises. Raises `EngineDeadError` when the thread is or gets closed, `EngineError` in a
        forked process."""
        if self.is_forked:
            work.close()
            raise EngineError(
                "an engine is used in the process that started it, and this one was forked from that",
                code="wrong_process",
            )
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        # a bare lock: an interrupt while a Future is waited for can leave it locked for good
        running = threading.Lock()
        running.acquire()
        outcome.add_done_callback(lambda _: running.release())
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = self._loop.create_task(work)
            tasks.append(task)
            task.add_done_callback(partial(_tell, outcome))

        def cancel() -> None:
            if tasks:
                tasks[0].cancel()
            else:  # interrupted before it was begun
                work.close()
                outcome.cancel()

        try:
            if not self._call(begin):
                work.close()
                raise _closed()
            _wait_for(running)
            return outcome.result()
        finally:
            if not outcome.done() and self._call(cancel):
                _wait_for(running)

    def close(self) -> None:
        """Cancel what runs and end the thread. Idempotent."""
        with self._lock:
            if self._open:
                self._open = False
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _call(self, function: Callable[[], None]) -> bool:
        """Have the thread call it, after whatever it was asked before; False when it is closed."""
        with self._lock:
            if self._open:
                self._loop.call_soon_threadsafe(function)
            return self._open

    def _serve(self) -> None:
        # asyncio.Runner would have one more thread wait for the executor's: Python 3.12 starts none while it exits
        with concurrent.futures.ThreadPoolExecutor(thread_name_prefix=self._thread.name) as executor:
            self._loop.set_default_executor(executor)
            self._loop.run_forever()
            self._loop.run_until_complete(_end_the_rest())
        self._loop.close()


async def _end_the_rest() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.wait(rest)
    await asyncio.get_running_loop().shutdown_asyncgens()


def _wait_for(running: threading.Lock) -> None:
    while not running.acquire(timeout=INTERRUPT_SECONDS):
        pass


def _tell(outcome: concurrent.futures.Future[T], task: asyncio.Task[T]) -> None:
    if task.cancelled():
        outcome.set_exception(_closed())
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


def _closed() -> EngineDeadError:
    return EngineDeadError("the engine was closed", code="engine_dead")
