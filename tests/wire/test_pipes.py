"""Pipes keep order under back-pressure, survive any bytes, stay in their directory and always close."""

from __future__ import annotations

import os
import random
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from asyncengine.errors import InvalidRequestError
from asyncengine.sampling import SamplingParams
from asyncengine.wire import pipes as pipes_module
from asyncengine.wire.answers import Deltas
from asyncengine.wire.frames import StepFrame
from asyncengine.wire.pipes import Pipes, Poller, Receiver, make_run_dir
from asyncengine.wire.requests import Abort, Generate, StopHit, ToRunner, ToRunnerControl

WAIT_MS = 60_000
STEP_MS = 1


@pytest.fixture
def run_dir() -> Iterator[Path]:
    path = make_run_dir()
    yield path
    for leftover in path.iterdir():
        leftover.unlink()
    path.rmdir()


@pytest.fixture
def pipes(run_dir: Path) -> Iterator[Pipes]:
    made = Pipes(run_dir)
    yield made
    made.close()


def receive(receiver: Receiver, count: int, between: Callable[[], object] = lambda: None) -> list[object]:
    """Read until `count` messages are there, or nothing arrives for `WAIT_MS`; `between` runs before each wait."""
    found: list[object] = []
    silent_ms = 0
    while len(found) < count and silent_ms < WAIT_MS:
        between()
        if receiver.wait(STEP_MS):
            found += receiver.drain()
            silent_ms = 0
        else:
            silent_ms += STEP_MS
    return found


def test_messages_arrive_in_order_and_typed(pipes: Pipes) -> None:
    receiver = pipes.receiver("runner.control", ToRunnerControl)
    sender = pipes.sender("runner.control")
    sent = [Abort(2**64 - 1), StopHit(3, 9), Abort(5)]
    for message in sent:
        sender.send(message)
    assert receive(receiver, 3) == sent
    assert receiver.malformed == 0


def test_a_sender_may_connect_before_its_reader_is_there(pipes: Pipes) -> None:
    sender = pipes.sender("runner.control")
    sender.send(Abort(1))
    receiver = pipes.receiver("runner.control", ToRunnerControl)
    assert receive(receiver, 1) == [Abort(1)]


def test_drain_stops_at_its_limit_and_pending_says_that_more_is_there(pipes: Pipes) -> None:
    receiver = pipes.receiver("runner.control", ToRunnerControl)
    sender = pipes.sender("runner.control")
    for rid in range(5):
        sender.send(Abort(rid))
    found: list[Abort] = []
    while len(found) < 4:
        assert receiver.wait(WAIT_MS)
        found += receiver.drain(limit=1)
    assert receiver.wait(WAIT_MS)
    assert receiver.pending()
    assert [*found, *receiver.drain()] == [Abort(rid) for rid in range(5)]
    assert not receiver.pending()
    assert list(receiver.drain()) == []
    assert not receiver.wait(0)


def test_a_poller_wakes_for_any_of_its_receivers(pipes: Pipes) -> None:
    requests, control = pipes.receiver("runner.requests", ToRunner), pipes.receiver("runner.control", ToRunnerControl)
    poller = Poller(requests, control)
    assert not poller.wait(0)
    pipes.sender("runner.control").send(StopHit(1, 1))
    assert poller.wait(WAIT_MS)
    assert receive(control, 1) == [StopHit(1, 1)]
    assert not requests.pending()


def test_the_descriptor_becomes_readable_when_a_message_arrives(pipes: Pipes) -> None:
    receiver = pipes.receiver("runner.control", ToRunnerControl)
    assert os.fstat(receiver.fd)
    pipes.sender("runner.control").send(Abort(1))
    assert receive(receiver, 1) == [Abort(1)]


# ------------------------------------------------------------------------------------------------- back-pressure


