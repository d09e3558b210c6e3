"""A grammar process as gpu_runner, its parent, sees it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from asyncengine.config import GrammarConfig
from asyncengine.wire.grammar_messages import GrammarReady, ToGrammar
from asyncengine.wire.pipes import Pipes, pipe_name
from asyncengine.wire.sidecar import write_config

START_SECONDS = 60.0
"""What it may take until it is ready."""


class GrammarProcess:
    """One process, started at once. It may be sent messages before it is ready. It dies with this one."""

    def __init__(self, pipes: Pipes, config: GrammarConfig) -> None:
        self.incarnation = config.incarnation
        self.ready = False
        self._pipes = pipes
        self._sender = pipes.sender(pipe_name(f"grammar.{self.incarnation}", config.life))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gpu_runner.grammar.child"],
            stdin=subprocess.PIPE,
            stdout=2,
            pass_fds=(config.mask_fd,),
        )
        assert self._process.stdin is not None
        write_config(self._process.stdin, config)  # fits into the pipe, so that nobody waits
        self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def cpu_seconds(self) -> float:
        """CPU time that it has taken; 0 once it is gone."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, message: ToGrammar) -> None:
        self._sender.send(message)

    def flush(self) -> None:
        self._sender.flush()

    def hear(self, message: msgspec.Struct) -> bool:
        """Whether a message is of this process, not of one that was killed."""
        if getattr(message, "incarnation", -1) != self.incarnation:
            return False
        if isinstance(message, GrammarReady):
            self.ready = True
        return True

    def kill(self) -> None:
        """End it and everything that was sent to it."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._pipes.drop(self._sender)
