"""One of several processes that serve HTTP: `python -m asyncengine.api.worker`, its configuration on stdin.

It listens on sockets that all of them share, so that whoever is idle takes the next connection, has a pipe of its own
for what comes back, and speaks to the sidecars itself. What it must know of the engine its parent tells it.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

import msgspec
import uvloop

from asyncengine.api.app import freeze_start_up, run_app_on
from asyncengine.config import Role, SidecarConfig
from asyncengine.engine_info import EngineInfo, Health
from asyncengine.front_end import FrontEnd
from asyncengine.telemetry import make_tracing
from asyncengine.wire.answers import EngineStatus, ToEngine
from asyncengine.wire.faults import log_faults_without_texts
from asyncengine.wire.pipes import Pipes
from asyncengine.wire.sidecar import HEARTBEAT_SECONDS, Reporter, run_sidecar

ACCEPTORS = 8
"""Fewer than one process alone needs: each connection wakes them in all workers."""
CLOSED = Health(state="closed", detail="the engine was closed")


class ApiWorker(FrontEnd):
    """The front end of one API worker; `health` and the gauges are what its parent said last."""

    def __init__(self, config: SidecarConfig, pipes: Pipes) -> None:
        super().__init__(config.engine, worker=config.index, workers=config.api_workers.number, life=config.life)
        self._health = Health(state="starting", detail="the engine is starting")
        self._gauges: dict[str, int] = {}
        self._begun = asyncio.Event()
        self._ended = asyncio.Event()
        self._open(pipes, Path(config.run_dir), metrics_fd=config.metrics_fd)

    @property
    def health(self) -> Health:
        return self._health

    def gauges(self) -> dict[str, int]:
        """gpu_runner's gauges, plus `open_streams` of this process."""
        return self._gauges | {"open_streams": self._requests.count}

    def own_gauges(self) -> dict[str, int]:
        """What the parent is to know of this process's requests."""
        return {
            "open_streams": self._requests.count,
            "unfinished": self._requests.num_unfinished,
            "draining": int(self._health.state == "draining"),
        }

    async def begun(self) -> bool:
        """Wait for the engine to be ready; False when it has ended instead."""
        await self._begun.wait()
        return not self._ended.is_set()

    async def ended(self) -> None:
        """Wait for the engine's end, whatever the reason; all streams have then been told."""
        await self._ended.wait()

    def end(self, health: Health) -> None:
        self._health = health
        self._end_streams(health.state, health.detail)
        self._ended.set()
        self._begun.set()

    def close(self) -> None:
        self._shut(CLOSED.detail)

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, EngineStatus):
            self._hear_status(message)
        else:
            super()._handle(message)

    def _hear_status(self, status: EngineStatus) -> None:
        health = msgspec.convert({"state": status.state, "detail": status.detail}, Health)
        self._gauges = status.gauges
        if health.state in ("failed", "closed"):
            self.end(health)
            return
        self._health = health
        self._draining = health.state == "draining"
        for place, life in status.lives.items():
            role, _, index = place.rpartition(".")
            self._relink(msgspec.convert(role, Role), int(index), life, status.crash)
        if not self._begun.is_set():
            info = msgspec.convert(status.info, EngineInfo)
            self._serve(info, tokenizer_workers=self._config.tokenizer_workers)
            self._begun.set()


def serve(config: SidecarConfig, pipes: Pipes, reporter: Reporter) -> None:
    """Serve until told to end, by the parent or by SIGTERM."""
    log_faults_without_texts()
    uvloop.run(_serve(config, pipes, reporter))


async def _serve(config: SidecarConfig, pipes: Pipes, reporter: Reporter) -> None:
    worker = ApiWorker(config, pipes)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.end, CLOSED)
    sockets = [socket.socket(fileno=fd) for fd in config.api_workers.listen_fds]
    tracing = make_tracing()
    beating = asyncio.create_task(_beat(worker, reporter))
    try:
        reporter.ready()
        if await worker.begun():
            freeze_start_up()
            http = config.api_workers.http
            runner = await run_app_on(worker, sockets, http, acceptors=ACCEPTORS, tracing=tracing)
            await worker.ended()
            await runner.cleanup()
    finally:
        beating.cancel()
        worker.close()


async def _beat(worker: ApiWorker, reporter: Reporter) -> None:
    while True:
        reporter.heartbeat(worker.own_gauges())
        await asyncio.sleep(HEARTBEAT_SECONDS)


if __name__ == "__main__":
    run_sidecar("api_worker", serve)