def test_a_full_pipe_keeps_the_rest_in_order_and_loses_nothing(pipes: Pipes) -> None:
    receiver = pipes.receiver("detokenizer.0", StepFrame, high_water_mark=2)
    sender = pipes.sender("detokenizer.0", high_water_mark=2)
    column = bytes(8192)
    count = 500
    for step in range(count):
        sender.send(StepFrame(step, column, column, column, bytes(2048)))
    assert sender.backlog > 0
    received = receive(receiver, count, between=sender.flush)
    assert [frame.step for frame in received if isinstance(frame, StepFrame)] == list(range(count))
    assert sender.backlog == 0
    assert sender.flush()


def test_sending_amid_a_backlog_never_overtakes_it(pipes: Pipes) -> None:
    receiver = pipes.receiver("runner.control", ToRunnerControl, high_water_mark=8)
    sender = pipes.sender("runner.control", high_water_mark=8)
    rng = random.Random(0)
    found: list[object] = []
    for rid in range(600):
        sender.send(Abort(rid))
        if rng.random() < 0.05:
            found += receiver.drain(limit=rng.randint(1, 60))
    found += receive(receiver, 600 - len(found), between=sender.flush)
    assert found == [Abort(rid) for rid in range(600)]


def test_with_no_reader_the_pipe_takes_its_high_water_mark_and_the_backlog_the_rest(pipes: Pipes) -> None:
    sender = pipes.sender("runner.control", high_water_mark=10)
    for rid in range(25):
        sender.send(Abort(rid))
    assert sender.backlog == 15
    assert not sender.flush()
    assert sender.backlog == 15


def test_a_pipe_has_a_reader_while_a_process_holds_it(run_dir: Path, pipes: Pipes) -> None:
    assert not pipes.has_reader("runner.control")
    other = Pipes(run_dir)
    receiver = other.receiver("runner.control", ToRunnerControl)
    assert all(pipes.has_reader("runner.control") for _ in range(300))
    pipes.sender("runner.control").send(Abort(1))
    assert receive(receiver, 1) == [Abort(1)]
    other.close()
    assert not pipes.has_reader("runner.control")


def test_a_frozen_process_still_holds_its_pipe(run_dir: Path, pipes: Pipes) -> None:
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(run_dir / "runner.control"))
        frozen.listen(3)
        assert all(pipes.has_reader("runner.control") for _ in range(10))
    assert not pipes.has_reader("runner.control")


def test_try_send_refuses_when_the_pipe_is_full_and_keeps_nothing(pipes: Pipes) -> None:
    sender = pipes.sender("runner.control", high_water_mark=3)
    assert [sender.try_send(Abort(rid)) for rid in range(5)] == [True, True, True, False, False]
    assert sender.backlog == 0


# ------------------------------------------------------------------------------------------------ malformed frames

GENERATE = msgspec.msgpack.encode(Generate(1, bytes(4), SamplingParams(), 16, b"", ""))
HOSTILE = {
    "nothing": b"",
    "text": b"hello",
    "a pickle that would run a command": b"cposix\nsystem\n(S'true'\ntR.",
    "a protocol 4 pickle": b"\x80\x04\x95\x08\x00\x00\x00\x00\x00\x00\x00\x8c\x04text\x94.",
    "JSON": b"[4, 1]",
    "a message of another pipe": msgspec.msgpack.encode(StopHit(1, 1)),
    "an unknown tag": msgspec.msgpack.encode([999, 1]),
    "a map": msgspec.msgpack.encode({"rid": 1}),
    "too few fields": msgspec.msgpack.encode([10, 1]),
    "a field of the wrong type": msgspec.msgpack.encode([4, "1"]),
    "an integer that is out of range": b"\x92\x04\xc7\x09\x01" + b"\xff" * 9,
    "cut short": GENERATE[:-1],
    "trailing bytes": GENERATE + b"\x00",
    "an array that claims 4 billion items": b"\xdd\xff\xff\xff\xff",
    "bytes that claim 4 GB": b"\x96\x0a\x01\xc6\xff\xff\xff\xff",
    "nested 100,000 deep": b"\x91" * 100_000,
    "parameters that are not allowed": GENERATE.replace(
        msgspec.msgpack.encode(SamplingParams()), msgspec.msgpack.encode([0])
    ),
}


