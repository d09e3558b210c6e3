"""Weights from a file to their place on a device, through a few small host buffers.

    reader 1   | read chunk 1 | to the device | read chunk 9 | ...
    reader 2   | read chunk 2 | to the device | read ...
      ...        from the page cache or the disk, into the reader's own pinned buffer

A chunk's destination is part of a tensor that exists already, so there is a second copy neither on the host nor on the
device. Reads go straight into pinned memory rather than through a mapping: of a file in the page cache, one thread read
4.2 GB/s that way and copied 1.7 GB/s from a mapping, whose pages fault one by one; and a file that is cut short while
it is read gives an error, where a mapping kills the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

import torch
from torch import Tensor

from asyncengine.errors import StartupError

READERS = 8
CHUNK_BYTES = 8 << 20
"""Large enough that a chunk's read hides what its copy costs to start; READERS of them are all that is on the host."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the values of a tensor lie, in order and as they are: `num_bytes` from `start` of a file."""

    path: Path
    start: int
    num_bytes: int
    dtype: torch.dtype


class Staging:
    """Fills tensors from files by READERS threads, each with one buffer and, on a GPU, a stream of its own.

    A context: leaving it waits for what was asked for, or drops that if an error leaves it. `read`: as `os.preadv`.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        readers: int = READERS,
        chunk_bytes: int = CHUNK_BYTES,
        read: Callable[[int, list[memoryview], int], int] = os.preadv,
    ) -> None:
        """chunk_bytes: a multiple of 8, so that no value is cut in two."""
        self._chunk_bytes = chunk_bytes
        self._read = read
        self._pool = ThreadPoolExecutor(readers, thread_name_prefix="weights")
        self._readers: SimpleQueue[_Reader] = SimpleQueue()
        for _ in range(readers):
            self._readers.put(_Reader(device, chunk_bytes, read))
        self._files: dict[Path, int] = {}
        self._pending: list[Future[int]] = []

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=error is not None)
        for fd in self._files.values():
            os.close(fd)

    def fill(self, out: Tensor, source: Extent) -> None:
        """Ask for `out`, contiguous and of as many values, to be filled; where types differ, values are converted on
        the device. Raises `StartupError` for a file that cannot be opened."""
        if source.path not in self._files:
            try:
                self._files[source.path] = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise StartupError(f"cannot read {source.path}: {error.strerror}") from error
        fd, flat, size = self._files[source.path], out.view(-1), source.dtype.itemsize
        for begin in range(0, source.num_bytes, self._chunk_bytes):
            end = min(begin + self._chunk_bytes, source.num_bytes)
            part = flat[begin // size : end // size]
            self._pending.append(self._pool.submit(self._fill, fd, source, begin, part))

    def finish(self, progress: Callable[[int], None]) -> None:
        """Wait for everything asked for. progress: bytes read since the last call. Raises `StartupError` for a file
        that ends early or cannot be read."""
        for future in as_completed(self._pending):
            progress(future.result())
        self._pending.clear()

    def _fill(self, fd: int, source: Extent, begin: int, out: Tensor) -> int:
        reader = self._readers.get()  # there are as many as threads
        try:
            return reader.fill(fd, source, begin, out)
        finally:
            self._readers.put(reader)


class _Reader:
    """A buffer on the host and the stream that empties it."""

    def __init__(
        self, device: torch.device, chunk_bytes: int, read: Callable[[int, list[memoryview], int], int]
    ) -> None:
        on_gpu = device.type == "cuda"
        self._buffer = torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._bytes = self._buffer.numpy().data
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._read = read

    @torch.inference_mode()  # which is each thread's own; the tensors may have been made in it
    def fill(self, fd: int, source: Extent, begin: int, out: Tensor) -> int:
        """Read `out`'s values, `begin` bytes into `source`, and return how many bytes they took in the file."""
        num_bytes = out.numel() * source.dtype.itemsize
        done = 0
        while done < num_bytes:
            try:
                count = self._read(fd, [self._bytes[done:num_bytes]], source.start + begin + done)
            except OSError as error:
                raise StartupError(f"cannot read {source.path}: {error.strerror}") from error
            if not count:
                raise StartupError(f"{source.path} ends early: it was cut short after it was opened")
            done += count
        values = self._buffer[:num_bytes].view(source.dtype)
        if self._stream is None:
            out.copy_(values)
            return num_bytes
        with torch.cuda.stream(self._stream):
            if source.dtype == out.dtype:
                out.copy_(values, non_blocking=True)
            else:
                out.copy_(values.to(out.device, non_blocking=True))
        self._stream.synchronize()
        return num_bytes
