"""Starts, watches and stops the sidecar processes, and tells the engine when one of them is lost.

    starting   spawn all -> hand each its configuration -> Progress... -> Ready from every one
    serving    Heartbeats; a child's end or Fatal -> on_failure(sentence), once
    closing    API workers end by themselves, having been told; SIGTERM to all, up to STOP_SECONDS, SIGKILL; sockets
               closed; run directory removed

A child dies with its parent because its death signal is tied to the thread that forked it (the event loop's) and
because only this process holds the other end of its stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from asyncengine.child import Child, describe_exit, start_child
from asyncengine.config import EngineConfig, Role, SidecarConfig, ToolCallFormat
from asyncengine.engine_info import EngineInfo
from asyncengine.errors import StartupError
from asyncengine.model_files import ResolvedModel, resolve_model
from asyncengine.run_dir import RunDir
from asyncengine.wire.messages import Fatal, Heartbeat, Progress, Ready, RunnerInfo, TokenizerInfo, ToSupervisor
from asyncengine.wire.pipes import Pipes, Receiver

STOP_SECONDS = 5.0
FATAL_GRACE_SECONDS = 0.3
"""How long after a child's exit its last words may still be on their way."""
STALL_SECONDS = 4.0
CPU_STEP_STALL_SECONDS = 60.0
"""gpu_runner on a CPU computes a whole step between two heartbeats."""
DRAIN_LIMIT = 256


class StartupProgress(Protocol):
    """Hears how start-up goes; called in the event loop."""

    def update(self, role: str, index: int, phase: str, done: int, total: int) -> None:
        """`phase` of a sidecar is at `done` of `total` units (bytes while weights load; 0 = no measure)."""

    def phase_done(self, role: str, index: int, phase: str, seconds: float) -> None:
        """A phase of a sidecar has ended after `seconds`."""

    def ready(self, role: str, index: int, seconds: float) -> None:
        """A sidecar serves, `seconds` after its process began."""


def tool_call_format(config: EngineConfig, tokenizer: TokenizerInfo) -> ToolCallFormat | None:
    """How the model writes tool calls, by the configuration or by its chat template."""
    match config.tool_call_parser:
        case "auto":
            return tokenizer.tool_call_format
        case "none":
            return None
    return config.tool_call_parser


def reasoning(config: EngineConfig, tokenizer: TokenizerInfo) -> bool:
    """Whether the model's answers may begin with reasoning, likewise."""
    return tokenizer.reasoning if config.reasoning_parser == "auto" else config.reasoning_parser == "think"