def test_hostile_frames_are_dropped_and_counted_and_the_next_message_still_arrives(pipes: Pipes) -> None:
    receiver = pipes.receiver("runner.requests", ToRunner)
    sender = pipes.sender("runner.requests")
    for frame in HOSTILE.values():
        sender.socket.send(frame)
    sender.send(Abort(77))
    assert receive(receiver, 1) == [Abort(77)]
    assert receiver.malformed == len(HOSTILE)


def test_random_and_truncated_frames_never_raise(pipes: Pipes) -> None:
    receiver = pipes.receiver("runner.requests", ToRunner, high_water_mark=0)
    sender = pipes.sender("runner.requests", high_water_mark=0)
    rng = random.Random(1)
    frames = [rng.randbytes(rng.randint(0, 64)) for _ in range(500)]
    frames += [GENERATE[:cut] for cut in range(len(GENERATE))]
    for _ in range(500):
        damaged = bytearray(GENERATE)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        frames.append(bytes(damaged))
    for frame in frames:
        sender.socket.send(frame)
    sender.send(Abort(77))
    received: list[object] = []
    while Abort(77) not in received[-1:]:
        assert receiver.wait(WAIT_MS)
        received += receiver.drain()
    assert receiver.malformed + len(received) == len(frames) + 1
    assert receiver.malformed >= 500 + len(GENERATE) - 5


def test_every_part_of_a_multipart_message_counts_as_a_frame(pipes: Pipes) -> None:
    receiver = pipes.receiver("runner.requests", ToRunner)
    sender = pipes.sender("runner.requests")
    sender.socket.send_multipart([b"one", b"two"])
    sender.send(Abort(1))
    assert receive(receiver, 1) == [Abort(1)]
    assert receiver.malformed == 2


def test_a_message_over_the_size_limit_is_refused_by_the_sender(pipes: Pipes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes_module, "MAX_MESSAGE_BYTES", 4096)
    receiver = pipes.receiver("runner.requests", ToRunner)
    sender = pipes.sender("runner.requests")
    too_long = Generate(2, bytes(4096), SamplingParams(), 16, b"", "")
    sender.send(Abort(1))
    with pytest.raises(InvalidRequestError, match=r"up to 4096 bytes, this one takes 4\d\d\d"):
        sender.send(too_long)
    with pytest.raises(InvalidRequestError):
        sender.try_send(too_long)
    sender.send(Abort(3))
    assert receive(receiver, 2) == [Abort(1), Abort(3)]


def test_a_frame_over_the_size_limit_is_refused_by_the_reader_too(
    run_dir: Path, pipes: Pipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipes_module, "MAX_MESSAGE_BYTES", 4096)
    receiver = pipes.receiver("runner.requests", ToRunner)
    stranger = pipes.sender("runner.requests")
    stranger.socket.send(msgspec.msgpack.encode(Generate(2, bytes(5000), SamplingParams(), 16, b"", "")))
    sender = pipes.sender("runner.requests")
    sender.send(Abort(3))
    assert receive(receiver, 1) == [Abort(3)]
    assert receiver.malformed == 0


# --------------------------------------------------------------------------------------- where sockets are, closing


def test_every_limit_is_set_on_every_socket(pipes: Pipes) -> None:
    for end in (pipes.receiver("engine.0", Deltas).socket, pipes.sender("engine.0").socket):
        assert end.getsockopt(zmq.SNDHWM) == end.getsockopt(zmq.RCVHWM) == pipes_module.HIGH_WATER_MARK
        assert end.getsockopt(zmq.LINGER) == 0
        assert end.getsockopt(zmq.SNDTIMEO) == pipes_module.SEND_TIMEOUT_MS
        assert end.getsockopt(zmq.MAXMSGSIZE) == pipes_module.MAX_MESSAGE_BYTES


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_the_run_directory_is_open_to_this_user_only_whatever_the_umask(umask: int) -> None:
    previous = os.umask(umask)
    try:
        path = make_run_dir()
    finally:
        os.umask(previous)
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert path.stat().st_uid == os.getuid()
    finally:
        path.rmdir()


