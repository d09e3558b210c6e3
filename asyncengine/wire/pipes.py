"""The only place where ZeroMQ sockets are made: one-way `ipc://` pipes with every limit set.

The receiver binds, senders connect, so a pipe is named after who reads it. Pipe names within a run directory:

    tokenizer.{i}   engine -> tokenizer worker i          runner.requests   tokenizers -> gpu_runner
    runner.control  engine, detokenizers -> gpu_runner    detokenizer.{j}   gpu_runner -> detokenizer worker j
    engine.{w}      everyone -> API worker w              supervisor        every sidecar -> supervisor
    grammar.{k}     gpu_runner -> its k-th grammar process    runner.grammar   grammar processes -> gpu_runner

The pipes into a process that took the place of a lost one have names of their own (`pipe_name`): what was sent to the
lost one is lost with it, all of it, and nothing of that is found by its successor.
"""

from __future__ import annotations

import os
import socket as kernel_socket
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from asyncengine.errors import InvalidRequestError
from asyncengine.wire.checks import check

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
HIGH_WATER_MARK = 1024
SEND_TIMEOUT_MS = 1000
RUN_DIR_PREFIX = "asyncengine-"


def make_run_dir() -> Path:
    """A fresh directory that only this user can enter (mode 0700 whatever the umask), for the engine's sockets."""
    path = Path(tempfile.mkdtemp(prefix=RUN_DIR_PREFIX))
    path.chmod(0o700)
    # ipc socket paths are limited to 107 bytes by the kernel (sockaddr_un)
    if len(os.fsencode(path)) > 80:
        path.rmdir()
        raise OSError(f"the temporary directory {path.parent} has too long a name for sockets; set TMPDIR")
    return path


def pipe_name(name: str, life: int) -> str:
    """Pipe `name` of a process that is number `life` in its place; the first is number 0."""
    return f"{name}.{life}" if life else name


class _Context(zmq.Context["zmq.Socket[bytes]"]):
    """Never waits for its own sockets when nobody refers to it any longer.

    zmq's looks for those that are open by way of weak references. The garbage collector clears these before it has
    anything finalized that it found in a cycle (of an exception and the frames it went through, say), contexts ahead of
    their sockets: such a context would end only once all its sockets are closed, and hold up the thread that would
    close them next. Hence the strong references here. They also keep the context and all its sockets for as long as one
    of them is in use.
    """

    made: list[zmq.Socket[bytes]]

    def __init__(self) -> None:
        self.made = []
        super().__init__(io_threads=1)

    def __del__(self) -> None:
        for socket in self.made:
            socket.close(linger=0)
        super().__del__()