class Supervisor:
    """Owner of the sidecars, the run directory and this process's pipes. Lives in one event loop.

    `modules` names the module run for a role where it is not the role's own package. `on_failure` is called once, with
    a sentence, when a process is lost after start-up. `api_workers` processes serve HTTP on the listening sockets
    `listen_fds`, the console too if asked for, to callers with a key of `key_digests`; none where this process does
    that itself.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_failure: Callable[[str], None],
        progress: StartupProgress | None = None,
        modules: Mapping[Role, str] | None = None,
        api_workers: int = 0,
        listen_fds: tuple[int, ...] = (),
        console: bool = True,
        key_digests: tuple[bytes, ...] = (),
    ) -> None:
        self._config = config
        self._api_workers = api_workers
        self._listen_fds = listen_fds
        self._console = console
        self._key_digests = key_digests
        self._on_failure = on_failure
        self._progress = progress
        self._modules: dict[Role, str] = {"api_worker": "asyncengine.api.worker", **(modules or {})}
        self._children: dict[tuple[str, int], Child] = {}
        self._run_dir: RunDir | None = None
        self._pipes: Pipes | None = None
        self._receiver: Receiver | None = None
        self._fd = -1
        self._watchers: list[asyncio.Task[None]] = []
        self._outcome: asyncio.Future[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._failed = False

    @property
    def pipes(self) -> Pipes:
        """The engine's pipes, from `prepare` until `close`."""
        assert self._pipes is not None
        return self._pipes

    @property
    def run_dir(self) -> Path:
        """Where the pipes and the processes' rings of accounts are, from `prepare` until `close`."""
        assert self._run_dir is not None
        return self._run_dir.path

    async def prepare(self) -> ResolvedModel:
        """Find the model and open the run directory; raises `StartupError`. `close` undoes it."""
        started = time.monotonic()
        model = await asyncio.to_thread(resolve_model, self._config.model)
        if self._progress:
            self._progress.phase_done("engine", 0, "find model", time.monotonic() - started)
        self._check_open()
        try:
            self._run_dir = RunDir()
        except OSError as error:
            raise StartupError(f"cannot make a directory for the engine's sockets: {error}") from error
        self._pipes = Pipes(self._run_dir.path)
        self._receiver = self._pipes.receiver("supervisor", ToSupervisor)
        self._fd = self._receiver.fd
        asyncio.get_running_loop().add_reader(self._fd, self._read)
        return model

    async def launch(self, model: ResolvedModel) -> None:
        """Start every sidecar and wait until all are ready; raises `StartupError`. `close` undoes it."""
        self._check_open()
        self._outcome = asyncio.get_running_loop().create_future()
        counts: dict[Role, int] = {
            "gpu_runner": 1,
            "tokenizer_proc": self._config.tokenizer_workers,
            "detokenizer_proc": self._config.detokenizer_workers,
            "api_worker": self._api_workers,
        }
        for role, count in counts.items():
            for index in range(count):
                self._spawn(role, index, count)
        await asyncio.gather(
            *(
                asyncio.to_thread(child.configure, self._sidecar_config(child, model))
                for child in self._children.values()
            )
        )
        await self._outcome

    def engine_info(self, model: ResolvedModel) -> EngineInfo:
        """What the launched sidecars said about themselves."""
        runner = msgspec.convert(self.ready_info("gpu_runner"), RunnerInfo)
        tokenizer = msgspec.convert(self.ready_info("tokenizer_proc"), TokenizerInfo)
        return EngineInfo(
            model=self._config.served_model_name or model.served_name,
            model_path=str(model.path),
            scheduling_policy=self._config.scheduling_policy,
            queue_timeout_seconds=self._config.queue_timeout_seconds,
            request_timeout_seconds=self._config.request_timeout_seconds,
            has_chat_template=tokenizer.has_chat_template,
            tool_call_format=tool_call_format(self._config, tokenizer),
            reasoning=reasoning(self._config, tokenizer),
            tag_tokens=tokenizer.tag_tokens,
            **msgspec.structs.asdict(runner),
        )

    def pids(self) -> dict[str, int]:
        """Process ids by name (the role, with the worker's index where there are several)."""
        return {child.name: child.process.pid for child in self._children.values()}

    def ready_info(self, role: Role, index: int = 0) -> dict[str, object]:
        """What a started sidecar said about itself."""
        ready = self._children[role, index].ready
        assert ready is not None
        return ready.info

    def gauges(self, role: Role, index: int = 0) -> dict[str, int]:
        """The gauges of a sidecar's latest heartbeat; empty before the first."""
        child = self._children.get((role, index))
        return dict(child.gauges) if child else {}

    def stalled(self, *, runner_on_cpu: bool) -> list[str]:
        """Names of the processes that have not been heard of for too long."""
        self._read()
        now = time.monotonic()
        return [
            child.name
            for child in self._children.values()
            if now - child.heard
            > (CPU_STEP_STALL_SECONDS if runner_on_cpu and child.role == "gpu_runner" else STALL_SECONDS)
        ]

    async def close(self) -> None:
        """Stop the sidecars and remove every trace. Idempotent; goes on to the end though its caller be cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        cancelled = False
        while not self._closing.done():
            try:
                await asyncio.shield(self._closing)
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError

    @property
    def _launched(self) -> bool:
        outcome = self._outcome
        return outcome is not None and outcome.done() and not outcome.cancelled() and outcome.exception() is None

    def _check_open(self) -> None:
        if self._closing is not None:
            raise StartupError("the engine was closed while it started")

    def _spawn(self, role: Role, index: int, count: int) -> None:
        inherit = self._listen_fds if role == "api_worker" else ()
        child = start_child(self._config, role, index, count, module=self._modules.get(role, role), inherit=inherit)
        self._children[role, index] = child
        self._watchers.append(asyncio.create_task(self._watch(child)))

    def _sidecar_config(self, child: Child, model: ResolvedModel) -> SidecarConfig:
        assert self._run_dir is not None
        return SidecarConfig(
            engine=self._config,
            role=child.role,
            index=child.index,
            model_path=str(model.path),
            run_dir=str(self._run_dir.path),
            listen_fds=self._listen_fds if child.role == "api_worker" else (),
            api_workers=self._api_workers,
            console=self._console,
            key_digests=self._key_digests if child.role == "api_worker" else (),
        )

    async def _watch(self, child: Child) -> None:
        code = await child.wait()
        deadline = time.monotonic() + FATAL_GRACE_SECONDS
        while code == 1 and child.last_words is None and time.monotonic() < deadline and self._closing is None:
            await asyncio.sleep(0.01)
            self._read()
        self._lost(child, child.last_words or f"{child.name} {describe_exit(code)}")

    def _read(self) -> None:
        if self._receiver is None:
            return
        for message in self._receiver.drain(DRAIN_LIMIT):
            child = self._children.get((message.role, message.index))
            if child is not None:
                child.heard = time.monotonic()
                self._handle(child, message)
        if self._receiver.pending():
            asyncio.get_running_loop().call_soon(self._read)

    def _handle(self, child: Child, message: ToSupervisor) -> None:
        match message:
            case Heartbeat():
                child.gauges = message.gauges
            case Progress():
                self._enter_phase(child, message.phase)
                if self._progress:
                    self._progress.update(child.role, child.index, message.phase, message.done, message.total)
            case Ready():
                self._enter_phase(child, "serve")
                child.ready = message
                if self._progress:
                    self._progress.ready(child.role, child.index, time.monotonic() - child.started)
                if self._outcome and not self._outcome.done() and all(c.ready for c in self._children.values()):
                    self._outcome.set_result(None)
            case Fatal():
                child.last_words = message.message
                self._lost(child, message.message)

    def _enter_phase(self, child: Child, phase: str) -> None:
        if phase == child.phase:
            return
        now = time.monotonic()
        if self._progress:
            self._progress.phase_done(child.role, child.index, child.phase, now - child.phase_started)
        child.phase, child.phase_started = phase, now

    def _lost(self, child: Child, reason: str) -> None:
        if self._closing is not None or self._outcome is None or self._failed:
            return
        self._failed = True
        if self._outcome.done():
            self._on_failure(reason if child.name in reason else f"{child.name} died: {reason}")
        else:
            self._outcome.set_exception(StartupError(reason))

    async def _close(self) -> None:
        children = list(self._children.values())
        if self._launched:
            workers = asyncio.gather(*(child.exited.wait() for child in children if child.role == "api_worker"))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(workers, STOP_SECONDS)
        for child in children:
            child.signal(signal.SIGTERM)
        stopped = asyncio.gather(*(child.exited.wait() for child in children))
        try:
            await asyncio.wait_for(stopped, STOP_SECONDS)
        except TimeoutError:
            for child in children:
                child.signal(signal.SIGKILL)
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for child in children:
            child.release()
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_exception(StartupError("the engine was closed while it started"))
        if self._outcome is not None and not self._outcome.cancelled():
            self._outcome.exception()  # seen here, should nobody be awaiting it
        if self._receiver is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            self._receiver = None
        if self._pipes is not None:
            self._pipes.close()
        if self._run_dir is not None:
            self._run_dir.remove()
