"""A detokenizer_proc that is ready at once and never does anything. ASYNCENGINE_STUBBORN makes it deaf to SIGTERM."""

from __future__ import annotations

import os
import signal
import time

from asyncengine.config import SidecarConfig
from asyncengine.wire.pipes import Pipes
from asyncengine.wire.sidecar import Reporter, run_sidecar


def serve(config: SidecarConfig, pipes: Pipes, reporter: Reporter) -> None:
    if "ASYNCENGINE_STUBBORN" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    reporter.ready()
    while True:
        reporter.heartbeat({})
        time.sleep(0.25)


if __name__ == "__main__":
    run_sidecar("detokenizer_proc", serve)
