"""A device's in-order queue of work behind one small interface: a CUDA stream, or a thread that behaves like one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], None]


class Mark(Protocol):
    """A point in a stream. Made once and recorded again and again, each time only after it was waited for."""

    def record(self) -> None:
        """Place the mark behind all work submitted so far."""

    def wait(self) -> None:
        """Sleep until the work before the mark is done; raise what that work raised."""


class Stream(Protocol):
    """Runs work in the order of submission, without the submitter waiting for it.

    Work that fails ends the stream: later work is skipped and every later mark raises the same error.
    """

    def submit(self, work: Work) -> None: ...

    def mark(self) -> Mark: ...

    def close(self) -> None:
        """Finish what was submitted; nothing may be submitted after."""


class WorkerStream:
    """One daemon thread is the device.

    `prepare` runs in the thread first: what torch keeps per thread is set there.
    """

    def __init__(self, name: str, prepare: Work) -> None:
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self.submit(prepare)

    def submit(self, work: Work) -> None:
        self._queue.put(lambda: self._guarded(work))

    def mark(self) -> Mark:
        return _WorkerMark(self)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def enqueue(self, work: Work) -> None:
        """Like `submit`, but runs also after a failure; must not raise."""
        self._queue.put(work)

    @property
    def error(self) -> Exception | None:
        return self._error

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def _guarded(self, work: Work) -> None:
        if self._error is not None:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001 - handed to whoever waits for the work
            self._error = error


class _WorkerMark:
    def __init__(self, stream: WorkerStream) -> None:
        self._stream = stream
        self._reached = threading.Event()
        self._error: Exception | None = None

    def record(self) -> None:
        self._reached.clear()
        self._stream.enqueue(self._reach)

    def wait(self) -> None:
        self._reached.wait()
        if self._error is not None:
            raise self._error

    def _reach(self) -> None:
        self._error = self._stream.error
        self._reached.set()


class CudaStream:
    """A stream of one GPU. Work is host code that queues kernels: it runs in `submit`, the kernels when their turn
    comes. What the host code raises comes out of `submit`, what a kernel does wrong out of the next wait."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submit(self, work: Work) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> Mark:
        return _CudaMark(self._stream)

    def close(self) -> None:
        self._stream.synchronize()


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def record(self) -> None:
        self._event.record(self._stream)

    def wait(self) -> None:
        self._event.synchronize()
