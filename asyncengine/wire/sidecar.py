"""What every sidecar process does before and around its work: life-line, configuration, reports.

The life-line is two mechanisms, armed before anything slow: the kernel kills the child when its parent dies
(PR_SET_PDEATHSIG), and a thread exits the process when its stdin, a pipe whose other end only the parent holds, closes.
The first lines of that pipe carry the configuration (4-byte little-endian length, msgpack `SidecarConfig`).

A process that is lost after asyncengine was upgraded in place is followed by one of the new version. That one must not
speak to those that are left, so it compares versions before anything else, and refuses to start. For this each version
has to read a little of the other: that length, what `Origin` has of the configuration, and `Fatal` in the pipe
`supervisor`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from asyncengine import __version__
from asyncengine.config import Role, SidecarConfig
from asyncengine.errors import StartupError
from asyncengine.wire.faults import fault_place, fault_text
from asyncengine.wire.pipes import Pipes
from asyncengine.wire.reports import Fatal, Heartbeat, Progress, Ready

PR_SET_PDEATHSIG = 1
HEARTBEAT_SECONDS = 0.25
CPU_LIMIT_SIGNAL = signal.SIGPROF
"""With this the kernel ends a process that has set itself a limit of processor time."""
PARENT_GONE_EXIT_CODE = 3

Config = TypeVar("Config", bound=msgspec.Struct)


class Origin(msgspec.Struct, frozen=True):
    """What a process reads first of its configuration, whichever version wrote it: these fields never change."""

    run_dir: str
    index: int = 0
    life: int = 0
    version: str = "an earlier version"


class Reporter:
    """A sidecar's line to the supervisor. Progress and heartbeats are dropped when the pipe is full; nothing blocks."""

    def __init__(self, pipes: Pipes, role: Role, index: int, life: int) -> None:
        self._sender = pipes.sender("supervisor")
        self._role, self._index, self._life = role, index, life
        self._last_heartbeat = 0.0

    def progress(self, phase: str, done: int = 0, total: int = 0) -> None:
        self._sender.try_send(Progress(self._role, self._index, phase, done, total, self._life))

    def ready(self, info: msgspec.Struct | None = None) -> None:
        """Announce that work sent from now on is served; `info` is the role's `*Info` Struct."""
        facts: dict[str, Any] = {} if info is None else msgspec.structs.asdict(info)
        self._sender.send(Ready(self._role, self._index, facts, self._life))

    def heartbeat_due(self) -> bool:
        """True at most every `HEARTBEAT_SECONDS`; ask before collecting gauges."""
        return time.monotonic() - self._last_heartbeat >= HEARTBEAT_SECONDS

    def heartbeat(self, gauges: dict[str, int]) -> None:
        self._last_heartbeat = time.monotonic()
        self._sender.try_send(Heartbeat(self._role, self._index, gauges, self._life))

    def fatal(self, message: str) -> None:
        self._sender.send(Fatal(self._role, self._index, message, self._life))


def run_sidecar(role: Role, serve: Callable[[SidecarConfig, Pipes, Reporter], None]) -> None:
    """Entry point of a sidecar: arm the life-line, read the configuration, call `serve`, report how it ended.

    SIGUSR1 has it write to stderr where each of its threads is, whatever it is busy with.

    `serve` loops until SIGTERM, which arrives as SystemExit. Exits 1 when `serve` raises, after sending `Fatal`.
    """
    arm_life_line()
    data = _read_config()
    origin = msgspec.msgpack.decode(data, type=Origin)
    watch_parent()
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches the whole group; the supervisor decides
    pipes = Pipes(origin.run_dir)
    reporter = Reporter(pipes, role, origin.index, origin.life)
    try:
        config = _decode_config(data, SidecarConfig, role)
        if config.role != role:
            raise StartupError(f"{role} was given the configuration of {config.role}")
        serve(config, pipes, reporter)
    except StartupError as error:
        reporter.fatal(error.message)
        pipes.close(linger_ms=1000)
        sys.exit(1)
    except Exception as error:  # noqa: BLE001 - the last stop of this process: report, then die
        if role == "gpu_runner":  # has no texts, and those of a device's errors say what to do
            traceback.print_exc()
            reporter.fatal(f"{type(error).__name__}: {error}")
        else:
            print(fault_text(error), file=sys.stderr)
            reporter.fatal(fault_place(error))
        pipes.close(linger_ms=1000)
        sys.exit(1)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # on its way out, and no exception may break that off
        pipes.close()


def _stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def arm_life_line() -> None:
    """Have the kernel SIGKILL this process when its parent dies. Had it died before this line, stdin's end tells."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def write_config(stream: Any, config: msgspec.Struct) -> None:
    """Parent's side of `read_config`; the stream must stay open for as long as the child shall live."""
    stream.write(config_bytes(config))


def config_bytes(config: msgspec.Struct) -> bytes:
    """What `read_config` reads."""
    data = msgspec.msgpack.encode(config)
    return len(data).to_bytes(4, "little") + data


def read_config(kind: type[Config], name: str) -> Config:
    """The configuration that the parent wrote to this process's stdin. Raises `StartupError`, with this process's
    `name`, if the parent is of another version."""
    return _decode_config(_read_config(), kind, name)


def watch_parent() -> None:
    """From now on, exit when the parent closes this process's stdin. The configuration must have been read."""
    threading.Thread(target=_exit_with_parent, name="life-line", daemon=True).start()


def _read_config() -> bytes:
    return _read_exactly(int.from_bytes(_read_exactly(4), "little"))


def _decode_config(data: bytes, kind: type[Config], name: str) -> Config:
    version = msgspec.msgpack.decode(data, type=Origin).version
    if version != __version__:
        raise StartupError(
            f"{name} is of asyncengine {__version__}, but was started by {version}: what was running when asyncengine "
            "was upgraded must be started again"
        )
    return msgspec.msgpack.decode(data, type=kind)


def _read_exactly(count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = os.read(sys.stdin.fileno(), count - len(data))
        if not part:
            os._exit(PARENT_GONE_EXIT_CODE)
        data += part
    return data


def _exit_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(PARENT_GONE_EXIT_CODE)