class Pipes:
    """Makes the pipes of one process; `close()` drops whatever is unsent and never blocks. Of one that is never closed
    and that nobody refers to any longer, nor to any end of its pipes, the garbage collector does the same."""

    def __init__(self, run_dir: str | Path) -> None:
        self._run_dir = Path(run_dir)
        self._context = _Context()

    def receiver(
        self,
        name: str,
        types: Any,
        *,
        high_water_mark: int = HIGH_WATER_MARK,
        on_malformed: Callable[[bytes], None] = lambda frame: None,
    ) -> Receiver:
        """Bind pipe `name` for reading messages of `types` (a union of tagged Structs); others are `on_malformed`'s."""
        socket = self._socket(zmq.PULL, high_water_mark)
        socket.bind(self._address(name))
        return Receiver(socket, types, on_malformed)

    def sender(self, name: str, *, high_water_mark: int = HIGH_WATER_MARK) -> Sender:
        """Connect to pipe `name` for writing; its reader may come up later."""
        socket = self._socket(zmq.PUSH, high_water_mark)
        socket.connect(self._address(name))
        return Sender(socket)

    def has_reader(self, name: str) -> bool:
        """Whether a living process holds pipe `name` for reading, be it frozen or busy. Asks the kernel, and makes the
        reader's own threads take note of a connection that ends at once: not for every turn of a loop."""
        with kernel_socket.socket(kernel_socket.AF_UNIX, kernel_socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(self._run_dir / name))
            except BlockingIOError:  # it has not yet taken note of others
                return True
            except (ConnectionRefusedError, FileNotFoundError):  # its process is gone, or has not begun
                return False
        return True

    def drop(self, sender: Sender) -> None:
        """Close one pipe's writing end, whose reader is gone for good, and all that waits in it."""
        sender.socket.close(linger=0)
        self._context.made.remove(sender.socket)

    def close(self, *, linger_ms: int = 0) -> None:
        """Close all sockets; `linger_ms` gives last messages (a final report) that long to leave."""
        self._context.destroy(linger=linger_ms)
        self._context.made.clear()

    def _address(self, name: str) -> str:
        return f"ipc://{self._run_dir / name}"

    def _socket(self, kind: int, high_water_mark: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        self._context.made.append(socket)
        socket.setsockopt(zmq.SNDHWM, high_water_mark)
        socket.setsockopt(zmq.RCVHWM, high_water_mark)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        return socket


class Sender:
    """Writing end of a pipe. Never blocks: what the pipe does not take waits, in order, in a local backlog."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self._encoder = msgspec.msgpack.Encoder()
        self._backlog: deque[bytes] = deque()

    @property
    def backlog(self) -> int:
        """Messages waiting locally. The owner bounds it by not producing more while it is high."""
        return len(self._backlog)

    def send(self, message: msgspec.Struct) -> None:
        """Send or keep; order is kept. Raises `InvalidRequestError` for a message over `MAX_MESSAGE_BYTES`."""
        data = self._encode(message)
        if (self._backlog and not self.flush()) or not self._offer(data):
            self._backlog.append(data)

    def try_send(self, message: msgspec.Struct) -> bool:
        """Send now or not at all; False when the pipe is full."""
        return self.flush() and self._offer(self._encode(message))

    def writable(self) -> bool:
        """Whether the pipe would take a message now; for owners that build one only then."""
        return bool(self.socket.poll(0, zmq.POLLOUT))

    def flush(self) -> bool:
        """Move the backlog into the pipe; True when none is left."""
        while self._backlog:
            if not self._offer(self._backlog[0]):
                return False
            self._backlog.popleft()
        return True

    def _encode(self, message: msgspec.Struct) -> bytes:
        data = self._encoder.encode(message)
        # The reader would drop the connection and lose the messages behind this one. Only a prompt can be so long.
        if len(data) > MAX_MESSAGE_BYTES:
            raise InvalidRequestError(f"a request may take up to {MAX_MESSAGE_BYTES} bytes, this one takes {len(data)}")
        return data

    def _offer(self, data: bytes) -> bool:
        try:
            self.socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


class Receiver:
    """Reading end of a pipe. A frame that is not one of the pipe's types, or that contradicts itself, is dropped and
    counted, never raised."""

    def __init__(self, socket: zmq.Socket[bytes], types: Any, on_malformed: Callable[[bytes], None]) -> None:
        self.socket = socket
        self.malformed = 0
        self._on_malformed = on_malformed
        self._decoder = msgspec.msgpack.Decoder(types)

    def drain(self, limit: int = 4096) -> Iterator[Any]:
        """Yield the messages that have arrived, without waiting, at most `limit`."""
        for _ in range(limit):
            try:
                data = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decoder.decode(data)
                check(message)
            except Exception:  # noqa: BLE001 - any failure to decode or check it is the frame's fault
                self.malformed += 1
                self._on_malformed(data)
                continue
            yield message

    def wait(self, timeout_ms: int) -> bool:
        """Sleep until something has arrived or the time is over; True if something has."""
        return bool(self.socket.poll(timeout_ms, zmq.POLLIN))

    @property
    def fd(self) -> int:
        """A descriptor for an event loop. It is edge-triggered: when it fires, drain until nothing is left, and check
        `pending()` after every drain that stopped at its limit."""
        return int(self.socket.getsockopt(zmq.FD))

    def pending(self) -> bool:
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


class Poller:
    """Waits on several receivers (and, to write, senders) at once."""

    def __init__(self, *receivers: Receiver) -> None:
        self._poller = zmq.Poller()
        for receiver in receivers:
            self._poller.register(receiver.socket, zmq.POLLIN)

    def wait(self, timeout_ms: int) -> bool:
        return bool(self._poller.poll(timeout_ms))
