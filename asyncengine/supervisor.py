"""Starts, watches, replaces and stops the sidecar processes.

    starting   spawn all -> hand each its configuration -> Progress... -> Ready from every one
    serving    Heartbeats; a process's end -> reaped -> another one, next life -> Ready -> on_relink(role, index, life)
               too many of them, or one that refuses to start -> on_failure(sentence), once
    closing    API workers end by themselves, having been told; SIGTERM to all, up to STOP_SECONDS, SIGKILL; sockets
               closed; run directory removed

A child dies with its parent because its death signal is tied to the thread that forked it (the event loop's) and
because only this process holds the other end of its stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from asyncengine.cache_pressure import CachePressure
from asyncengine.child import Child, describe_exit, stop_children
from asyncengine.children import Children
from asyncengine.config import NO_API_WORKERS, SIDECARS, ApiWorkers, EngineConfig, Role
from asyncengine.crashes import Crashes
from asyncengine.engine_info import EngineInfo, Health, describe_engine
from asyncengine.errors import StartupError
from asyncengine.losses import Losses
from asyncengine.model_files import ResolvedModel
from asyncengine.model_search import find_model
from asyncengine.run_dir import RunDir
from asyncengine.startup_progress import StartupProgress
from asyncengine.watchdog import LOOK_SECONDS, Watchdog
from asyncengine.wire.answers import Crash
from asyncengine.wire.pipes import Pipes, Receiver
from asyncengine.wire.reports import (
    Fatal,
    Heartbeat,
    Progress,
    Ready,
    RunnerInfo,
    TokenizerInfo,
    ToSupervisor,
    sender_of,
)
from asyncengine.wire.sidecar import CPU_LIMIT_SIGNAL

logger = logging.getLogger(__name__)

STOP_SECONDS = 5.0
FATAL_GRACE_SECONDS = 0.3
"""How long after a child's exit its last words may still be on their way."""
DRAIN_LIMIT = 256