def test_every_engine_gets_a_directory_of_its_own() -> None:
    one, other = make_run_dir(), make_run_dir()
    assert one != other
    one.rmdir()
    other.rmdir()


def test_a_temporary_directory_with_too_long_a_name_is_refused_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(OSError, match="set TMPDIR"):
        make_run_dir()
    assert list(deep.iterdir()) == []


def test_sockets_are_made_inside_the_run_directory_only(run_dir: Path, pipes: Pipes) -> None:
    names = ["runner.requests", "runner.control", "tokenizer.0", "engine.3"]
    for name in names:
        socket = pipes.receiver(name, ToRunner).socket
        assert socket.getsockopt(zmq.LAST_ENDPOINT) == f"ipc://{run_dir / name}".encode()
    assert sorted(path.name for path in run_dir.iterdir()) == sorted(names)
    assert all(stat.S_ISSOCK(path.stat().st_mode) for path in run_dir.iterdir())


@pytest.mark.parametrize("linger_ms", [0, 50])
def test_close_never_hangs_on_a_peer_that_is_not_there(run_dir: Path, linger_ms: int) -> None:
    pipes = Pipes(run_dir)
    sender = pipes.sender("supervisor")
    pipes.receiver("runner.control", ToRunnerControl)
    for rid in range(2000):
        sender.send(Abort(rid))
    closing = threading.Thread(target=pipes.close, kwargs={"linger_ms": linger_ms}, daemon=True)
    closing.start()
    closing.join(timeout=60)
    assert not closing.is_alive()


def test_close_with_linger_lets_the_last_message_leave(run_dir: Path, pipes: Pipes) -> None:
    receiver = pipes.receiver("supervisor", Abort)
    leaving = Pipes(run_dir)
    leaving.sender("supervisor").send(Abort(9))
    leaving.close(linger_ms=WAIT_MS)
    assert receive(receiver, 1) == [Abort(9)]


def test_close_may_be_called_twice(run_dir: Path) -> None:
    pipes = Pipes(run_dir)
    pipes.sender("supervisor")
    pipes.close()
    pipes.close()


NEVER_CLOSED = """
import gc, os, sys, threading, time
from asyncengine.wire.pipes import Pipes
from asyncengine.wire.requests import Abort, ToRunnerControl

gc.disable()
run_dir = sys.argv[1]

class Ring:
    def __init__(self, held):
        self.held, self.ring = held, self

def failed():
    try:
        pipes = made()
        raise OSError
    except OSError as error:
        caught = error  # its traceback leads to this frame, which holds it

def made():
    pipes = Pipes(run_dir)
    pipes.receiver("held", ToRunnerControl)
    pipes.sender("nobody").send(Abort(1))
    return pipes

def wait(receiver):
    receiver.wait(-1)

for lose in (made, lambda: Ring(made()), failed, lambda: Ring(Pipes(run_dir).sender("nobody"))):
    lose()
    gc.collect()
    while len(os.listdir("/proc/self/task")) > 1:  # those of its context end
        time.sleep(0.001)

half = made()
sender, receiver = half.sender("self"), half.receiver("self", ToRunnerControl)
half = Ring(half)
del half
gc.collect()
sender.send(Abort(7))
assert receiver.wait(60_000) and [*receiver.drain()] == [Abort(7)]
print("all collected", flush=True)

at_the_end = made()
Ring(made())
threading.Thread(target=wait, args=(made().receiver("waits", ToRunnerControl),), daemon=True).start()
"""


def test_pipes_that_are_never_closed_hold_up_neither_the_garbage_collector_nor_the_end_of_a_program(
    run_dir: Path,
) -> None:
    command = [sys.executable, "-c", NEVER_CLOSED, str(run_dir)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "all collected\n", "")
