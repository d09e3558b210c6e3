"""What a sidecar does that a test has on strings, for as long as the file with its orders is there.

The file is `{role}.{index}.{life}` in the folder ASYNCENGINE_ORDERS; its text is one of

    wait          it is not ready before the file is gone
    refuse        it cannot start
    stand still   as gpu_runner with a request that gets no step
    fail          it runs, and raises when the file is gone
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from asyncengine.config import SidecarConfig
from asyncengine.errors import StartupError
from asyncengine.wire.sidecar import Reporter

TICK_SECONDS = 0.01


def play(config: SidecarConfig, reporter: Reporter, info: msgspec.Struct | None = None) -> None:
    """Never returns. Heartbeats have the lives of other processes, as the configuration tells them."""
    path = Path(os.environ.get("ASYNCENGINE_ORDERS", "/nowhere"), f"{config.role}.{config.index}.{config.life}")
    order = path.read_text() if path.exists() else ""
    if order == "refuse":
        raise StartupError("the model file is gone")
    while order == "wait" and path.exists():
        time.sleep(TICK_SECONDS)
    reporter.ready(info)
    gauges = {"running": 1, "steps": 7} if order == "stand still" else dict(config.lives)
    while order != "fail" or path.exists():
        if reporter.heartbeat_due():
            reporter.heartbeat(gauges)
        time.sleep(TICK_SECONDS)
    raise ValueError("the weights are upside down")
