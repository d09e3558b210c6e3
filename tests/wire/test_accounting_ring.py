"""The rings in shared memory: what is written is read, by anybody, whole or not at all."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncengine.wire.accounting import (
    CAPACITY,
    HEADER,
    RingError,
    RingReader,
    RingWriter,
    StepRecord,
    TurnRecord,
)

ROOT = Path(__file__).parents[2]
FIELDS = len(TurnRecord._fields) - 1


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RingWriter[TurnRecord]]:
    writer = RingWriter(tmp_path, "engine", 3, TurnRecord)
    yield writer
    writer.close()


def reader(tmp_path: Path, name: str = "engine.3") -> RingReader[TurnRecord]:
    return RingReader(tmp_path / f"{name}.ring", TurnRecord)


def record(number: int) -> TurnRecord:
    return TurnRecord(number, *range(number, number + FIELDS))


def test_records_come_back_as_they_were_written_with_their_numbers(
    writer: RingWriter[TurnRecord], tmp_path: Path
) -> None:
    ring = reader(tmp_path)
    assert (ring.role, ring.index, ring.pid, ring.written, ring.snapshot()) == ("engine", 3, os.getpid(), 0, [])
    writer.write((1, 2, 3, -4, 2**62, 6, 7))
    writer.write((8, 9, 10, 11, 12, 13, 14))
    assert ring.written == 2
    assert ring.snapshot() == [TurnRecord(1, 1, 2, 3, -4, 2**62, 6, 7), TurnRecord(2, *range(8, 15))]
    assert ring.snapshot(after=1) == [TurnRecord(2, *range(8, 15))]
    assert ring.snapshot(after=2) == []


def test_when_full_the_oldest_records_make_room(writer: RingWriter[TurnRecord], tmp_path: Path) -> None:
    for number in range(1, 2 * CAPACITY + 11):
        writer.write(record(number)[1:])
    newest = [record(number) for number in range(CAPACITY + 11, 2 * CAPACITY + 11)]
    assert reader(tmp_path).snapshot() == newest
    assert reader(tmp_path).snapshot(after=2 * CAPACITY + 8) == newest[-2:]
    assert reader(tmp_path).snapshot(after=5) == newest, "what was lost in between shows in the numbers"


def test_records_are_found_by_number_by_time_and_so_many_at_once(
    writer: RingWriter[TurnRecord], tmp_path: Path
) -> None:
    ring = reader(tmp_path)
    assert ring.ended_before(1) == 0
    for number in range(1, CAPACITY + 101):  # ends at number + 2
        writer.write(record(number)[1:])
    assert ring.snapshot(after=2000, limit=2) == [record(2001), record(2002)]
    assert ring.snapshot(limit=1) == [record(101)]
    assert ring.snapshot(after=CAPACITY + 99, limit=5) == [record(CAPACITY + 100)]
    assert (ring.ended_before(2002), ring.ended_before(2003)) == (1999, 2000)
    assert (ring.ended_before(0), ring.ended_before(2**62)) == (100, CAPACITY + 100)


def test_a_record_that_is_being_written_is_left_out(writer: RingWriter[TurnRecord], tmp_path: Path) -> None:
    for number in range(1, CAPACITY + 3):
        writer.write(record(number)[1:])
    with (tmp_path / "engine.3.ring").open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    cells = memoryview(memory).cast("q")
    cell = HEADER.size // 8 + 4 * len(TurnRecord._fields)
    assert cells[cell] == 5
    for being_written in (0, 5 + CAPACITY):
        cells[cell] = being_written
        assert [found.number for found in reader(tmp_path).snapshot()] == [3, 4, *range(6, CAPACITY + 3)]


def test_no_record_is_ever_read_in_part_while_another_process_writes(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("ring_writing_child.py"), tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"ready\n"
        ring = RingReader(tmp_path / "child.0.ring", TurnRecord)
        assert ring.pid == child.pid
        read, deadline = 0, time.monotonic() + 60
        while (ring.written < 4 * CAPACITY or read < 4 * CAPACITY) and time.monotonic() < deadline:
            records = ring.snapshot()
            read += len(records)
            assert all(found == (found.number,) * len(found) for found in records)
        assert read >= 4 * CAPACITY
        child.communicate(b"\n", timeout=60)
        assert ring.snapshot()[-1].number == ring.written, "a reader keeps what a process leaves behind"
    finally:
        child.kill()
        child.wait()
    with pytest.raises(FileNotFoundError):
        RingReader(tmp_path / "child.0.ring", TurnRecord)
    successor = RingWriter(tmp_path, "child", 0, TurnRecord)
    assert (reader(tmp_path, "child.0").pid, reader(tmp_path, "child.0").snapshot()) == (os.getpid(), [])
    assert (ring.pid, ring.snapshot()[-1].number) == (child.pid, ring.written), "the old one is read on"
    successor.close()


def test_a_reader_notices_the_ring_of_a_successor_and_keeps_what_the_lost_process_left(
    writer: RingWriter[TurnRecord], tmp_path: Path
) -> None:
    path = tmp_path / "engine.3.ring"
    reader = RingReader(path, TurnRecord)
    writer.write((1, 1, 1, 1, 1, 1, 1))
    assert not reader.superseded()
    successor = RingWriter(tmp_path, "engine", 3, TurnRecord)
    assert reader.superseded()
    successor.write((2, 2, 2, 2, 2, 2, 2))
    follower = RingReader(path, TurnRecord)
    assert not follower.superseded()
    assert [record.begin for record in follower.snapshot()] == [2]
    assert [record.begin for record in reader.snapshot()] == [1]
    assert [file.name for file in tmp_path.iterdir()] == ["engine.3.ring"]
    path.unlink()
    assert not reader.superseded()
    for ring in (reader, follower):
        ring.close()
    successor.close()


def test_a_file_that_is_no_ring_of_the_kind_is_refused(writer: RingWriter[TurnRecord], tmp_path: Path) -> None:
    with pytest.raises(RingError, match="no ring of StepRecords in version 1"):
        RingReader(tmp_path / "engine.3.ring", StepRecord)
    path = tmp_path / "other.ring"
    path.write_bytes(b"")
    with pytest.raises(RingError, match="too short"):
        RingReader(path, TurnRecord)
    path.write_bytes(bytes(200))
    with pytest.raises(RingError, match="no ring of TurnRecords"):
        RingReader(path, TurnRecord)
    path.write_bytes((tmp_path / "engine.3.ring").read_bytes()[:-8])
    with pytest.raises(RingError, match="bytes, which is not what its header says"):
        RingReader(path, TurnRecord)
