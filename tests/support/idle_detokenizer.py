"""A detokenizer_proc that is ready at once and never does anything, unless it is ordered otherwise (`support.puppet`).
ASYNCENGINE_STUBBORN makes it deaf to SIGTERM."""

from __future__ import annotations

import os
import signal

from support.puppet import play

from asyncengine.config import SidecarConfig
from asyncengine.wire.pipes import Pipes
from asyncengine.wire.sidecar import Reporter, run_sidecar


def serve(config: SidecarConfig, pipes: Pipes, reporter: Reporter) -> None:
    if "ASYNCENGINE_STUBBORN" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    play(config, reporter)


if __name__ == "__main__":
    run_sidecar("detokenizer_proc", serve)
