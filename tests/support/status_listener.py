"""An API worker that serves nothing: it writes what its parent says of the engine, a line of JSON each, to `statuses`
in the folder ASYNCENGINE_ORDERS. It says that five choices of its requests are unfinished."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from asyncengine.config import SidecarConfig
from asyncengine.wire.answers import EngineStatus
from asyncengine.wire.engine_pipes import ApiProcess
from asyncengine.wire.pipes import Pipes
from asyncengine.wire.sidecar import HEARTBEAT_SECONDS, Reporter, run_sidecar


def serve(config: SidecarConfig, pipes: Pipes, reporter: Reporter) -> None:
    inbox = pipes.receiver(ApiProcess(config.index, config.life).pipe, EngineStatus)
    reporter.ready()
    with Path(os.environ["ASYNCENGINE_ORDERS"], "statuses").open("wb", buffering=0) as file:
        while True:
            inbox.wait(int(1000 * HEARTBEAT_SECONDS))
            reporter.heartbeat({"unfinished": 5})
            for status in inbox.drain():
                file.write(msgspec.json.encode([status.state, status.detail, status.lives]) + b"\n")
                if status.state in ("failed", "closed"):
                    return


if __name__ == "__main__":
    run_sidecar("api_worker", serve)
