"""A grammar process as gpu_runner, its parent, sees it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncengine.config import GrammarConfig, GrammarJob
from asyncengine.wire.grammar_messages import GrammarReady, ToGrammar
from asyncengine.wire.pipes import Pipes, pipe_name
from asyncengine.wire.sidecar import write_config


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSetup:
    """What all grammar processes of a gpu_runner have in common; see `GrammarConfig`."""

    model_path: str
    run_dir: str
    eos_ids: tuple[int, ...]
    mask_fd: int
    num_slots: int
    mask_words: int
    life: int


class GrammarProcess:
    """One process, started at once. It may be sent messages before it is ready. It dies with this one."""

    def __init__(self, pipes: Pipes, setup: GrammarSetup, job: GrammarJob, incarnation: int) -> None:
        self.incarnation = incarnation
        self.ready = False
        self._pipes = pipes
        self._sender = pipes.sender(pipe_name(f"grammar.{self.incarnation}", setup.life))
        config = GrammarConfig(
            model_path=setup.model_path,
            run_dir=setup.run_dir,
            job=job,
            incarnation=self.incarnation,
            eos_ids=setup.eos_ids,
            mask_fd=setup.mask_fd,
            num_slots=setup.num_slots,
            mask_words=setup.mask_words,
            life=setup.life,
        )
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gpu_runner.grammar.child"],
            stdin=subprocess.PIPE,
            stdout=2,
            pass_fds=(setup.mask_fd,),
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
