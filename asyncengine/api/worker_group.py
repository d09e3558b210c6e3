"""The parent of several processes that serve HTTP: owns the sidecars, the workers and their listening sockets.

    this process   bind | start sidecars and workers | all ready: listen, status "ready" | status | status "failed"
    API worker          |                      Ready |                  accepts, serves  |        | ends streams, exits

It handles no request itself. A process that is lost is replaced, and the status tells the workers of its successor. The
connections of a lost worker are gone with it; those that nobody had accepted wait in the sockets, which all share.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Mapping, Sequence

import msgspec

from asyncengine.api.app import BACKLOG, cannot_listen
from asyncengine.config import HTTP_DEFAULTS, ApiWorkers, EngineConfig, HttpOptions, Role
from asyncengine.engine_info import DRAINING, EngineInfo, Health
from asyncengine.errors import StartupError
from asyncengine.startup_progress import StartupProgress
from asyncengine.supervisor import Supervisor
from asyncengine.wire.answers import EngineStatus
from asyncengine.wire.engine_pipes import ApiProcess
from asyncengine.wire.pipes import Sender
from asyncengine.wire.sidecar import HEARTBEAT_SECONDS

logger = logging.getLogger(__name__)

DRAIN_POLL_SECONDS = 0.05


class WorkerGroup:
    """An engine behind `workers` API processes that serve on `sockets`, which are bound and which it then owns."""

    info: EngineInfo
    """Known once started."""

    def __init__(
        self,
        config: EngineConfig,
        sockets: Sequence[socket.socket],
        *,
        workers: int,
        http: HttpOptions = HTTP_DEFAULTS,
        progress: StartupProgress | None = None,
        modules: Mapping[Role, str] | None = None,
    ) -> None:
        self._sockets = sockets
        self._workers = workers
        self._supervisor = Supervisor(
            config,
            on_failure=self._fail,
            on_relink=self._relink,
            progress=progress,
            modules=modules,
            api_workers=ApiWorkers(
                number=workers, listen_fds=tuple(listener.fileno() for listener in sockets), http=http
            ),
        )
        self._health = Health(state="starting", detail="the engine is starting")
        self._senders: list[Sender] = []
        self._failed = asyncio.Event()
        self._telling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises `StartupError`, and then leaves nothing behind."""
        try:
            model = await self._supervisor.prepare()
            self._senders = [self._sender(ApiProcess(index)) for index in range(self._workers)]
            await self._supervisor.launch(model)
            if self._failed.is_set():
                raise StartupError(self._health.detail)
            self.info = self._supervisor.engine_info(model)
            for listener in self._sockets:
                try:
                    listener.listen(BACKLOG)
                except OSError as error:
                    host, port, *_ = listener.getsockname()
                    raise cannot_listen(host, port, error) from error
            self._health = Health(state="ready")
            self._telling = asyncio.create_task(self._tell_again_and_again())
        except BaseException:
            await self.close()
            raise

    @property
    def port(self) -> int:
        """The port that is served."""
        return int(self._sockets[0].getsockname()[1])

    async def wait_failed(self) -> str:
        """Sleep until a process is lost, which the engine cannot recover from; returns what happened."""
        await self._failed.wait()
        return self._health.detail

    async def drain(self, seconds: float) -> bool:
        """Take no more requests, and wait until those there are have ended, at most so long. False when the engine has
        failed meanwhile."""
        if not self._failed.is_set():
            self._health = DRAINING
            self._tell()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._failed.is_set() and not all(map(self._is_drained, range(self._workers))):
                    await asyncio.sleep(DRAIN_POLL_SECONDS)
        return not self._failed.is_set()

    def _is_drained(self, worker: int) -> bool:
        gauges = self._supervisor.gauges("api_worker", worker)
        return bool(gauges.get("draining")) and gauges["open_streams"] == 0

    async def close(self) -> None:
        """End all streams with an error that their clients can read, then all processes. Idempotent."""
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        if self._health.state not in ("failed", "closed"):
            self._health = Health(state="closed", detail="the engine was closed")
            self._tell()
        try:
            await self._supervisor.close()
        finally:  # to its end, though its caller be cancelled
            self._senders = []
            for listener in self._sockets:
                listener.close()

    async def _tell_again_and_again(self) -> None:
        while True:
            self._tell()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def _tell(self) -> None:
        """Send all workers the engine's status. One that does not read misses some, never the last."""
        health = self._health
        if health.state == "ready":
            health = self._supervisor.health()
        serving = health.state not in ("failed", "closed")
        info = msgspec.to_builtins(self.info) if serving else {}
        supervisor = self._supervisor
        status = EngineStatus(
            health.state, health.detail, info, supervisor.engine_gauges(), supervisor.lives(), supervisor.crash
        )
        for sender in self._senders:
            if serving:
                sender.try_send(status)
            else:
                sender.send(status)

    def _sender(self, process: ApiProcess) -> Sender:
        return self._supervisor.pipes.sender(process.pipe)

    def _relink(self, role: Role, index: int, life: int) -> None:
        if role == "api_worker":
            self._supervisor.pipes.drop(self._senders[index])
            self._senders[index] = self._sender(ApiProcess(index, life))
        if self._telling is not None:
            self._tell()  # at once: requests wait for it

    def _fail(self, reason: str) -> None:
        logger.error("the engine has failed: %s", reason)
        self._health = Health(state="failed", detail=reason)
        self._tell()
        self._failed.set()