class Supervisor:
    """Owner of the sidecars, the run directory and this process's pipes. Lives in one event loop.

    `modules` names the module run for a role where it is not the role's own package. `on_failure` is called once, with
    a sentence, when the engine has come to its end after start-up. `on_relink` is called when number `life` is ready in
    the place of a lost sidecar, which may be before `launch` returns. `api_workers`: none where this process serves
    HTTP itself.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_failure: Callable[[str], None],
        on_relink: Callable[[Role, int, int], None] = lambda role, index, life: None,
        progress: StartupProgress | None = None,
        modules: Mapping[Role, str] | None = None,
        api_workers: ApiWorkers = NO_API_WORKERS,
    ) -> None:
        self._config = config
        self._on_failure = on_failure
        self._on_relink = on_relink
        self._progress = progress
        self._children = Children(config, modules=modules or {}, api_workers=api_workers)
        self._restarts = {role: 0 for role, number in self._children.counts().items() if number}
        self._losses = Losses(most=config.max_crashes, window_seconds=config.crash_window_seconds)
        self._crashes = Crashes()
        self._watchdog = Watchdog(hang_timeout_seconds=config.hang_timeout_seconds)
        self._cache_pressure = CachePressure()
        self._looking: asyncio.Task[None] | None = None
        self._model: ResolvedModel | None = None
        self._run_dir: RunDir | None = None
        self._pipes: Pipes | None = None
        self._receiver: Receiver | None = None
        self._fd = -1
        self._watchers: set[asyncio.Task[None]] = set()
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
        model = await find_model(self._config.model)
        if self._progress:
            self._progress.phase_done("engine", 0, "find model", time.monotonic() - started)
        self._check_open()
        try:
            self._run_dir = RunDir()
        except OSError as error:
            raise StartupError(f"cannot make a directory for the engine's sockets: {error}") from error
        self._pipes = Pipes(self._run_dir.path)
        self._receiver = self._pipes.receiver("supervisor", ToSupervisor, on_malformed=self._hear_malformed)
        self._fd = self._receiver.fd
        asyncio.get_running_loop().add_reader(self._fd, self._read)
        return model

    async def launch(self, model: ResolvedModel) -> None:
        """Start every sidecar and wait until all are ready; raises `StartupError`. `close` undoes it."""
        self._check_open()
        self._model = model
        self._outcome = asyncio.get_running_loop().create_future()
        for role, count in self._children.counts().items():
            for index in range(count):
                self._spawn(role, index)
        self._looking = asyncio.create_task(self._look_again_and_again())
        await self._outcome

    def engine_info(self, model: ResolvedModel) -> EngineInfo:
        """What the launched sidecars said about themselves."""
        return describe_engine(
            self._config,
            model,
            msgspec.convert(self._children["gpu_runner", 0].info, RunnerInfo),
            msgspec.convert(self._children["tokenizer_proc", 0].info, TokenizerInfo),
        )

    def pids(self) -> dict[str, int]:
        """Process ids by name (the role, with the worker's index where there are several)."""
        return self._children.pids()

    def gauges(self, role: Role, index: int = 0) -> dict[str, int]:
        """The gauges of a sidecar's latest heartbeat; empty before the first."""
        child = self._children.get((role, index))
        return dict(child.gauges) if child else {}

    def engine_gauges(self, *, unfinished: int = 0) -> dict[str, int]:
        """Those of gpu_runner, for each role its `{role}_restarts`, and `convicted_requests`. While gpu_runner is being
        replaced all choices wait: `unfinished` ones of this process, and those of API workers."""
        gauges = self.gauges("gpu_runner")
        runner = self._children.get(("gpu_runner", 0))
        if runner is not None and runner.life and not runner.ready:
            unfinished += sum(
                child.gauges.get("unfinished", 0) for child in self._children if child.role == "api_worker"
            )
            gauges |= {"running": 0, "waiting": unfinished, "waiting_for_pages": 0}
            gauges.pop("waiting_background", None)  # of which class they are is not known here
        restarts = {f"{role}_restarts": count for role, count in self._restarts.items()}
        return gauges | restarts | {"convicted_requests": self._crashes.num_convicted}

    @property
    def crash(self) -> Crash | None:
        """The latest one of gpu_runner."""
        return self._crashes.latest

    def lives(self) -> dict[str, int]:
        """Of every sidecar that took a lost one's place and is ready, by `worker_key`."""
        return self._children.lives()

    def health(self) -> Health:
        """Of the processes, once launched: "ready", "recovering" or "stalled"."""
        if recovering := self.recovering():
            return Health(state="recovering", detail=f"being replaced: {', '.join(recovering)}")
        if stalled := self.stalled():
            return Health(state="stalled", detail=f"no sign of life from {', '.join(stalled)}")
        return Health(state="ready")

    def recovering(self) -> list[str]:
        """The sidecars that were lost and whose successors are not ready yet, and since when. Nobody waits for an API
        worker: the others serve what it would have."""
        now = time.monotonic()
        return [
            f"{child.name} (lost {now - lost:.1f} s ago)"
            for child in self._children
            if child.role in SIDECARS and (lost := self._losses.lost_at(child.name)) is not None
        ]

    def stalled(self) -> list[str]:
        """Names of the ready processes that have not been heard of for too long."""
        self._read()
        return [child.name for child in self._watchdog.stalled(list(self._children))]

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

    def _spawn(self, role: Role, index: int) -> None:
        child = self._children.start(role, index, self.run_dir)
        watcher = asyncio.create_task(self._watch(child))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _watch(self, child: Child) -> None:
        assert self._model is not None
        config = self._children.config_of(child, model_path=self._model.path, run_dir=self.run_dir)
        await child.configure(config)
        code = await child.wait()
        deadline = time.monotonic() + FATAL_GRACE_SECONDS
        while code == 1 and child.last_words is None and time.monotonic() < deadline and self._closing is None:
            await asyncio.sleep(0.01)
            self._read()
        child.release()
        self._end(child, code)

    async def _look_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._read()
            if report := self._watchdog.look(list(self._children), self.run_dir):
                logger.warning("%s", report)
            if report := self._cache_pressure.look(self.gauges("gpu_runner"), time.monotonic()):
                logger.warning("%s", report)

    def _read(self) -> None:
        if self._receiver is None:
            return
        for message in self._receiver.drain(DRAIN_LIMIT):
            child = self._children.get((message.role, message.index))
            if child is not None and message.life == child.life:
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
                child.ready, child.info = message, message.info
                if child.role == "gpu_runner":
                    self._crashes.serves(self.run_dir)
                if self._progress:
                    self._progress.ready(child.role, child.index, child.phase_started - child.started)
                if child.life:
                    self._recovered(child)
                if self._outcome and not self._outcome.done() and self._children.all_ready():
                    self._outcome.set_result(None)
            case Fatal():
                child.last_words = message.message
                if not self._launched:
                    self._fail(message.message)
                else:
                    self._losses.begin(child.name, time.monotonic())

    def _hear_malformed(self, frame: bytes) -> None:
        """It may have been the `Ready` that is waited for: of its sender or, where it does not tell, of any."""
        sender = sender_of(frame)
        waited_for = [
            child for child in self._children if not child.ready and sender in (None, (child.role, child.index))
        ]
        if not waited_for:
            return
        reason = f"{' or '.join(child.name for child in waited_for)} sent a report that cannot be read"
        if not self._launched:
            self._fail(reason)
            return
        for child in waited_for:
            child.hung = f"{reason}, and was killed"
            child.signal(signal.SIGKILL)

    def _enter_phase(self, child: Child, phase: str) -> None:
        if phase == child.phase:
            return
        now = time.monotonic()
        if self._progress:
            self._progress.phase_done(child.role, child.index, child.phase, now - child.phase_started)
        child.phase, child.phase_started = phase, now

    def _end(self, child: Child, code: int) -> None:
        """`child` is no more, and whatever it held is free."""
        if self._closing is not None or self._failed:
            return
        reason = child.last_words or child.hung or f"{child.name} {describe_exit(code)}"
        if not self._launched and code >= 0:
            self._fail(reason)
            return
        reason = reason if child.name in reason else f"{child.name} died: {reason}"
        if child.last_words is not None and child.ready is None:
            self._fail(f"{child.name} was lost and cannot be replaced: {child.last_words}")
            return
        now = time.monotonic()
        self._losses.begin(child.name, now)
        crash = self._crashes.judge(child, code) if child.role == "gpu_runner" else None
        too_many = None
        if crash is not None and crash.convicts:
            reason = f"{reason}, as it ran a request alone that may have crashed it before"
            too_many = self._losses.excuse(reason, in_a_row=self._crashes.num_in_a_row)
        # a limit that was kept is no crash: else a few such prompts would end the engine
        elif -code != CPU_LIMIT_SIGNAL:
            too_many = self._losses.count(child.name, reason, now, crashed=crash is not None)
        if too_many:
            self._fail(too_many)
            return
        logger.warning("%s; it is being replaced", reason)
        try:
            self._spawn(child.role, child.index)
        except StartupError as error:
            self._fail(error.message)

    def _recovered(self, child: Child) -> None:
        seconds = self._losses.end(child.name, time.monotonic())
        self._restarts[child.role] += 1
        logger.warning("%s was replaced within %.1f s", child.name, seconds)
        self._on_relink(child.role, child.index, child.life)

    def _fail(self, reason: str) -> None:
        if self._closing is not None or self._outcome is None or self._failed:
            return
        self._failed = True
        if self._outcome.done():
            self._on_failure(reason)
        else:
            self._outcome.set_exception(StartupError(reason))

    async def _close(self) -> None:
        children = list(self._children)
        if self._looking is not None:
            self._looking.cancel()
        if self._launched:
            workers = asyncio.gather(
                *(child.exited.wait() for child in children if child.role == "api_worker" and child.ready)
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(workers, STOP_SECONDS)
        await stop_children(children, STOP_SECONDS)
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
        self._crashes.forget()
        if self._pipes is not None:
            self._pipes.close()
        self._children.close()
        if self._run_dir is not None:
            self._run_dir.remove()
