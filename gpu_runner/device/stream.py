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

    def done(self) -> bool:
        """Whether `wait` would not sleep; if so, as good as having waited."""


class Stream(Protocol):
    """Runs work in the order of submission, without the submitter waiting for it.

    Work that raises ends the stream: later work is skipped, and every later mark raises the same error.
    """

    def submit(self, work: Work) -> None: ...

    def prepare(self, work: Work) -> Work:
        """The same for `submit`, as cheap as can be: for work that does the same on the same memory whenever it runs,
        which it may do once here."""

    def mark(self) -> Mark: ...

    def close(self) -> None:
        """Finish what was submitted; nothing may be submitted after."""


class _Guard:
    """Runs work until some fails, and keeps that error for those who wait."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def run(self, work: Work) -> None:
        if self.error is not None:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised where the work is waited for
            self.error = error


class WorkerStream:
    """One daemon thread is the device.

    `prepare` runs in the thread first: what torch keeps per thread is set there.
    """

    def __init__(self, prepare: Work) -> None:
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._guard = _Guard()
        self._thread = threading.Thread(target=self._run, name="cpu-device", daemon=True)
        self._thread.start()
        self.submit(prepare)

    def submit(self, work: Work) -> None:
        self._queue.put(lambda: self._guard.run(work))

    def prepare(self, work: Work) -> Work:
        return work

    def mark(self) -> Mark:
        return _WorkerMark(self._queue, self._guard)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()


class _WorkerMark:
    def __init__(self, work: queue.SimpleQueue[Work | None], guard: _Guard) -> None:
        self._queue = work
        self._guard = guard
        self._reached = threading.Event()
        self._error: Exception | None = None

    def record(self) -> None:
        self._reached.clear()
        self._queue.put(self._reach)

    def wait(self) -> None:
        self._reached.wait()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        if not self._reached.is_set():
            return False
        self.wait()
        return True

    def _reach(self) -> None:
        self._error = self._guard.error
        self._reached.set()


class InlineStream:
    """Work is done within `submit`, which raises what it raises."""

    def submit(self, work: Work) -> None:
        work()

    def prepare(self, work: Work) -> Work:
        return work

    def mark(self) -> Mark:
        return _DoneMark()

    def close(self) -> None:
        pass


class _DoneMark:
    def record(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


class CudaStream:
    """A stream of one GPU. Work is host code that queues kernels: it runs within `submit`, the kernels when their turn
    comes."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._guard = _Guard()

    def submit(self, work: Work) -> None:
        with self._stream:
            self._guard.run(work)

    def prepare(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        with self._stream:
            work()  # what it compiles, it does not while it is captured
            self._stream.synchronize()
            with torch.cuda.graph(graph, stream=self._stream):
                work()
        return graph.replay

    def mark(self) -> Mark:
        return _CudaMark(self._stream, self._guard)

    def close(self) -> None:
        self._stream.synchronize()


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream, guard: _Guard) -> None:
        self._stream = stream
        self._guard = guard
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._error: Exception | None = None

    def record(self) -> None:
        self._error = self._guard.error
        self._event.record(self._stream)

    def wait(self) -> None:
        self._event.synchronize()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        if not self._event.query():
            return False
        if self._error is not None:
            raise self._error
        return True
