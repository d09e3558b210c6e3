"""One sidecar as its parent sees it: a process, its environment, and the pipe that is its life-line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncengine.api_keys import API_KEY_VARIABLE
from asyncengine.config import EngineConfig, Role, SidecarConfig, runs_on_cpu
from asyncengine.errors import StartupError
from asyncengine.wire.reports import Ready
from asyncengine.wire.sidecar import CPU_LIMIT_SIGNAL, config_bytes

ENVIRONMENT_NAMES = frozenset(
    {
        "PATH",
        "HOME",
        "USER",
        "LANG",
        "TZ",
        "TMPDIR",
        "VIRTUAL_ENV",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "OMP_NUM_THREADS",
        "OMP_WAIT_POLICY",
    }
)
OPENTELEMETRY_PREFIX = "OTEL_"
"""For the processes that serve HTTP only: the collector's keys are among these variables."""
ENVIRONMENT_PREFIXES = ("LC_", "PYTHON", "CUDA_", "NVIDIA_", "NCCL_", "TORCH", "PYTORCH_", "TRITON_", "ASYNCENGINE_")
FULL_PIPE_SECONDS = 0.01
"""After how long a pipe that was full is tried again."""


@dataclass(eq=False)
class Child:
    """One sidecar process. `life`: how many were lost in its place before it; `heard`: when its last message was read;
    `phase`: what its start-up is busy with; `info`, `gauges`: of its `Ready` and latest `Heartbeat`, until then those
    of the one before it; `last_words`: of its `Fatal`; `hung`: why it was killed, if it was."""

    role: Role
    index: int
    count: int
    life: int
    process: subprocess.Popen[bytes]
    pidfd: int
    started: float
    heard: float
    phase_started: float
    phase: str = "start process"
    ready: Ready | None = None
    info: dict[str, Any] = field(default_factory=dict)
    gauges: dict[str, int] = field(default_factory=dict)
    last_words: str | None = None
    hung: str | None = None
    exited: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return self.role if self.count == 1 else f"{self.role} {self.index}"

    async def configure(self, config: SidecarConfig) -> None:
        """Hand over the configuration; one that the pipe does not take at once, as the child reads. If the child is
        gone, `wait` tells."""
        assert self.process.stdin is not None
        pipe, rest = self.process.stdin.fileno(), memoryview(config_bytes(config))
        # by no thread: none can be had once the program's main one has ended, and others may use the engine still
        os.set_blocking(pipe, False)
        with contextlib.suppress(BrokenPipeError):
            while rest:
                try:
                    rest = rest[os.write(pipe, rest) :]
                except BlockingIOError:
                    await asyncio.sleep(FULL_PIPE_SECONDS)

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def wait(self) -> int:
        """Wait, once, for the child's end; returns its code, which is negative for a signal."""
        await wait_for_exit(self.pidfd, self.exited)
        return self.process.wait()

    def release(self) -> None:
        """Close the life-line of a child that has ended."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


def start_child(
    config: EngineConfig,
    role: Role,
    index: int,
    count: int,
    *,
    module: str,
    inherit: Sequence[int] = (),
    life: int = 0,
) -> Child:
    """Start `python -m module` as worker `index` of `count` of a role. Its death signal is tied to this thread.

    inherit: file descriptors that it has under the same numbers.
    """
    # -P: a file in the current directory must not shadow the standard library or a sidecar's package.
    # A new session keeps a terminal's Ctrl-C from reaching the children before this process decides.
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=2,
            env=sidecar_environment(os.environ, config, role),
            start_new_session=True,
            pass_fds=inherit,
        )
    except OSError as error:
        raise StartupError(f"cannot start {role}: {error}") from error
    now = time.monotonic()
    return Child(role, index, count, life, process, os.pidfd_open(process.pid), now, now, now)


async def wait_for_exit(pidfd: int, exited: asyncio.Event) -> None:
    """Wait for the end of a process, which sets `exited`; closes the descriptor."""
    loop = asyncio.get_running_loop()
    loop.add_reader(pidfd, exited.set)
    try:
        await exited.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


async def stop_children(children: Sequence[Child], seconds: float) -> None:
    """Ask all to end, and kill those that are there still after `seconds`."""
    for child in children:
        child.signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(asyncio.gather(*(child.exited.wait() for child in children)), seconds)
    except TimeoutError:
        for child in children:
            child.signal(signal.SIGKILL)


def sidecar_environment(environ: Mapping[str, str], config: EngineConfig, role: Role) -> dict[str, str]:
    """A sidecar's environment: an allow-list of this process's and how many threads to use. No tokens, no keys, but for
    those of an OpenTelemetry collector where its spans are made."""
    env = {k: v for k, v in environ.items() if k in ENVIRONMENT_NAMES or k.startswith(ENVIRONMENT_PREFIXES)}
    env.pop(API_KEY_VARIABLE, None)
    cores = len(os.sched_getaffinity(0))
    if role == "gpu_runner":
        env.setdefault("OMP_NUM_THREADS", str(cores if runs_on_cpu(config) else 1))
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads of torch starve the sidecars beside it
        return env
    env["OMP_NUM_THREADS"] = "1"
    if role == "api_worker":
        env |= {name: value for name, value in environ.items() if name.startswith(OPENTELEMETRY_PREFIX)}
    threads = max(1, cores // (2 * config.tokenizer_workers)) if role == "tokenizer_proc" else 1
    env["RAYON_NUM_THREADS"] = str(threads)
    env["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    return env


def describe_exit(code: int) -> str:
    """How a process with this `returncode` ended, to follow its name."""
    if code >= 0:
        return f"exited with code {code}"
    if -code == CPU_LIMIT_SIGNAL:
        return "took too long over what it was sent, and was ended"
    return f"was killed by {signal.Signals(-code).name}"
