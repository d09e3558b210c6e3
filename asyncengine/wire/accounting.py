"""What every process of a running engine did with its time: a ring of records in shared memory, always on.

Each process writes one ring, `{role}.{index}.ring` in the engine's run directory. Any process of the same user may read
it at any time; the writer neither knows nor waits. The successor of a lost process puts its own ring in the place of
the old one, and readers follow (`RingReader.superseded`). All is little-endian int64, all times are CLOCK_MONOTONIC in
ns, one clock for all processes of a machine, except where a field says otherwise.

    header, 16 words   0 magic   1 version   2 words per record   3 capacity in records   4 pid   5 index of the worker
                       6, 7 role, UTF-8 padded with zeros   8 records written   9 .. 15 zero
    record k           at header + (k - 1) % capacity: the number k, from 1, then the fields of the role's record

    writer             number = 0 | fields | number = k | records written = k
    reader             number? k -> copy the fields -> number? still k -> the copy is whole

The ring is gone with its process (`shared_memory`).
"""

from __future__ import annotations

import mmap
import os
import struct
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from asyncengine.errors import EngineError
from asyncengine.wire.shared_memory import make_memory, publish

MAGIC = int.from_bytes(b"aeng-acc", "little")
VERSION = 1
CAPACITY = 4096
HEADER = struct.Struct("<6q16s8q")
_WRITTEN = 8
_HEADER_WORDS = HEADER.size // 8
SUFFIX = ".ring"


class StepRecord(NamedTuple):
    """gpu_runner's: one turn of its loop in which a step was launched or collected, nearly always both.

    The turn's phases follow each other in this order; 0 where the turn had none of it, and a phase lasts until the next
    one that there was. `wait` is for the device, all others are work. What comes before `drain` is sleep.
    """

    number: int
    step: int  # launched; 0 = none, as all five
    bucket: int  # token count it was run at
    rows: int
    prefill_tokens: int
    running: int  # requests, as planned
    waiting: int
    drain: int
    plan: int
    launch: int
    report: int  # the heartbeat
    wait: int
    commit: int
    send: int
    end: int
    collected: int  # step; 0 = none, as both times
    device_begin: int  # by the device's own clock; 0 = it has none
    device_end: int
    after_rest: int  # 1: there had been nothing to do when this turn came
    gc_ns: int  # spent on collecting garbage meanwhile


class TurnRecord(NamedTuple):
    """Of the other processes: one turn in which something had arrived, in two parts.

                        begin .. middle                    middle .. end                items        open     waiting
    tokenizer_proc      tokenize what has arrived          pass it on                   tokens       -        messages
    detokenizer_proc    frames into text                   send deltas                  rows' steps  streams  deltas
    engine              messages handed to their streams   callers that this woke ran   -            streams  -

    waiting: what the next process in line had no room for.
    """

    number: int
    begin: int
    middle: int
    end: int
    messages: int
    items: int
    open: int
    waiting: int


class RingError(EngineError):
    """A file that should be a ring is none, or one of another version."""


Record = TypeVar("Record", StepRecord, TurnRecord)


class RingWriter(Generic[Record]):
    """The one writer of a ring; makes it, in the place of that of a process that was lost, if there is one: whoever
    reads that keeps it. Raises OSError where it cannot."""

    def __init__(self, run_dir: str | Path, role: str, index: int, kind: type[Record]) -> None:
        words = len(kind._fields)
        path = Path(run_dir) / f"{role}.{index}{SUFFIX}"
        size = HEADER.size + 8 * words * CAPACITY
        self._fd, self._memory = make_memory(path, size)
        HEADER.pack_into(self._memory, 0, MAGIC, VERSION, words, CAPACITY, os.getpid(), index, role.encode(), *[0] * 8)
        self._cells = memoryview(self._memory).cast("q")
        self._fields = struct.Struct(f"<{words - 1}q")
        self._words = words
        self._written = 0
        publish(self._fd, path)

    def write(self, fields: Sequence[int]) -> None:
        """Append a record: its fields in order, but for `number`."""
        cells = self._cells
        cell = _HEADER_WORDS + self._written % CAPACITY * self._words
        cells[cell] = 0
        self._fields.pack_into(self._memory, 8 * cell + 8, *fields)
        self._written = number = self._written + 1
        cells[cell] = number
        cells[_WRITTEN] = number

    def close(self) -> None:
        """Give the memory up. A ring that is not closed goes with its process."""
        self._cells.release()
        self._memory.close()
        os.close(self._fd)


class RingReader(Generic[Record]):
    """Reads a ring that may be written to meanwhile, or whose writer may be gone."""

    def __init__(self, path: Path, kind: type[Record]) -> None:
        """Raises `RingError`, and OSError where there is no such file (any more)."""
        self._kind: type[Record] = kind
        self._path = path
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            self._identity, size = (status.st_dev, status.st_ino), status.st_size
            if size < HEADER.size:
                raise RingError(f"{path} is too short for a ring")
            magic, version, words, capacity, self.pid, self.index, role, *_ = HEADER.unpack(file.read(HEADER.size))
            if (magic, version, words) != (MAGIC, VERSION, len(kind._fields)):
                raise RingError(f"{path} is no ring of {kind.__name__}s in version {VERSION}")
            if capacity < 1 or size != HEADER.size + 8 * words * capacity:
                raise RingError(f"{path} has {size} bytes, which is not what its header says")
            self._memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        self.role: str = role.rstrip(b"\0").decode("utf-8", "replace")
        self._cells = memoryview(self._memory).cast("q")
        self._words: int = words
        self._capacity: int = capacity
        self._end = kind._fields.index("end")

    @property
    def written(self) -> int:
        """Records written since the process began."""
        return self._cells[_WRITTEN]

    def superseded(self) -> bool:
        """Whether another ring is in the place of this one, whose process was lost. Costs two microseconds."""
        try:
            status = self._path.stat()
        except OSError:  # its process has ended, and has no successor yet
            return False
        return (status.st_dev, status.st_ino) != self._identity

    def ended_before(self, time_ns: int) -> int:
        """The number of the last record that ended before that time, of those still there; else of the one before."""
        written = self.written
        gone = max(0, written - self._capacity)
        there = range(gone + 1, written + 1)
        return gone + bisect_left(there, time_ns, key=lambda number: self._cells[self._cell(number) + self._end])

    def snapshot(self, after: int = 0, limit: int = CAPACITY) -> list[Record]:
        """The records with numbers above `after` that are still there, oldest first, at most `limit` of them, without
        those being overwritten now. A gap in the numbers is of records that were lost."""
        written = self.written
        first = max(after, written - self._capacity) + 1
        records = []
        for number in range(first, min(written, first + limit - 1) + 1):
            cell = self._cell(number)
            fields = self._cells[cell : cell + self._words].tolist()
            if fields[0] == number == self._cells[cell]:
                records.append(self._kind._make(fields))
        return records

    def _cell(self, number: int) -> int:
        return _HEADER_WORDS + (number - 1) % self._capacity * self._words

    def close(self) -> None:
        self._cells.release()
        self._memory.close()
